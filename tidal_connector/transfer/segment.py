# SPDX-License-Identifier: Apache-2.0
"""Asking a Mooncake engine what it is, over a socket of our own and with a deadline of our own.

Mooncake's own opening of a peer blocks for a minute, under the engine's mutex, if the peer accepts and never
answers. One question before it tells whether the peer answers at all, which transport it really runs (the
protocol string given at its start selects nothing), and which ranges it has registered. Blocks for the
deadline at most; the carrier threads call it.
"""

from __future__ import annotations

import socket
import struct
import time

import msgspec

from tidal_connector.errors import PeerLost

_METADATA = 1  # frame type; a frame is a 64-bit length that counts the type byte, the type, and JSON
_LARGEST = 128 << 20  # bytes that Mooncake itself accepts at most


class Buffer(msgspec.Struct, frozen=True):
    """One registered range: address and bytes."""

    addr: int
    length: int


class Segment(msgspec.Struct, frozen=True):
    """What an engine says of itself.

    Attributes:
        protocol: the transport that it really runs.
        buffers: its registered ranges.
        tcp_data_port: the port that takes the bytes; 0 unless over TCP.
    """

    protocol: str
    buffers: tuple[Buffer, ...] = ()
    tcp_data_port: int = 0


def ask_segment(endpoint: str, deadline_s: float) -> Segment:
    """Return what the engine at ``host:rpc_port`` says of itself, within ``deadline_s`` seconds.

    Raises:
        PeerLost: it cannot be reached, does not answer in time, or answers something else.
    """
    end = time.monotonic() + deadline_s
    try:
        host, _, port = endpoint.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=deadline_s) as link:
            question = b"{}"
            link.sendall(struct.pack("<QB", len(question) + 1, _METADATA) + question)
            (length,) = struct.unpack("<Q", _read(link, 8, end))
            if not 1 < length <= _LARGEST:
                raise PeerLost(f"peer {endpoint}: an answer of {length} bytes is no segment description")
            body = _read(link, length, end)
        return msgspec.json.decode(body[1:], type=Segment)
    except (OSError, ValueError) as error:
        text = str(error) or type(error).__name__
        raise PeerLost(f"peer {endpoint} did not describe itself within {deadline_s:g} s: {text}") from None


def _read(link: socket.socket, length: int, end: float) -> bytes:
    found = bytearray()
    while len(found) < length:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        link.settimeout(left)
        piece = link.recv(min(length - len(found), 1 << 16))
        if not piece:
            raise ConnectionError("it closed the connection")
        found += piece
    return bytes(found)
