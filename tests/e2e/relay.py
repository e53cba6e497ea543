# SPDX-License-Identifier: Apache-2.0
"""Delays frames between two interfaces, where the kernel has no netem: ``python -m tests.e2e.relay OUTER INNER``.

Makes two TAP interfaces and carries every frame from one to the other, as late as it was told to on standard input
(``0.01``: seconds, one line at a time). Ends, and its interfaces with it, when standard input does. :class:`Relay` is
this process seen from a test.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from types import TracebackType
from typing import Self

from tests.arch.source import ROOT
from tidal_connector.config import child_environment

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_FRAME = 65536
_QUEUE = 4096  # frames under way in one direction; more are lost, as in a router
END_S = 5.0


class Relay:
    """The process, and its two interfaces, as a context manager."""

    def __init__(self, outer: str, inner: str) -> None:
        self._command = [sys.executable, "-m", "tests.e2e.relay", outer, inner]

    def __enter__(self) -> Self:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=child_environment(), start_new_session=True
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        assert said == "ready", f"the relay did not start: {said}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def delay(self, seconds: float) -> None:
        """Delay the frames that come from now on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(seconds, file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "set\n"


def _tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return tap


def _take(tap: int, waiting: deque[tuple[float, bytes]], delay_s: float) -> None:
    due = time.monotonic() + delay_s
    for _ in range(64):
        try:
            frame = os.read(tap, _FRAME)
        except OSError:  # nothing more, or the interface is down
            return
        if len(waiting) < _QUEUE:
            waiting.append((due, frame))


def _hand_on(tap: int, waiting: deque[tuple[float, bytes]]) -> float:
    """Send what is due; return the seconds until the next one is."""
    while waiting:
        left = waiting[0][0] - time.monotonic()
        if left > 0:
            return left
        _, frame = waiting.popleft()
        try:
            os.write(tap, frame)
        except OSError:  # its interface is down: lost
            continue
    return 60.0


def carry(outer: str, inner: str) -> None:
    """Carry frames until standard input ends."""
    taps = [_tap(outer), _tap(inner)]
    queues: list[deque[tuple[float, bytes]]] = [deque(), deque()]  # that wait for the tap of the same index
    delay_s = 0.0
    print("ready", flush=True)
    while True:
        wait = min(_hand_on(taps[end], queues[end]) for end in (0, 1))
        readable, _, _ = select.select([*taps, sys.stdin.fileno()], [], [], wait)
        if sys.stdin.fileno() in readable:
            said = os.read(sys.stdin.fileno(), 64)
            if not said:
                return
            delay_s = float(said.split()[-1])
            print("set", flush=True)
        for end in (0, 1):
            if taps[end] in readable:
                _take(taps[end], queues[1 - end], delay_s)


if __name__ == "__main__":
    carry(sys.argv[1], sys.argv[2])
