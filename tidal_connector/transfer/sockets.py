# SPDX-License-Identifier: Apache-2.0
"""Counting connections to a local TCP port by the kernel's tables: what may still deliver bytes.

A write that failed on the sender may still arrive as long as its connection lives here, so the decode
side asks before it hands destination pages back. Any thread.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

_DEAD = {"06", "07", "0A"}  # TIME_WAIT and CLOSE deliver nothing more; LISTEN is no connection


def count_connections(
    port: int, host: str, tables: Iterable[Path] | None = None, others: Iterable[str] = ()
) -> int | None:
    """Count the live connections to a local port that may be a host's; None where it cannot be known.

    A connection need not come from the address that its host is called by: there may be several, or a translation of
    addresses between. So one counts that comes from any address which is not another known host's.

    Args:
        port: the local port.
        host: the remote side, a name or an address; all addresses of a name count.
        others: the other hosts that may have connected.
        tables: files in the format of ``/proc/net/tcp``; None takes the kernel's for IPv4 and IPv6.
    """
    try:
        wanted = _addresses(host)
        foreign = {address for other in others for address in _addresses(other)} - wanted
        files = tables or (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
        lines = [line for file in files if file.exists() for line in file.read_text().splitlines()[1:]]
    except OSError:
        return None
    if not lines:
        return None
    count = 0
    for line in lines:
        _, local, remote, state, *_ = line.split()
        if int(local.rpartition(":")[2], 16) == port and state not in _DEAD:
            count += _address(remote.rpartition(":")[0]) not in foreign
    return count


def _addresses(host: str) -> set[str]:
    return {_plain(str(address[0])) for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}


def _address(text: str) -> str:
    # 32-bit words in the byte order of the machine
    words = [bytes.fromhex(text[place : place + 8]) for place in range(0, len(text), 8)]
    raw = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return _plain(str(ipaddress.ip_address(raw)))


def _plain(text: str) -> str:
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
