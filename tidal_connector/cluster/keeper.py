# SPDX-License-Identifier: Apache-2.0
"""Runs one command and ends it, with all its descendants, when whoever started the keeper is gone.

``python -m tidal_connector.cluster.keeper GRACE_S COMMAND...`` with a pipe as standard input. The end of that
pipe, which also comes when the starter is killed with -9, makes the keeper end the command's whole process
group: SIGTERM, and SIGKILL after the grace. A death signal in the child alone would not do: it does not reach
grandchildren.

The keeper must be started as the leader of a new session, so that the group is its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_POLL_S = 0.05
_KILL_POLL_S = 0.01
_TRACKER_S = 2.0
_GROUP_FIELD = 2
"""Position of the process group in ``/proc/PID/stat``, counted after the command's name."""


def group_members(group: int) -> list[int]:
    """Return the processes of a group that still run, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[_GROUP_FIELD]) == group and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


def keep(command: Sequence[str], grace_s: float) -> int:
    """Run a command until it ends by itself or standard input closes; return its exit status.

    Args:
        command: program and arguments.
        grace_s: seconds between SIGTERM and SIGKILL.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)  # it comes to the whole group; the keeper leaves last
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    handle = os.pidfd_open(child.pid)
    try:
        select.select([sys.stdin.fileno(), handle], [], [])
    finally:
        os.close(handle)
    _end_group(child, grace_s)
    return child.returncode


def _end_group(child: subprocess.Popen[bytes], grace_s: float) -> None:
    me = os.getpid()
    os.killpg(me, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while group_members(me) != [me] and time.monotonic() < deadline:
        child.poll()
        time.sleep(_POLL_S)
    kill_group(me, spare=me)
    child.wait()


def kill_group(group: int, spare: int = 0) -> None:
    """Kill a process group and wait until the kernel has taken its last process away.

    Processes that ignore SIGTERM come last, after a moment in which they may end by themselves: multiprocessing's
    resource tracker is one of them, and it unlinks the shared memory of those that were killed.

    Args:
        group: the group.
        spare: a member that is left alone.
    """
    patient = time.monotonic() + _TRACKER_S
    while members := [pid for pid in group_members(group) if pid != spare]:
        for pid in members:
            if time.monotonic() > patient or not _ignores_sigterm(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_KILL_POLL_S)


def _ignores_sigterm(pid: int) -> bool:
    """Whether a process ignores SIGTERM, or blocks it, as the tracker does until it has started."""
    ignored = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("SigIgn:", "SigBlk:")):
                ignored |= int(line.split()[1], 16)
    return bool(ignored >> (signal.SIGTERM - 1) & 1)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[2:], float(sys.argv[1])))
