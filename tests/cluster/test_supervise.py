# SPDX-License-Identifier: Apache-2.0
"""An engine under ``tidal serve``: announced as it is, drained before it stops, and never left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.cluster.serve_bed import TTL_S, Bed, answer_of, open_bed
from tests.cluster.standins import until
from tests.etcd import EtcdServer
from tidal_connector.cluster.orders import AWAITS_ADMISSION, Order, Want, order_key
from tidal_connector.cluster.series import RUNNING, parse_series
from tidal_connector.cluster.standin_answers import expected_text
from tidal_connector.control.inquiry import inquire
from tidal_connector.registry.base import Put
from tidal_connector.registry.members import State

pytestmark = pytest.mark.faults

BODY = {"model": "m", "prompt": "high and low water", "max_tokens": 20}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_it_is_announced_as_it_is_and_withdrawn(bed: Bed) -> None:
    served = bed.serve("decode", "decode-0", standin=("--start-s", "0.7"), node="n7", revision="r3")
    starting = served.reaches(State.STARTING)
    assert (starting.layout, starting.incarnation) == ("", "")
    member = served.ready()
    about = inquire(member.control, 5.0)
    assert (member.role, member.node, member.revision, member.model) == ("decode", "n7", "r3", "m")
    assert (member.incarnation, member.layout) == (about.identity.incarnation, about.fingerprint)
    assert (member.requests, member.kv_tokens, member.transfer) == (256, 262144, "127.0.0.1:1")
    assert httpx.get(member.http + "/health", trust_env=False).status_code == 200
    pids = served.children()
    served.process.send_signal(signal.SIGTERM)
    assert served.ends() == 0
    assert served.member() is None
    assert not any(map(alive, pids))
    assert "engine decode-0 is draining" in served.said()


@pytest.mark.parametrize("how", ["order", "SIGTERM"])
def test_a_running_request_ends_well_before_a_drained_engine_stops(bed: Bed, how: str) -> None:
    served = bed.serve("both", "one", standin=("--token-ms", "100"))
    member = served.ready()
    texts: list[str] = []
    client = threading.Thread(target=lambda: texts.append(answer_of(member, BODY).json()["choices"][0]["text"]))
    client.start()
    until(lambda: running(member.http, 1))
    if how == "order":
        served.order(Order(Want.DRAIN, 15.0, by="a test"))
    else:
        served.process.send_signal(signal.SIGTERM)
    served.reaches(State.DRAINING)
    assert client.is_alive()
    assert served.ends() == 0
    client.join()
    assert texts == [expected_text(BODY)]
    assert served.member() is None
    assert bed.store.read(order_key("one")).entries == {}  # so that the next life of this engine serves


def running(url: str, count: int) -> bool:
    return parse_series(httpx.get(url + "/metrics", trust_env=False).text)[RUNNING] == count


@pytest.mark.parametrize("how", ["deadline", "twice"])
def test_a_request_without_end_holds_nothing_up(bed: Bed, how: str) -> None:
    served = bed.serve("both", "one", standin=("--token-ms", "3000"))
    member = served.ready()
    failed: list[bool] = []

    def ask() -> None:
        try:
            failed.append(answer_of(member, BODY).status_code != httpx.codes.OK)
        except httpx.TransportError:
            failed.append(True)

    client = threading.Thread(target=ask)
    client.start()
    until(lambda: running(member.http, 1))
    began = time.monotonic()
    if how == "deadline":
        served.order(Order(Want.DRAIN, 1.0))
    else:
        served.process.send_signal(signal.SIGTERM)
        served.reaches(State.DRAINING)
        assert served.process.poll() is None
        served.process.send_signal(signal.SIGTERM)
    assert served.ends() == 0
    assert time.monotonic() - began < 10
    client.join()
    assert failed == [True]
    assert "deadline has passed; stopping with 1 running" in served.said() or how == "twice"


def test_an_order_to_another_engine_is_not_heard(bed: Bed) -> None:
    served = bed.serve("both", "one")
    served.ready()
    for key, value in ((order_key("one0"), b'{"want":"drain"}'), (order_key("one"), b'{"want":"dance"}')):
        bed.store.write([Put(key, value)])
    time.sleep(1.0)  # nothing to wait for: it must not happen
    assert served.ready().state is State.READY


def test_a_dead_engine_is_gone_at_once_and_a_new_one_is_another_incarnation(bed: Bed) -> None:
    served = bed.serve("decode", "decode-0")
    first = served.ready()
    served.signal_engine(signal.SIGKILL)
    assert served.ends(5.0) == 1
    assert served.member() is None
    assert "its process ended with status" in served.said()
    again = bed.serve("decode", "decode-0").ready()
    assert again.incarnation != first.incarnation


def test_a_frozen_engine_is_down_within_its_bound_and_ready_when_it_thaws(bed: Bed) -> None:
    served = bed.serve("decode", "decode-0")
    first = served.ready()
    served.signal_engine(signal.SIGSTOP)
    began = time.monotonic()
    down = served.reaches(State.DOWN)
    assert time.monotonic() - began < 4.0
    assert "/health has not answered for" in down.note
    served.signal_engine(signal.SIGCONT)
    assert served.ready().incarnation == first.incarnation
    assert served.said().count("engine decode-0 is down") == 1


def test_nothing_survives_the_death_of_its_supervisor(bed: Bed) -> None:
    served = bed.serve("decode", "decode-0")
    served.ready()
    pids = served.children()
    assert pids
    began = time.monotonic()
    served.process.kill()
    served.process.wait()
    served.gone(TTL_S + 2.0)
    assert time.monotonic() - began < TTL_S + 2.0
    until(lambda: not any(map(alive, pids)), 5.0)


def test_it_serves_without_a_registry_and_is_listed_when_that_comes(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path)
    with open_bed(etcd, tmp_path) as bed:
        served = bed.serve("decode", "decode-0")
        until(lambda: "engine decode-0 is ready" in served.said())
        time.sleep(3.0)  # long enough for several tries
        complaints = [line.partition("]")[2] for line in served.said().splitlines() if "does not answer" in line]
        etcd.start()
        try:
            served.ready(bound_s=30.0)
            assert len(complaints) == len(set(complaints)) == 3  # the entry's, its watch's and the orders'
        finally:
            served.process.kill()
            etcd.kill()


def test_an_engine_of_a_rollout_waits_until_it_is_let_in(bed: Bed) -> None:
    served = bed.serve("decode", "decode-0", admission=True, revision="r2")
    waiting = until(lambda: (m := served.member()) and m.note == AWAITS_ADMISSION and m)
    assert waiting.state is State.STARTING
    assert waiting.layout
    served.order(Order(Want.SERVE, revision="r1"))
    time.sleep(0.5)  # nothing to wait for: another revision is meant
    assert served.reaches(State.STARTING).note == AWAITS_ADMISSION
    served.order(Order(Want.SERVE, revision="r2"))
    assert served.ready().note == ""


def test_an_engine_that_never_serves_is_given_up(bed: Bed) -> None:
    served = bed.serve("decode", "decode-0", standin=("--never-ready",), supervise={"start_s": 1.5})
    served.reaches(State.STARTING)
    assert served.ends() == 1
    assert served.member() is None
    assert "did not serve within supervise.start_s = 1.5 s" in served.said()


def test_sigterm_while_it_starts_ends_it_at_once(bed: Bed) -> None:
    served = bed.serve("decode", "decode-0", standin=("--start-s", "60"))
    served.reaches(State.STARTING)
    until(served.children)
    began = time.monotonic()
    os.kill(served.process.pid, signal.SIGTERM)
    assert served.ends() == 0
    assert time.monotonic() - began < 8


def test_a_frozen_engine_is_not_waited_for(bed: Bed) -> None:
    served = bed.serve("decode", "decode-0", supervise={"drain_s": 600.0})
    served.ready()
    served.signal_engine(signal.SIGSTOP)
    served.reaches(State.DOWN)
    served.order(Order(Want.DRAIN, 600.0))
    assert served.ends(20.0) == 0  # frozen, it does not hear SIGTERM either
