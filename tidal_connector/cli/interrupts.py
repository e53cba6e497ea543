# SPDX-License-Identifier: Apache-2.0
"""Ends a command by SIGTERM, or the end of its terminal, the way Ctrl-C ends it. Main thread only."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM and SIGHUP, so that everything that was entered is undone.

    A SIGHUP that is ignored, as under ``nohup``, stays so. A terminal that closes sends more than one: only the first
    counts, so that none cuts the undoing short.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    taken = [number for number in before if number != signal.SIGHUP or before[number] is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
