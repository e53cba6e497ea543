# SPDX-License-Identifier: Apache-2.0
"""Processes that outlive whoever started them: started in a session of their own, known by number and start time.

A process number alone is not enough, because the kernel gives it away again. Linux only (``/proc``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

_PROC = Path("/proc")
_STATE, _PARENT, _SESSION, _STARTED = 0, 1, 3, 19
"""Positions in ``/proc/PID/stat``, counted after the command's name."""

_KILL_S = 10.0
_POLL_S = 0.02


class ProcessId(msgspec.Struct, frozen=True):
    """One process, unmistakably.

    Attributes:
        pid: its number.
        started: clock ticks from the machine's start to its own.
    """

    pid: int
    started: int


def spawn(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process that neither the end of this one nor a signal to its terminal reaches.

    Args:
        command: program and arguments.
        environment: all of its variables.
        log: file to which its output is appended.

    Raises:
        OSError: it cannot be started.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


def identify(pid: int) -> ProcessId | None:
    """Return a process that runs; None where there is none, or only its remains."""
    fields = _stat(pid)
    return ProcessId(pid, int(fields[_STARTED])) if fields and fields[_STATE] not in "ZX" else None


def alive(process: ProcessId) -> bool:
    """Whether exactly this process still runs."""
    return identify(process.pid) == process


def find(word: str) -> ProcessId | None:
    """Return the leader of a session whose command line holds a word of its own, such as a file that only it reads."""
    for pid in _all_pids():
        with contextlib.suppress(OSError):
            words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
            fields = _stat(pid)
            if word.encode() in words and fields and int(fields[_SESSION]) == pid:
                return identify(pid)
    return None


def marked(name: str, value: str) -> list[ProcessId]:
    """Return the processes that were started with a variable of a value, in whatever session: a mark that children
    inherit from whoever started them, also when that one is gone."""
    mark = f"{name}={value}".encode()
    found = []
    for pid in _all_pids():
        with contextlib.suppress(OSError):
            if mark in (_PROC / str(pid) / "environ").read_bytes().split(b"\0") and (each := identify(pid)) is not None:
                found.append(each)
    return found


def terminate(process: ProcessId) -> None:
    """Ask a process to end (SIGTERM to it alone); nothing where it has ended."""
    if alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)


def kill_tree(process: ProcessId) -> None:
    """End a process, its session and all its descendants at once; waits until they are gone, a few seconds at most."""
    deadline = time.monotonic() + _KILL_S
    doomed = set(_tree(process)) if alive(process) else set(_session(process.pid))
    while doomed and time.monotonic() < deadline:
        for each in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        time.sleep(_POLL_S)
        doomed = {each for each in doomed if alive(each)} | set(_session(process.pid))


def _tree(process: ProcessId) -> Iterator[ProcessId]:
    """Yield a process, its descendants, and whoever else is in its session."""
    children: dict[int, list[int]] = {}
    for pid in _all_pids():
        fields = _stat(pid)
        if fields:
            children.setdefault(int(fields[_PARENT]), []).append(pid)
    waiting = [process.pid]
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        found = identify(pid)
        if found is not None:
            yield found
    yield from _session(process.pid)


def _session(leader: int) -> Iterator[ProcessId]:
    for pid in _all_pids():
        fields = _stat(pid)
        if fields and int(fields[_SESSION]) == leader and (found := identify(pid)) is not None:
            yield found


def _all_pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def _stat(pid: int) -> list[str]:
    """Return the fields behind the command's name; empty where the process is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
