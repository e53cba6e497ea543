# SPDX-License-Identifier: Apache-2.0
"""FR-18 and FR-20: what is announced can be reached, and is what listens; everything else is refused at start."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.cluster.serve_bed import Bed, answer_of, port_of
from tests.cluster.standins import standin, until
from tests.etcd import free_port
from tidal_connector.cluster.announcer import judge
from tidal_connector.cluster.engine_plan import EnginePlan, Ports, plan_engine
from tidal_connector.cluster.listeners import PortTaken, inodes_of, listening_fault, take_port
from tidal_connector.cluster.prober import Prober
from tidal_connector.cluster.serving import HttpConfig, ServeConfig, SuperviseConfig
from tidal_connector.control.inquiry import inquire
from tidal_connector.errors import ConfigError
from tidal_connector.ids import Role
from tidal_connector.registry.members import Member, State
from tidal_connector.registry.settings import RegistryConfig

FAR = RegistryConfig(url="etcd://10.0.0.9:2379")
HERE = RegistryConfig(url="etcd://127.0.0.1:2379")


@contextlib.contextmanager
def taken(*ports: int, host: str = "127.0.0.1") -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server((host, port)))
        yield


def two_ports() -> int:
    """A port that is free together with the next."""
    for _ in range(50):
        port = free_port()
        with contextlib.suppress(OSError), taken(port, port + 1):
            return port
    raise AssertionError("no two free ports")


def planned(registry: RegistryConfig = HERE, *args: str, **settings: Any) -> EnginePlan:
    with Ports() as ports:
        return plan_engine(ServeConfig("e", registry=registry, **settings), Role.DECODE, args, ports)


def assert_it_is_what_listens(member: Member, pids: list[int]) -> None:
    """The published addresses answer as this engine, and its own processes are behind them."""
    assert inquire(member.control, 5.0).identity.incarnation == member.incarnation
    assert httpx.get(member.http + "/health", trust_env=False).status_code == 200
    for url in (member.http, member.control):
        assert listening_fault("it", "127.0.0.1", port_of(url), pids) == ""


# --- FR-20: ports


def test_fr_20_three_engines_with_equal_ports_all_listen_where_they_are_announced(bed: Bed) -> None:
    http, control = two_ports(), two_ports()
    tidal = {"control": {"bind": f"127.0.0.1:{control}"}}
    names = (("prefill", "prefill-0"), ("decode", "decode-0"), ("prefill", "prefill-1"))
    served = [bed.serve(role, engine, "--port", str(http), tidal=tidal) for role, engine in names]
    members = [each.ready() for each in served]
    for member, each in zip(members, served, strict=True):
        assert_it_is_what_listens(member, each.children())
    assert len({member.http for member in members}) == len({member.control for member in members}) == 3
    assert http in {port_of(member.http) for member in members}
    assert sum("is taken instead, and announced" in each.said() for each in served) == 2


def test_fr_20_a_port_that_is_occupied_beforehand_is_not_announced(bed: Bed) -> None:
    http, control = two_ports(), two_ports()
    tidal = {"control": {"bind": f"127.0.0.1:{control}"}}
    with taken(http, http + 1, control, control + 1):
        served = bed.serve("decode", "decode-0", "--port", str(http), tidal=tidal)
        member = served.ready()
        assert_it_is_what_listens(member, served.children())
    assert port_of(member.http) not in (http, http + 1)
    assert port_of(member.control) not in (control, control + 1)


def test_fr_20_a_port_that_others_were_promised_is_not_replaced(bed: Bed) -> None:
    http = two_ports()
    with taken(http):
        place = {"bind": f"127.0.0.1:{http}", "advertise": f"127.0.0.1:{http}"}
        served = bed.serve("decode", "decode-0", http=place)
        assert served.ends() == 2
    assert f"http.bind: port {http} of 127.0.0.1 is taken; choose another one, or 0" in served.said()
    assert bed.members() == {}


def test_fr_20_a_restart_within_time_wait_gets_the_same_port(bed: Bed) -> None:
    http = two_ports()
    served = bed.serve("both", "one", "--port", str(http), standin=("--token-ms", "200"))
    first = served.ready()
    with socket.create_connection(("127.0.0.1", http)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        while client.recv(4096):  # the server closes first, so that its side is what waits
            pass
    served.process.send_signal(signal.SIGTERM)
    assert served.ends() == 0
    tables = Path("/proc/self/net/tcp").read_text()
    assert f":{http:04X} " in tables, "no connection is in TIME_WAIT: the test proves nothing"
    again = bed.serve("both", "one", "--port", str(http)).ready()
    assert again.http == first.http
    assert again.incarnation != first.incarnation


def test_fr_20_an_engine_whose_port_is_taken_while_it_starts_begins_again_elsewhere(bed: Bed) -> None:
    http = two_ports()
    served = bed.serve("decode", "decode-0", "--port", str(http), standin=("--start-s", "1.5"))
    served.reaches(State.STARTING)
    until(lambda: inodes_of(served.children()), what="the engine's socket")
    with socket.socket() as rival:  # an engine binds long before it listens
        rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rival.bind(("127.0.0.1", http))
        rival.listen()
        member = served.ready()
        assert_it_is_what_listens(member, served.children())
    assert port_of(member.http) != http


def test_fr_20_an_engine_that_shares_its_port_is_no_engine(tmp_path: Path) -> None:
    """vLLM sets SO_REUSEPORT: the kernel lets two listen, and each gets some of the other's requests."""
    with socket.socket() as mine, socket.socket() as other:
        for each in (mine, other):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        mine.bind(("127.0.0.1", 0))
        port = mine.getsockname()[1]
        other.bind(("127.0.0.1", port))
        mine.listen()
        assert listening_fault("it", "127.0.0.1", port, [os.getpid()]) == ""
        assert "another process listens on port" in listening_fault("it", "127.0.0.1", port, [])
        with standin("decode", "decode-0", tmp_path / "d.log") as engine:
            assert "nobody listens" in listening_fault("it", "127.0.0.1", 1, [engine.process.pid])


def test_fr_20_two_that_choose_at_the_same_time_choose_apart() -> None:
    with take_port("it", "127.0.0.1", 0) as first, pytest.raises(PortTaken, match=f"port {first.port} .* is taken"):
        take_port("it", "127.0.0.1", first.port)
    with take_port("it", "127.0.0.1", first.port), take_port("it", "127.0.0.2", first.port):
        pass


def test_another_engine_behind_the_address_is_never_announced_as_this_one(tmp_path: Path) -> None:
    with standin("decode", "decode-9", tmp_path / "d.log") as other:
        plan = EnginePlan(
            engine="decode-0",
            role=Role.DECODE,
            model="m",
            node="n",
            revision="",
            command=(),
            http_bind=("127.0.0.1", port_of(other.http)),
            http=other.http,
            http_here=other.http,
            control_bind=("127.0.0.1", port_of(other.control)),
            control=other.control,
            control_here=other.control,
        )
        mine = msgspec.structs.replace(plan, engine="decode-9")
        for expected, pids, words in (
            (plan, [other.process.pid], "engine 'decode-9' answers at"),
            (mine, [], "another process listens on port"),
        ):
            with Prober(expected, SuperviseConfig(probe_every_s=0.1), lambda pids=pids: pids) as prober:
                until(lambda: prober.seen.fault)
                assert words in prober.seen.fault
                assert not prober.seen.known() or judge(prober.seen, SuperviseConfig(), 0.0)[0] is State.DOWN


# --- FR-18: advertised addresses


@pytest.mark.parametrize(
    ("field", "config", "words"),
    [
        ("http", {"bind": "0.0.0.0:0"}, "http.advertise is not set"),
        ("http", {"bind": "[::]:0"}, "http.advertise is not set"),
        ("http", {"bind": "0.0.0.0:0", "advertise": "0.0.0.0"}, "nobody can connect to it"),
        ("http", {"bind": "0.0.0.0:0", "advertise": "::"}, "nobody can connect to it"),
        ("http", {"bind": "0.0.0.0:0", "advertise": "localhost"}, "another machine on every machine"),
        ("http", {"bind": "0.0.0.0:0", "advertise": "no.such.invalid"}, "does not resolve"),
        ("control", {"bind": "0.0.0.0:0"}, "control.advertise is not set"),
        ("control", {"bind": "0.0.0.0:0", "advertise": "::"}, "nobody can connect to it"),
        ("control", {"bind": "127.0.0.1:0", "advertise": "localhost"}, "another machine on every machine"),
        ("control", {"bind": "127.0.0.1:0", "advertise": "no.such.invalid"}, "does not resolve"),
        ("transfer", {"host": "0.0.0.0"}, "nobody can connect to it"),
        ("transfer", {"host": "localhost"}, "another machine on every machine"),
    ],
)
def test_fr_18_an_address_that_others_cannot_use_is_refused(field: str, config: dict[str, Any], words: str) -> None:
    http, tidal = _loopback(), _control()
    if field == "http":
        http = HttpConfig(**config)
    else:
        tidal = {**tidal, field: config}
    with pytest.raises(ConfigError, match=words) as found:
        planned(FAR, http=http, tidal=tidal)
    assert "\n" not in str(found.value)
    assert field in str(found.value)


def _loopback() -> Any:
    return HttpConfig("127.0.0.1:0", "127.0.0.1")


def _control() -> dict[str, Any]:
    return {"control": {"bind": "127.0.0.1:0", "advertise": "127.0.0.1"}}


def test_fr_18_loopback_nobody_chose_is_refused_where_others_look(bed: Bed) -> None:
    with pytest.raises(ConfigError, match=r"http\.advertise is not set, and 127\.0\.0\.1:\d+ is bound"):
        planned(FAR)
    with pytest.raises(ConfigError, match=r"control\.advertise is not set"):
        planned(FAR, http=_loopback())
    chosen = planned(FAR, http=_loopback(), tidal=_control())
    assert chosen.http.startswith("http://127.0.0.1:")
    near = planned(HERE)  # whoever can ask this registry is on this machine
    assert near.http.startswith("http://127.0.0.1:")


def test_fr_18_nothing_is_started_or_announced_with_an_unusable_address(bed: Bed) -> None:
    served = bed.serve("decode", "decode-0", http={"bind": "0.0.0.0:0"})
    assert served.ends() == 2
    (line,) = [line for line in served.said().splitlines() if "tidal:" in line]
    assert "http.advertise is not set, and 0.0.0.0:" in line
    assert "stand-in" not in served.said()
    assert bed.members() == {}


def test_fr_18_bind_and_advertise_are_separate(bed: Bed) -> None:
    served = bed.serve(
        "both",
        "one",
        http={"bind": "0.0.0.0:0", "advertise": "127.0.0.2"},
        tidal={"control": {"bind": "0.0.0.0:0", "advertise": "127.0.0.2"}},
    )
    member = served.ready()
    assert member.http.startswith("http://127.0.0.2:")
    assert member.control.startswith("127.0.0.2:")
    assert answer_of(member, {"prompt": "x", "max_tokens": 1}).status_code == 200
    assert inquire(member.control, 5.0).identity.engine == "one"


def test_fr_18_engines_on_two_addresses_may_have_equal_ports(bed: Bed) -> None:
    port = two_ports()
    served = [bed.serve("both", f"on-{n}", http={"bind": f"127.0.0.{n}:{port}"}) for n in (1, 2)]
    assert [each.ready().http for each in served] == [f"http://127.0.0.{n}:{port}" for n in (1, 2)]


def test_an_engine_on_ipv6_is_announced_with_brackets(bed: Bed) -> None:
    served = bed.serve("both", "six", http={"bind": "[::1]:0"}, tidal={"control": {"bind": "[::1]:0"}})
    member = served.ready()
    assert member.http.startswith("http://[::1]:")
    assert member.control.startswith("[::1]:")
    assert answer_of(member, {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_an_address_behind_translation_is_announced_with_its_own_port() -> None:
    port = two_ports()
    plan = planned(FAR, http=HttpConfig(f"127.0.0.1:{port}", "203.0.113.7:80"), tidal=_control())
    assert (plan.http, plan.http_here) == ("http://203.0.113.7:80", f"http://127.0.0.1:{port}")
    assert plan.command[plan.command.index("--port") + 1] == str(port)


@pytest.mark.parametrize(
    ("args", "settings", "words"),
    [
        (("--uds", "/x"), {}, "--uds"),
        (("--port", "1", "--host=::1"), {"http": {"bind": "127.0.0.1:0"}}, "give one of them"),
        (("--port", "x"), {}, "expected a number up to 65535"),
        (("--port",), {}, "--port: its value is missing"),
        (("--host", "192.0.2.77"), {}, "choose an address of this machine"),
    ],
)
def test_where_the_server_is_can_be_said_once(args: tuple[str, ...], settings: dict[str, Any], words: str) -> None:
    http = HttpConfig(**settings.get("http", {}))
    with pytest.raises(ConfigError, match=words):
        planned(HERE, *args, http=http)
