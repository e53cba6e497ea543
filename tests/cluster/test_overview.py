# SPDX-License-Identifier: Apache-2.0
"""What `tidal status` shows and `tidal drain` does: against a real registry and stand-ins, and their pure parts."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from tests.cluster.serve_bed import Bed
from tests.cluster.standins import until
from tests.etcd import free_port
from tidal_connector.cli.main import app
from tidal_connector.cli.status_table import drawn
from tidal_connector.cluster.announcer import judge, said_of
from tidal_connector.cluster.orders import Order, Want, order_key
from tidal_connector.cluster.overview import EngineLine, Load, Overview, compose, load_of, overview
from tidal_connector.cluster.prober import Seen
from tidal_connector.cluster.rollout_records import Assignment, Kind, Rollout, Status, view_of
from tidal_connector.cluster.series import parse_series, work_left
from tidal_connector.cluster.serving import SuperviseConfig
from tidal_connector.cluster.standin_rooms import layout
from tidal_connector.cluster.supervise import Drain
from tidal_connector.cluster.vllm_args import find_option, has_flag, served_name, without_option
from tidal_connector.config import child_environment
from tidal_connector.control.messages import About, Identity
from tidal_connector.errors import ConfigError
from tidal_connector.ids import EngineId, Incarnation, Role
from tidal_connector.registry.base import Entry, Put, Snapshot
from tidal_connector.registry.members import Member, Members, State

TIDAL = [sys.executable, "-m", "tidal_connector.cli"]
ABOUT = About(Identity(EngineId("e"), Incarnation("1")), True, False, layout("v1"), "f", 9.0)


def tidal(*words: str) -> Result:
    """Run a command in this process."""
    return CliRunner(env={"COLUMNS": "150"}).invoke(app, words)


def ask_until(leaving: threading.Event, url: str) -> None:
    """Be a client whose request is being served, until told to leave."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "x" * 60000, "max_tokens": 20}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        assert leaving.wait(60)


# --- with engines


def test_status_shows_the_cluster_and_says_by_its_exit_whether_all_is_well(bed: Bed) -> None:
    where = ("--registry", bed.etcd.url, "--cluster", bed.name)
    empty = tidal("status", *where)
    assert (empty.exit_code, "no engine is announced" in empty.stdout) == (1, True)
    prefill = bed.serve("prefill", "prefill-0", node="n1", revision="r1")
    decode = bed.serve("decode", "decode-0", standin=("--token-ms", "60000"))
    member = decode.ready()
    prefill.ready()
    leaving = threading.Event()
    client = threading.Thread(target=ask_until, args=(leaving, member.http))
    client.start()
    until(lambda: (load := overview(bed.store).engines[1].load) and load.running == 1)
    shown = tidal("status", *where)
    whole = tidal("status", *where, "--json")
    leaving.set()
    client.join()
    assert shown.exit_code == whole.exit_code == 0
    lines = [re.split(r" {2,}", line.strip()) for line in shown.stdout.splitlines() if line]
    assert " ".join(lines[0]) == "ENGINE ROLE STATE NODE REVISION ADDRESS REQUESTS TRANSFERS POOL SLOTS HITS"
    assert lines[1][:5] == ["prefill-0", "prefill", "ready", "n1", "r1"]
    assert lines[2][:1] + lines[2][5:9] == ["decode-0", member.http.removeprefix("http://"), "1", "0", "23 %"]
    (_, engine) = msgspec.json.decode(whole.stdout, type=Overview).engines
    assert (engine.layout, engine.load and engine.load.pool_used) == (member.layout, 938)
    decode.process.send_signal(signal.SIGTERM)
    decode.ends()
    prefill.signal_engine(signal.SIGSTOP)
    prefill.reaches(State.DOWN)
    began = time.monotonic()
    bad = tidal("status", *where, "--timeout", "0.5")
    assert bad.exit_code == 1
    assert "! prefill-0 is down: /health has not answered" in bad.stdout
    assert time.monotonic() - began < 10
    prefill.signal_engine(signal.SIGCONT)


def test_status_watches_until_it_is_interrupted_and_outlives_an_engine(bed: Bed) -> None:
    served = bed.serve("decode", "decode-0")
    served.ready()
    where = ("--registry", bed.etcd.url, "--cluster", bed.name)
    watching = subprocess.Popen(
        [*TIDAL, "status", *where, "--watch", "--every", "0.2", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    assert watching.stdout is not None
    try:
        looks = iter(watching.stdout.readline, "")
        assert [item["state"] for item in json.loads(next(looks))["engines"]] == ["ready"]
        served.process.send_signal(signal.SIGTERM)
        states = []
        for line in looks:
            states.append([item["state"] for item in json.loads(line)["engines"]])
            if not states[-1]:
                break
        assert ["draining"] in states
        watching.send_signal(signal.SIGINT)
        assert watching.wait(10) == 0
    finally:
        watching.kill()
        watching.wait()
        watching.stdout.close()


def test_a_registry_that_cannot_be_reached_is_status_2(tmp_path: Path) -> None:
    nobody = ("--registry", f"etcd://127.0.0.1:{free_port()}")
    for words in (
        ("status", *nobody),
        ("drain", "decode-0", *nobody),
        ("status",),
        ("status", "--config", "/dev/null"),
    ):
        done = tidal(*words)
        assert done.exit_code == 2, words
        assert "Traceback" not in done.stderr
    file = tmp_path / "decode.toml"
    file.write_text(f'engine = "e"\n[registry]\nurl = "{nobody[1]}"\ncluster = "c"\n')
    named = tidal("status", "--config", str(file))
    assert (named.exit_code, nobody[1].removeprefix("etcd://") in named.stderr) == (2, True)


def test_drain_orders_waits_and_withdraws(bed: Bed) -> None:
    where = ("--registry", bed.etcd.url, "--cluster", bed.name)
    served = bed.serve("decode", "decode-0")
    served.ready()
    done = tidal("drain", "decode-0", *where, "--wait", "--deadline", "5")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "decode-0: it has stopped")
    assert served.ends() == 0
    unknown = tidal("drain", "decode-0", *where)
    assert unknown.exit_code == 2
    assert "engine 'decode-0' is not in the registry; there are: none" in unknown.stderr
    bed.store.write([Put(order_key("decode-0"), b"{}")])
    assert json.loads(tidal("drain", "decode-0", *where, "--cancel", "--json").stdout)["cancelled"] is True
    missing = tidal("drain", "decode-0", *where, "--cancel")
    assert (missing.exit_code, "'decode-0' is not in the registry" in missing.stderr) == (2, True)
    bed.store.write([Put("rollout/engines/decode-0", b"{}")])
    assert json.loads(tidal("drain", "decode-0", *where, "--cancel", "--json").stdout)["cancelled"] is False


def test_an_engine_of_a_rollout_leaves_the_order_that_keeps_it_down(bed: Bed) -> None:
    served = bed.serve("decode", "decode-0", revision="r1")
    served.ready()
    served.order(Order(Want.DRAIN, 5.0))
    assert served.ends() == 0
    assert order_key("decode-0") in bed.store.read(order_key("decode-0")).entries
    again = tidal("drain", "decode-0", "--registry", bed.etcd.url, "--cluster", bed.name)
    assert again.exit_code == 2
    assert "drained as ordered; to have it started again: tidal drain decode-0 --cancel" in again.stderr


# --- pure


def seen(**news: object) -> Seen:
    return msgspec.structs.replace(Seen(healthy_at=100.0, about=ABOUT, about_at=100.0), **news)


@pytest.mark.parametrize(
    ("found", "now", "state", "note"),
    [
        (Seen(), 1e6, State.STARTING, ""),
        (Seen(healthy_at=100.0), 1e6, State.STARTING, ""),
        (seen(), 100.5, State.READY, ""),
        (seen(), 106.0, State.READY, ""),
        (seen(), 107.0, State.DOWN, "/health has not answered for 7 s"),
        (seen(healthy_at=120.0), 117.9, State.READY, ""),
        (seen(healthy_at=120.0), 118.1, State.DOWN, "the control channel has not answered for 18 s"),
        (seen(fault="mixed up"), 100.0, State.DOWN, "mixed up"),
    ],
)
def test_an_engine_is_what_its_last_answers_say(found: Seen, now: float, state: State, note: str) -> None:
    assert judge(found, SuperviseConfig(), now) == (state, note)


def test_an_engine_is_idle_when_it_was_seen_so_twice_after_it_settled() -> None:
    drain = Drain(began=0.0, settled=1.0, deadline=9.0, ordered=True)
    looks = [(0.5, {}), (1.2, {"running": 1}), (1.4, {}), (1.6, {}), (1.7, {"transfers": 1}), (1.8, {}), (2.4, {})]
    over = [drain.over(Seen(work=work, work_at=at)) for at, work in looks]
    assert over == [False] * 6 + [True]
    silent = Drain(began=0.0, settled=1.0, deadline=9.0, ordered=True)
    assert not any(silent.over(Seen()) for _ in range(9))


def test_metrics_are_summed_over_labels_and_rubbish_is_left_out() -> None:
    text = (
        "# HELP vllm:num_requests_running x\n"
        'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1\n'
        'tidal:selection_hits_total{a="b c"} 3e2\ntidal:selection_misses_total 100\n'
        "tidal:pool_pages much\ntidal:pages_held 4\nother 1\n"
    )
    series = parse_series(text)
    assert series["vllm:num_requests_running"] == 3
    assert "other" not in series
    assert work_left(series) == {"running": 3, "pages held": 4}
    load = load_of(series)
    assert (load.running, load.pool_pages, load.hit_rate()) == (3, 0, 0.75)
    assert load.hit_rate(Load(hits=200, misses=0)) == 0.5
    assert load.hit_rate(Load(hits=900, misses=0)) == 0.75  # an earlier life counted further
    assert Load().hit_rate() is None


def test_vllms_arguments_are_read_in_each_of_their_forms() -> None:
    args = ["--model", "m", "--port=1", "--served_model_name", "n", "--port", "2", "--enforce-eager"]
    assert (find_option(args, "--port"), find_option(args, "--host"), served_name(args)) == ("2", None, "n")
    assert without_option(args, "--port") == ["--model", "m", "--served_model_name", "n", "--enforce-eager"]
    assert has_flag(args, "--served-model-name")
    assert not has_flag(args, "--por")
    with pytest.raises(ConfigError, match="its value is missing"):
        find_option(["--port"], "--port")


def test_an_engine_that_only_a_rollout_knows_is_absent() -> None:
    member = Member(
        engine=EngineId("prefill-0"), role=Role.PREFILL, state=State.DRAINING, http="http://h:1", note="why"
    )
    assigned = (
        b'{"engine":"decode-0","group":"decode","slot":0,"node":"n1","role":"decode","template":"t","revision":"r"}'
    )
    view = view_of(Snapshot({"rollout/engines/decode-0": Entry(assigned, 1, False)}))
    found = compose(Members({member.engine: member}, odd={"members/x": "unreadable"}), {}, view)
    assert [(line.engine, line.state) for line in found.engines] == [("prefill-0", "draining"), ("decode-0", "absent")]
    assert found.problems == (
        "node n1 has no agent, and engines that it shall keep",
        "members/x: unreadable",
        "no prefill engine is ready",
        "no decode engine is ready",
        "prefill-0 is draining: why",
        "decode-0 is absent",
    )


def rollout_of(status: str, reason: str) -> Entry:
    """The state of a rollout as it stands in the registry."""
    record = Rollout(number=1, token="t", kind=Kind.APPLY, revision="r", status=Status(status), reason=reason)
    return Entry(msgspec.json.encode(record), 1, False)


@pytest.mark.parametrize(
    ("roles", "missing"),
    [
        ((Role.PREFILL,), ("no decode engine is ready",)),
        ((Role.DECODE,), ("no prefill engine is ready",)),
        ((Role.PREFILL, Role.DECODE), ()),
        ((Role.BOTH,), ()),
    ],
)
def test_a_cluster_that_can_serve_nothing_is_a_problem(roles: tuple[Role, ...], missing: tuple[str, ...]) -> None:
    members = {
        EngineId(role): Member(engine=EngineId(role), role=role, state=State.READY, http="http://h:1") for role in roles
    }
    loads = dict.fromkeys(members, Load())
    assert compose(Members(members), loads, view_of(Snapshot({}))).problems == missing
    for status, said in (
        ("running", ("the rollout waits: no agent",)),
        ("halted", ("the rollout is halted: no agent",)),
    ):
        view = view_of(Snapshot({"rollout/state": rollout_of(status, "no agent")}))
        assert compose(Members(members), loads, view).problems == said + missing
    done = view_of(Snapshot({"rollout/state": rollout_of("done", "old")}))
    assert compose(Members(members), loads, done).problems == missing


def test_an_order_that_keeps_an_engine_down_is_said_with_what_ends_it() -> None:
    assigned = Assignment(
        engine="decode-0", group="g", slot=0, node="n", role=Role.DECODE, template="t", revision="r", why="of before"
    )
    order = Entry(msgspec.json.encode(Order(Want.DRAIN, by="me@here")), 1, False)
    kept = Entry(msgspec.json.encode(assigned), 1, False)
    view = view_of(Snapshot({"rollout/engines/decode-0": kept, "orders/decode-0": order, "orders/x": order}))
    problems = compose(Members({}), {}, view).problems
    ends = "to have it started again: tidal drain decode-0 --cancel"
    assert f"decode-0 is absent: drained as ordered by me@here; {ends}" in problems
    assert "an order to drain x stands, which is not there; to withdraw it: tidal drain x --cancel" in problems
    without = view_of(Snapshot({"rollout/engines/decode-0": kept}))
    assert "decode-0 is absent: of before" in compose(Members({}), {}, without).problems


def test_watching_into_a_file_writes_one_table_after_another(tmp_path: Path) -> None:
    (tmp_path / "default").mkdir()  # the cluster: status makes none
    command = [*TIDAL, "status", "--registry", f"file://{tmp_path}", "--watch", "--every", "0.2"]
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment())
    assert watching.stdout is not None
    try:
        lines = iter(watching.stdout.readline, "")
        assert next((line for line in lines if line.startswith("! no engine")), "") == "! no engine is announced\n"
    finally:
        watching.kill()
        watching.wait()
        watching.stdout.close()


def test_a_name_that_is_taken_is_said_with_its_holder_and_the_remedy(bed: Bed) -> None:
    first = bed.serve("decode", "decode-0", node="n1")
    holder = first.ready()
    second = bed.serve("decode", "decode-0")
    until(lambda: "engine decode-0 is ready" in second.said(), what="the second engine ready")
    for word in (
        f"another engine of this name is announced, at {holder.http} on node n1; give this one another name",
        "(not listed: another one has its name)",
    ):
        until(lambda word=word: word in second.said(), what=word)
    first.process.send_signal(signal.SIGTERM)
    assert first.ends() == 0
    until(lambda: "engine decode-0 is listed now" in second.said(), what="the second engine's turn")
    assert "not listed" not in first.said()


def test_the_table_says_what_is_not_known_and_what_is_old() -> None:
    line = EngineLine(engine="d", role="decode", state="ready", load=Load(running=2, waiting=3, slots=8, slots_used=2))
    lost = EngineLine(engine="e", role="decode", state="down")
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - closed with the process
    console.print(drawn(Overview(engines=(line, lost), rollout="r1: done"), lost="the registry does not answer"))
    text = console.export_text()
    assert re.search(r"d +decode +ready .* 2\+3 +0 +- +25 % +-", text)
    assert re.search(r"e +decode +down .* \? +\? +\? +\? +\?", text)
    assert "this is old: the registry does not answer" in text
    console.print(drawn(Overview(engines=()), lost="the registry does not answer"))
    assert "nothing is known yet: the registry does not answer" in console.export_text()


def test_a_state_is_one_line_of_the_log() -> None:
    member = Member(engine=EngineId("e"), role=Role.BOTH, state=State.READY, http="http://h:1", control="h:2")
    assert said_of(member) == "engine e is ready at http://h:1, control h:2, incarnation "
    assert said_of(msgspec.structs.replace(member, state=State.DOWN, note="n")) == "engine e is down: n"
