# SPDX-License-Identifier: Apache-2.0
"""Streams and events of a device that finishes everything at once.

Order between streams cannot go wrong here, but one thing can be seen: who waits for an event that nobody has
recorded. On a device such a wait ends at once and orders nothing, so here it raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class UnrecordedEvent(RuntimeError):
    """Somebody waits for an event before anybody has recorded it."""


class Event:
    """An event; ``recorded`` counts how often it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.recorded = 0

    def record(self, stream: Stream | None = None) -> None:
        self.recorded += 1

    def wait(self, stream: Stream | None = None) -> None:
        if not self.recorded:
            raise UnrecordedEvent("an event was waited for before it was recorded; the wait orders nothing")

    def synchronize(self) -> None:
        self.wait()

    def query(self) -> bool:
        return True

    def reset(self, stream: Stream | None = None) -> None:
        self.recorded = 0


class Stream:
    """A stream; everything given to it has already run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.npu_stream = id(self)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        return

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        return


_entered = [Stream()]


def current(device: object = None) -> Stream:
    """Return the innermost stream that is entered."""
    return _entered[-1]


@contextmanager
def on(stream: Stream | None) -> Iterator[None]:
    """Enter a stream for the length of a block."""
    _entered.append(stream or current())
    try:
        yield
    finally:
        _entered.pop()
