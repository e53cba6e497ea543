# SPDX-License-Identifier: Apache-2.0
"""Sockets: addresses, and that nothing blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tidal_connector.control.channel import Channel, Route, ask, join_address, parse_address
from tidal_connector.errors import ConfigError


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel, Route]]:
    with Channel("127.0.0.1:0") as here, Channel("127.0.0.1:0") as there:
        yield here, there, here.dial(there.address, "there")


def get(channel: Channel) -> tuple[Route, bytes]:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        channel.wait(0.2)
        for item in channel.receive():
            return item
    raise AssertionError("no frame came")


def put(channel: Channel, route: Route, frame: bytes) -> None:
    until = time.monotonic() + 10
    while not channel.send(route, frame):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_frame_goes_there_and_its_answer_back(pair: tuple[Channel, Channel, Route]) -> None:
    here, there, route = pair
    put(here, route, b"question")
    caller, frame = get(there)
    assert frame == b"question"
    assert there.send(caller, b"answer")
    assert get(here) == (route, b"answer")


@pytest.mark.parametrize(
    ("here", "there", "name"),
    [
        ("[::1]:0", "[::1]:0", "::1"),
        ("127.0.0.1:0", "[::1]:0", "::1"),  # each call is of the family of the address that is called
        ("[::1]:0", "127.0.0.1:0", "127.0.0.1"),
        ("[::]:0", "127.0.0.1:0", "::ffff:127.0.0.1"),
        ("127.0.0.1:0", "127.0.0.1:0", "localhost"),
        ("127.0.0.1:0", "[::]:0", "127.0.0.1"),
        ("127.0.0.1:0", "[::]:0", "::1"),
    ],
)
def test_frames_and_questions_go_over_ipv6_as_over_ipv4(here: str, there: str, name: str) -> None:
    with Channel(here, "node-1") as caller, Channel(there, "node-2") as called:
        address = join_address(name, parse_address("x", called.address)[1])
        put(caller, caller.dial(address, "there"), b"frame")
        assert get(called)[1] == b"frame"
        assert ask(address, b"question", 0.3) is None  # nobody answers; it arrives
        assert get(called)[1] == b"question"


def test_nobody_there_is_false_and_not_a_wait() -> None:
    with Channel("127.0.0.1:0") as channel:
        route = channel.dial("127.0.0.1:1", "nobody")
        assert not channel.send(route, b"x")
        assert not channel.send(Route(caller=b"unknown"), b"x")
        assert not channel.send(Route("127.0.0.1:2", "never dialled"), b"x")


def test_a_peer_that_never_reads_fills_its_own_queue_only(pair: tuple[Channel, Channel, Route]) -> None:
    here, there, route = pair
    put(here, route, b"hello")
    caller, _ = get(there)
    frame = b"x" * 100_000
    assert not all(there.send(caller, frame) for _ in range(20_000))  # refused at the mark, never blocked


def test_the_port_that_was_really_bound_is_advertised() -> None:
    with Channel("127.0.0.1:0") as channel:
        host, port = parse_address("x", channel.address)
        assert host == "127.0.0.1"
        assert port > 0
    with Channel("127.0.0.1:0", "node-7") as channel:
        assert channel.address.startswith("node-7:")
        assert not channel.address.endswith(":0")
    with Channel("127.0.0.1:0", "node-7:7100") as channel:
        assert channel.address == "node-7:7100"
    with Channel("0.0.0.0:0", "fd00::7") as channel:
        assert channel.address.startswith("[fd00::7]:")


@pytest.mark.parametrize(("bind", "advertise"), [("0.0.0.0:0", None), ("[::]:0", None), ("127.0.0.1:0", "0.0.0.0")])
def test_an_address_that_nobody_reaches_is_not_advertised(bind: str, advertise: str | None) -> None:
    with pytest.raises(ConfigError, match="peers cannot connect to"):
        Channel(bind, advertise)


def test_a_port_in_use_is_one_clear_line() -> None:
    with (
        Channel("127.0.0.1:0") as channel,
        pytest.raises(ConfigError, match=r"Address already in use.*; choose a free port"),
    ):
        Channel(channel.address)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:70000", "a b:1", "::1:80", "[::1]", "h:1;2", "h/x:1", "host:x1", "h:٣"]
)
def test_bad_addresses_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"control\.bind = .*expected \"host:port\""):
        parse_address("control.bind", text)


@pytest.mark.parametrize(("text", "host", "port"), [("h-1.x:80", "h-1.x", 80), ("[fd00::1]:7", "fd00::1", 7)])
def test_good_addresses(text: str, host: str, port: int) -> None:
    assert parse_address("x", text) == (host, port)
    assert join_address(host, port) == text


def test_closing_twice_is_closing_once() -> None:
    channel = Channel("127.0.0.1:0")
    channel.close()
    channel.close()
