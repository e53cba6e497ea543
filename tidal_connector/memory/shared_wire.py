# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a node say to one another about a shared pool, and how it is carried.

Messages are small tagged structs over a local socket that keeps their borders; descriptors of files ride along. Every
receive has a deadline, and the other side's end is an error at once. No state but the socket; each rank's building
thread.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import time
from typing import TypeVar

import msgspec

from tidal_connector.errors import (
    ConfigError,
    Conflict,
    LayoutMismatch,
    PeerLost,
    PoolExhausted,
    ProtocolError,
    TidalError,
)
from tidal_connector.memory.report import RegionReport

VERSION = 1
MOST_FILES = 250  # the kernel passes 253 descriptors at once
_MOST_BYTES = 1 << 16
_TOLD = {each.__name__: each for each in (ConfigError, Conflict, LayoutMismatch, PeerLost, PoolExhausted)}


class Hello(msgspec.Struct, frozen=True, tag=True):
    """What a rank is, and what it expects the pool to be."""

    version: int
    rank: int
    world: int
    length: int
    fingerprint: str


class Offer(msgspec.Struct, frozen=True, tag=True):
    """The pool; its files' descriptors come along."""

    sizes: tuple[int, ...]
    report: RegionReport


class Mapped(msgspec.Struct, frozen=True, tag=True):
    """The sender has mapped the pool."""


class Go(msgspec.Struct, frozen=True, tag=True):
    """Every rank has mapped the pool."""


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The sender cannot go on."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: TidalError) -> Refusal:
        """Return an error as a message."""
        return cls(type(error).__name__, str(error))

    def error(self) -> TidalError:
        """Return it as the error that it was."""
        return _TOLD.get(self.kind, TidalError)(self.text)


Message = Hello | Offer | Mapped | Go | Refusal
_M = TypeVar("_M", Hello, Offer, Mapped, Go)


class Deadline:
    """A moment by which a wait must end.

    Attributes:
        wait_s: seconds from the start to it.
    """

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self._end = time.monotonic() + wait_s

    def left(self) -> float:
        """Seconds that are left; 0 where none are."""
        return max(0.0, self._end - time.monotonic())


def check(theirs: Hello, mine: Hello) -> None:
    """Compare what another rank and rank 0 expect.

    Raises:
        ProtocolError: they speak different versions.
        LayoutMismatch: they expect different pools; the text names both values.
    """
    if theirs.version != mine.version:
        raise ProtocolError(f"rank {theirs.rank} speaks version {theirs.version} of sharing: expected {mine.version}")
    for name in ("world", "length", "fingerprint"):
        there, here = getattr(theirs, name), getattr(mine, name)
        if there != here:
            raise LayoutMismatch(
                f"shared pool: {name} is {there!r} on rank {theirs.rank} and {here!r} on rank 0; start all ranks of an "
                "engine with the same settings"
            )


def send(connection: socket.socket, message: Message, whom: str, descriptors: list[int] | None = None) -> None:
    """Send a message, with descriptors where there are some.

    Raises:
        PeerLost: the other side has ended.
    """
    try:
        socket.send_fds(connection, [msgspec.msgpack.encode(message)], descriptors or [])
    except OSError as error:
        raise _ended(whom, error) from None


def receive(
    connection: socket.socket, kind: type[_M], whom: str, deadline: Deadline, descriptors: list[int] | None = None
) -> _M:
    """Wait for a message of one kind; append the descriptors that come along.

    Raises:
        PeerLost: the other side has ended, or said nothing in time.
        ProtocolError: it said something else.
        TidalError: it refused.
    """
    connection.settimeout(max(deadline.left(), 0.001))
    try:
        data, files = _read(connection)
    except TimeoutError:
        raise PeerLost(f"shared pool: {whom} says nothing for {deadline.wait_s:g} s; see its own log") from None
    except OSError as error:
        raise _ended(whom, error) from None
    if descriptors is None:
        for each in files:
            os.close(each)
    else:
        descriptors.extend(files)
    if not data:
        raise PeerLost(f"shared pool: {whom} has ended before every rank had the pool; see its own log")
    try:
        message = msgspec.msgpack.decode(data, type=Message)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"shared pool: {whom} sent what is no message: {error}") from None
    if isinstance(message, Refusal):
        raise message.error()
    if not isinstance(message, kind):
        raise ProtocolError(f"shared pool: {whom} sent {type(message).__name__}: expected {kind.__name__}")
    return message


def has_ended(connection: socket.socket) -> bool:
    """Say whether the process at the other end of a connection that is at rest has ended or closed it."""
    connection.settimeout(0)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def address_of(name: str) -> str:
    """Return the socket's abstract name for a pool's, which may be of any length; each user has names of its own."""
    digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return f"\0tidal-pool-{os.geteuid()}-{digest}"


def user_of(connection: socket.socket) -> int:
    """Return the user that the process at the other end runs as; anybody may connect to an abstract name."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


def _read(connection: socket.socket) -> tuple[bytes, list[int]]:
    try:
        data, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, MOST_FILES, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # The other side closed with something of ours unread; what it said before that is still there.
        data, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, MOST_FILES, socket.MSG_CMSG_CLOEXEC)
    return data, files


def _ended(whom: str, error: OSError) -> PeerLost:
    return PeerLost(f"shared pool: {whom} has ended ({error.strerror or error}); see its own log")
