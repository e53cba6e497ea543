# SPDX-License-Identifier: Apache-2.0
"""Asking a worker who it is: a real worker, nobody, somebody silent, and somebody who talks rubbish."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from tests.control.pair import FAST, Decode, Handover, Prefill, eventually, layout
from tidal_connector.control.channel import Channel
from tidal_connector.control.inquiry import inquire
from tidal_connector.control.messages import Bye, Refused, encode
from tidal_connector.errors import ConfigError, PeerLost, ProtocolError
from tidal_connector.ids import Incarnation
from tidal_connector.transfer.loopback import LoopbackFabric

LONG_S = 10.0  # never waited out: somebody answers
SHORT_S = 0.2  # waited out: nobody does
CALM = msgspec.structs.replace(FAST, lease_s=LONG_S, accept_s=LONG_S, stall_s=LONG_S)


@contextlib.contextmanager
def answering(frame: bytes) -> Iterator[str]:
    """Something on a socket of our kind that answers whatever comes with one frame; yields its address."""
    over = threading.Event()

    def serve(channel: Channel) -> None:
        while not over.is_set():
            channel.wait(0.05)
            for route, _ in channel.receive():
                channel.send(route, frame)

    with Channel("127.0.0.1:0") as channel:
        thread = threading.Thread(target=serve, args=(channel,))
        thread.start()
        try:
            yield channel.address
        finally:
            over.set()
            thread.join()


def test_both_kinds_of_worker_say_who_they_are_while_they_hand_over() -> None:
    with ExitStack() as stack:
        fabric = LoopbackFabric()
        prefill, decode = Prefill(stack, fabric), Decode(stack, fabric, kv=layout("w1"))
        found = inquire(prefill.loop.address, LONG_S)
        assert (found.identity.engine, found.sends, found.receives) == ("prefill-0", True, False)
        other = inquire(decode.loop.address, LONG_S)
        assert (other.identity.engine, other.sends, other.receives) == ("decode-0", False, True)
        assert found.fingerprint == layout().fingerprint() != other.fingerprint
        assert "weights: 'w0' here, 'w1' there" in found.layout.differences(other.layout)
        assert prefill.counters.snapshot()["inquiries_answered"] == 1
        assert prefill.counters.snapshot()["messages_refused"] == 0


def test_asking_does_not_disturb_a_transfer() -> None:
    with ExitStack() as stack:
        fabric = LoopbackFabric()
        prefill, decode = Prefill(stack, fabric, settings=CALM), Decode(stack, fabric, settings=CALM)
        handover = Handover("asked", prefill, decode, 40)
        handover.open()
        handover.reserve()
        handover.compute(0, 16)
        for _ in range(3):
            assert inquire(prefill.loop.address, LONG_S).identity.engine == "prefill-0"
        handover.compute(16, 40)
        handover.done()
        assert decode.outcome().ok
        handover.assert_equal()


def test_nobody_there_is_said_in_time() -> None:
    with pytest.raises(PeerLost, match=r"nobody at 127\.0\.0\.1:1 said within 0\.2 s"):
        inquire("127.0.0.1:1", SHORT_S)


def test_a_peer_that_is_silent_is_given_up_in_time() -> None:
    with Channel("127.0.0.1:0") as silent, pytest.raises(PeerLost, match="who it is"):
        inquire(silent.address, SHORT_S)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(PeerLost, match="who it is"):
        inquire(f"127.0.0.1:{server.getsockname()[1]}", SHORT_S)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", "is no engine that fits"),
        (b"\xff" * 50, "is no engine that fits"),
        (msgspec.msgpack.encode((1, "x", "", 0, ["about", 1])), "is no engine that fits"),
        (msgspec.msgpack.encode((9, "x", "", 0, ["about", "of tomorrow"])), "protocol version 9 there, 1 here"),
        (encode(Incarnation("x"), Incarnation(""), 0, Refused("not now")), "does not answer: not now"),
        (encode(Incarnation("x"), Incarnation(""), 0, Bye("not now")), "answered Bye"),
    ],
)
def test_an_answer_that_is_none_is_one_clear_line(frame: bytes, words: str) -> None:
    with answering(frame) as address, pytest.raises(ProtocolError, match=words) as found:
        inquire(address, LONG_S)
    assert address in str(found.value)


@pytest.mark.parametrize("address", ["", "host", "host:x"])
def test_an_address_that_cannot_be_read_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match="control address"):
        inquire(address, SHORT_S)


def test_a_worker_that_was_told_rubbish_still_answers() -> None:
    with ExitStack() as stack:
        prefill = Prefill(stack, LoopbackFabric())
        with Channel("127.0.0.1:0") as odd:
            route = odd.dial(prefill.loop.address, "odd")
            eventually(lambda: odd.send(route, b"rubbish"))
            eventually(lambda: prefill.counters.snapshot()["messages_refused"] == 1)
        assert inquire(prefill.loop.address, LONG_S).identity.engine == "prefill-0"
