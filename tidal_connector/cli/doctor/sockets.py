# SPDX-License-Identifier: Apache-2.0
"""Who listens on which TCP port: the kernel's tables, and the processes whose open files lead there."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tidal_connector.cli.doctor.facts import Listener

_LISTEN = "0A"
_LONGEST = 120


def listeners(root: Path) -> Iterator[Listener]:
    """Yield the sockets that listen in this network namespace, by the tables below ``root/proc``."""
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            lines = (root / "proc/net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN:
                address, port = fields[1].split(":")
                found.append((_address(address, family), int(port, 16), int(fields[9])))
    owners = _owners(root, {inode for _, _, inode in found})
    for address, port, inode in sorted(found):
        pid = owners.get(inode, 0)
        yield Listener(address, port, pid, command_of(root, pid) if pid else "")


def covers(listener: Listener, host: str) -> bool:
    """Whether a listener keeps others from a port of a host, which may be a wildcard itself."""
    wild = ("0.0.0.0", "::")
    return listener.address in wild or host in (*wild, "localhost", listener.address)


def _address(text: str, family: socket.AddressFamily) -> str:
    # The kernel prints each 32-bit word in the machine's byte order.
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))


def _owners(root: Path, inodes: set[int]) -> dict[int, int]:
    wanted, found = {f"socket:[{inode}]": inode for inode in inodes}, {}
    for process in (root / "proc").iterdir() if (root / "proc").is_dir() else ():
        if not process.name.isdigit():
            continue
        with suppress(OSError):  # another user's, or gone meanwhile
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    inode = wanted.get(os.readlink(link))
                    if inode is not None:
                        found.setdefault(inode, int(process.name))
    return found


def command_of(root: Path, pid: int) -> str:
    """Return a process's command line, shortened; empty where it cannot be read."""
    try:
        words = (root / f"proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    line = b" ".join(words).decode(errors="replace").strip()
    return line if len(line) <= _LONGEST else line[:_LONGEST] + " ..."
