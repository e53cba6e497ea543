# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from tidal_connector.errors import PeerLost
from tidal_connector.transfer.segment import Buffer, Segment, ask_segment


@contextmanager
def peer(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A peer that reads the question and then does what ``answer`` says."""

    def serve() -> None:
        link, _ = server.accept()
        with link:
            assert link.recv(100) == struct.pack("<QB", 3, 1) + b"{}"
            answer(link)

    with socket.create_server(("127.0.0.1", 0)) as server:
        worker = threading.Thread(target=serve)
        worker.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        worker.join()


def frame(body: bytes) -> bytes:
    return struct.pack("<QB", len(body) + 1, 1) + body


def test_a_description_that_comes_in_pieces() -> None:
    whole = frame(
        b'{"protocol":"tcp","buffers":[{"addr":4096,"length":7,"name":"x"}],"tcp_data_port":9,"timestamp":"t"}'
    )

    def answer(link: socket.socket) -> None:
        for place in range(0, len(whole), 5):
            link.sendall(whole[place : place + 5])

    with peer(answer) as endpoint:
        assert ask_segment(endpoint, 10) == Segment("tcp", (Buffer(4096, 7),), 9)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"", "it closed the connection"),
        (frame(b"{}"), "protocol"),
        (frame(b"no json"), "malformed"),
        (struct.pack("<Q", 1 << 40), "an answer of 1099511627776 bytes"),
        (struct.pack("<Q", 0), "an answer of 0 bytes"),
    ],
)
def test_anything_else_is_a_lost_peer(answer: bytes, text: str) -> None:
    with peer(lambda link: link.sendall(answer)) as endpoint, pytest.raises(PeerLost, match=text):
        ask_segment(endpoint, 10)


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:1", "127.0.0.1:port", "nothing", "no.such.host.invalid:1", "127.0.0.1:99999"]
)
def test_an_endpoint_that_cannot_be_reached(endpoint: str) -> None:
    with pytest.raises(PeerLost, match="did not describe itself"):
        ask_segment(endpoint, 5)


def test_a_peer_that_trickles_is_bounded_too() -> None:
    over = threading.Event()

    def answer(link: socket.socket) -> None:
        link.sendall(struct.pack("<Q", 1000))
        with suppress(OSError):  # the asker has hung up
            while not over.wait(0.02):
                link.sendall(b" ")

    with peer(answer) as endpoint:
        try:
            with pytest.raises(PeerLost, match="timed out"):
                ask_segment(endpoint, 0.2)
        finally:
            over.set()
