# SPDX-License-Identifier: Apache-2.0
"""Who listens on a TCP port of this machine, and which port is free to give away.

The kernel's tables are asked, not a connection: a connection would also succeed with somebody else behind the port, and
two servers may listen on one port (vLLM sets ``SO_REUSEPORT``), which then get every other request each. Any thread.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import random
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from tidal_connector.address import join_address
from tidal_connector.errors import ConfigError

_LISTEN = "0A"
_STATE, _INODE = 3, 9  # fields of a line of /proc/net/tcp
_TRIES = 64
_LOWEST = 20000

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


def local_host(host: str) -> str:
    """Return the address by which this machine itself reaches a server that is bound to ``host``."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "::1" if address.version == 6 else "127.0.0.1"
    return host


def listening_inodes(host: str, port: int) -> set[int]:
    """Return the sockets of this network namespace that would get a connection to an address.

    Args:
        host: address that a server is bound to, or a name.
        port: its port.
    """
    wanted = _addresses(host)
    found: set[int] = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                address, _, number = fields[1].rpartition(":")
                if fields[_STATE] != _LISTEN or int(number, 16) != port:
                    continue
                bound = _kernel_address(address)
                if any(_meet(bound, item) for item in wanted):
                    found.add(int(fields[_INODE]))
    return found


def inodes_of(pids: Iterable[int]) -> set[int]:
    """Return the sockets that processes have open; those of a process that has gone, or is not ours, are left out."""
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    name = os.readlink(entry.path)
                    if name.startswith("socket:["):
                        found.add(int(name[8:-1]))
    return found


def listening_fault(what: str, host: str, port: int, pids: Iterable[int]) -> str:
    """Say what is wrong with a port on which some processes, and nobody else, should listen; empty where nothing is.

    Args:
        what: what the port is called in the text.
        host: address that they are bound to.
        port: which.
        pids: the processes.
    """
    sockets = listening_inodes(host, port)
    if not sockets:
        return f"nobody listens on port {port} of {what}"
    mine = inodes_of(pids)
    others = [inode for inode in sockets if inode not in mine]
    if not others:
        return ""
    shared = "too" if len(others) < len(sockets) else "instead"
    return f"another process listens on port {port} of {what}, {shared}; give the engine a port of its own, or 0"


class PortLock:
    """One port's name, taken by this process until it ends; others that ask in the same way respect it.

    Between the choice of a port and the moment in which vLLM listens on it minutes may pass, in which the kernel would
    let a second one choose it, too. The lock is an abstract Unix socket: it belongs to the network namespace, as the
    port does, and goes with the process, however that ends.
    """

    def __init__(self, host: str, port: int) -> None:
        """Take the lock.

        Raises:
            OSError: another process has it.
        """
        self.port = port
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(f"\0tidal-port-{host}-{port}")
        except OSError:
            self._socket.close()
            raise

    def close(self) -> None:
        """Give it back; again does nothing."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def take_port(what: str, host: str, port: int) -> PortLock:
    """Take a port that nobody listens on: the wanted one, or, where it is 0, one that the kernel chooses.

    Connections of a former server that are still in TIME_WAIT do no harm.

    Args:
        what: what the address is called in messages.
        host: address to bind.
        port: wanted; 0 for any outside the range from which the kernel serves outgoing connections: one of those could
            be given the port in the minutes until the server listens.

    Raises:
        ConfigError: the address is not this machine's, or may not be bound.
        PortTaken: the wanted port is somebody's.
    """
    for candidate in [port] if port else _candidates():
        chosen = _bindable(what, host, candidate)
        if chosen is not None:
            with contextlib.suppress(OSError):
                return PortLock(host, chosen)
    raise PortTaken(f"{what}: port {port} of {host} is taken; choose another one, or 0 for any that is free")


class PortTaken(ConfigError):
    """A port belongs to another process."""


def _candidates() -> list[int]:
    """Return ports to try, the last one 0: the kernel's own choice."""
    lowest = _LOWEST + 1
    with contextlib.suppress(OSError, ValueError):
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return [*random.sample(range(_LOWEST, lowest), min(_TRIES, lowest - _LOWEST)), 0] if lowest > _LOWEST else [0]


def _bindable(what: str, host: str, port: int) -> int | None:
    """Return the port that could be bound just now; None where somebody has it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        resolved = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(resolved)
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise ConfigError(
            f"{what} = {join_address(host, port)!r}: {error.strerror}; choose an address of this machine"
        ) from None


def _kernel_address(text: str) -> _Address:
    """Read an address as /proc/net/tcp writes it: words of 32 bits, each in the machine's byte order."""
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    return _plain(ipaddress.ip_address(b"".join(words)))


def _plain(address: _Address) -> _Address:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _addresses(host: str) -> list[_Address]:
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return [_plain(ipaddress.ip_address(str(item[4][0]).partition("%")[0])) for item in found]
    return []


def _meet(one: _Address, other: _Address) -> bool:
    """Whether two servers bound to these addresses may get each other's connections."""
    if one.version == other.version:
        return one == other or one.is_unspecified or other.is_unspecified
    return any(item.version == 6 and item.is_unspecified for item in (one, other))  # it may serve IPv4, too
