# SPDX-License-Identifier: Apache-2.0
"""What happened to one request, for the log, the metrics and the dashboard. Pure; event loop's thread only."""

from __future__ import annotations

import time

from tidal_connector.proxy.meters import Outcome
from tidal_connector.proxy.view import Sample

_EVENT = b"data: {"  # not the end, which is "data: [DONE]"


class Story:
    """One request, written down while it runs.

    Args:
        id: request id, told to the client and the first of the engines.
        started: monotonic seconds.

    Attributes:
        outcome: how it ended.
        queued_s: seconds in line, and without a pair of engines.
        why: one line where it did not end well.
        attempts: pairs tried so far.
    """

    def __init__(self, id: str, started: float) -> None:
        self.id = id
        self.started = started
        self.outcome = Outcome.DISCONNECTED
        self.queued_s = 0.0
        self.why = ""
        self.attempts = 0
        self._pair = ("", "")
        self._first_at: float | None = None
        self._first_event_at = 0.0
        self._last_event_at = 0.0
        self._events = 0
        self._seconds = 0.0

    @property
    def attempt_id(self) -> str:
        """The request id of the newest attempt, which no other attempt has: engines remember one after its end."""
        return self.id if self.attempts <= 1 else f"{self.id}.{self.attempts}"

    def begin(self, prefill: str, decode: str) -> None:
        """An attempt on a pair begins."""
        self.attempts += 1
        self._pair = prefill, decode

    def first_byte(self, now: float) -> None:
        """The answer has begun."""
        self._first_at = now

    def events(self, piece: bytes, now: float) -> None:
        """A piece of a stream has come."""
        if not self._events:
            self._first_event_at = now
        self._events += piece.count(_EVENT)
        self._last_event_at = now

    def finish(self, now: float) -> Sample:
        """Return it as it ended."""
        self._seconds = now - self.started
        answered = self._first_at is not None
        between = self._events - 1
        return Sample(
            at=time.time(),
            outcome=self.outcome,
            queued_s=self.queued_s,
            first_byte_s=self._first_at - self.started if self._first_at is not None else None,
            seconds=self._seconds,
            events=self._events,
            event_s=(self._last_event_at - self._first_event_at) / between if between > 0 else None,
            prefill=self._pair[0] if answered else "",
            decode=self._pair[1] if answered else "",
            attempts=self.attempts,
        )

    def __str__(self) -> str:
        pair = " > ".join(self._pair) if self.attempts else "no engine"
        tries = f", {self.attempts} attempts" if self.attempts > 1 else ""
        why = f": {self.why}" if self.why else ""
        return f"{self.id}: {self.outcome}, {pair}{tries}, {self._seconds:.3f} s{why}"
