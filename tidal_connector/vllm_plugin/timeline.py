# SPDX-License-Identifier: Apache-2.0
"""When what vLLM's thread says of a step may be passed on: at once on a CPU, on a device once it has got so far.

On a device a layer's hook fires when its kernels are queued, not when they have run; rows that were sent then would be
old ones. So the forward thread leaves an event with each word, and a thread of ours passes the words on, all of them in
the order in which they were said, as their events pass. The forward thread never waits.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from tidal_connector.log import get_logger

logger = get_logger(__name__)

POLL_S = 0.0005
"""How often an event is asked for. Layers of a prefill are milliseconds apart."""

DEVICE_S = 60.0
"""Longest wait for an event; a device that takes longer hangs, and its transfers end by their own timers."""

Word = Callable[[], None]


class Timeline(Protocol):
    """Passes words on in order."""

    def say(self, word: Word) -> None:
        """Pass on a word about what the host knows."""

    def say_written(self, word: Word) -> None:
        """Pass on a word about rows whose writing the device has been told of."""

    def settle(self, seconds: float) -> bool:
        """Return whether everything said so far was passed on within a time."""

    def close(self) -> None:
        """Pass nothing on any more. Idempotent."""


class AtOnce:
    """Passes words on in the thread that says them: what a CPU was told to write is written."""

    def say(self, word: Word) -> None:
        """Pass on a word."""
        word()

    def say_written(self, word: Word) -> None:
        """Pass on a word."""
        word()

    def settle(self, seconds: float) -> bool:
        """Return True: nothing is ever left."""
        del seconds
        return True

    def close(self) -> None:
        """Do nothing."""


class AfterDevice:
    """Passes words on in a thread of its own.

    Args:
        record: records an event on the forward thread's stream and returns it; what is returned tells with ``query()``
            whether the device has got there.
        deadline_s: longest wait for one event.
    """

    def __init__(self, record: Callable[[], Any], deadline_s: float = DEVICE_S) -> None:
        self._record = record
        self._deadline_s = deadline_s
        self._words: queue.SimpleQueue[tuple[Any, Word] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tidal-written", daemon=True)
        self._thread.start()

    def say(self, word: Word) -> None:
        """Pass on a word after all that was said before."""
        self._words.put((None, word))

    def say_written(self, word: Word) -> None:
        """Pass on a word after all that was said before, and once the device has done what it was given so far."""
        self._words.put((self._record(), word))

    def settle(self, seconds: float) -> bool:
        """Return whether everything said so far was passed on within a time."""
        passed = threading.Event()
        self.say(passed.set)
        return passed.wait(seconds)

    def close(self) -> None:
        """End the thread; what is still waiting is dropped. Idempotent."""
        self._closing.set()
        self._words.put(None)
        self._thread.join(self._deadline_s)

    def _run(self) -> None:
        while (said := self._words.get()) is not None and not self._closing.is_set():
            event, word = said
            try:
                if event is None or self._passed(event):
                    word()
            except Exception:
                logger.exception("what the device wrote could not be passed on")

    def _passed(self, event: Any) -> bool:
        until = time.monotonic() + self._deadline_s
        while not event.query():
            if self._closing.is_set():
                return False
            if time.monotonic() > until:
                logger.error(
                    "the device has not finished a layer within %.0f s: its rows are not sent; look for a hung kernel",
                    self._deadline_s,
                )
                return False
            time.sleep(POLL_S)
        return True


def timeline_of(device: Any) -> Timeline:
    """Return the timeline of a cache's device (a ``torch.device``)."""
    if device.type == "cpu":
        return AtOnce()
    import torch

    module = torch.get_device_module(device)
    return AfterDevice(lambda: module.current_stream(device).record_event())
