# SPDX-License-Identifier: Apache-2.0
"""The descriptors of one peer: which goes next, which are in flight, which tickets have ended.

Pure bookkeeping without a clock, a lock or a transport, so that all planes share the rule that matters: a
    ticket ends
only when everything of it that was handed on has ended. The owner serialises the calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from tidal_connector.transfer.plane import Receipt, Ticket
from tidal_connector.transfer.runs import Run, split_runs

# Descriptors of a few KiB cost their round trip and not their bytes: up to _MANY windows of them may be in flight while
# they hold less than a _SMALL-th of one large descriptor. Rows of 1,152 bytes go 1.6 times as fast; 72 KiB do not.
_MANY, _SMALL = 4, 16


class Descriptor(msgspec.Struct, frozen=True):
    """One write in flight: a key that is never used twice, and its bytes."""

    key: int
    run: Run


class _Job:
    """One ticket on its way."""

    __slots__ = (
        "acknowledged",
        "added",
        "clean",
        "following",
        "in_flight",
        "reason",
        "rest",
        "started",
        "ticket",
    )

    def __init__(self, ticket: Ticket, rest: Iterator[Run], added: float) -> None:
        self.ticket = ticket
        self.rest = rest
        self.following = next(rest, None)  # None: nothing (more) to hand on
        self.added = added
        self.started: float | None = None
        self.in_flight = 0
        self.acknowledged = 0
        self.reason = ""
        self.clean = True


class Feed:
    """Windowed feeding of tickets in the order of their submission.

    Args:
        window: descriptors in flight at most; more of very small ones.
        largest: bytes of a descriptor at most.
    """

    def __init__(self, window: int, largest: int) -> None:
        self._window = window
        self._largest = largest
        self._jobs: dict[Ticket, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._flying: dict[int, tuple[_Job, Run]] = {}
        self._flying_bytes = 0
        self._next_key = 1
        self._finished: list[Receipt] = []

    @property
    def in_flight(self) -> int:
        """Descriptors handed on that have not ended."""
        return len(self._flying)

    @property
    def idle(self) -> bool:
        """Nothing is waiting, in flight, or finished and not taken."""
        return not self._jobs and not self._finished

    @property
    def may_feed(self) -> bool:
        """:meth:`next` would hand on a descriptor."""
        if not self._waiting or len(self._flying) >= _MANY * self._window:
            return False
        return len(self._flying) < self._window or self._flying_bytes < self._largest // _SMALL

    def add(self, ticket: Ticket, runs: Sequence[Run], now: float) -> None:
        """Queue a ticket; one without bytes ends at once, well."""
        job = _Job(ticket, split_runs(tuple(runs), self._largest), now)
        self._jobs[ticket] = job
        if job.following is None:
            self._end(job, now)
        else:
            self._waiting.append(job)

    def next(self, now: float) -> Descriptor | None:
        """Take the next descriptor, in flight from now on; None if the window is full or nothing waits."""
        if not self.may_feed:
            return None
        job = self._waiting[0]
        run = job.following
        assert run is not None  # a job waits only while it has a following descriptor
        job.following = next(job.rest, None)
        if job.following is None:
            self._waiting.popleft()
        key, self._next_key = self._next_key, self._next_key + 1
        self._flying[key] = (job, run)
        self._flying_bytes += run.length
        job.in_flight += 1
        job.started = now if job.started is None else job.started
        return Descriptor(key, run)

    def ended(self, key: int, reason: str, now: float, *, sent: bool = True) -> None:
        """Note the end of a descriptor; a reason means failure and stops the feeding of its ticket.

        ``sent=False``: it was refused before the transport saw it, so nothing of it can land late.
        """
        job, run = self._flying.pop(key)
        self._flying_bytes -= run.length
        job.in_flight -= 1
        if reason:
            job.clean = job.clean and not sent
            self._stop(job, reason)
        else:
            job.acknowledged += run.length
        if not job.in_flight and job.following is None:
            self._end(job, now)

    def stop(self, ticket: Ticket, reason: str, now: float) -> None:
        """Feed nothing more of a ticket; without effect if it has ended or was handed on completely."""
        job = self._jobs.get(ticket)
        if job is None or job.following is None:
            return
        self._stop(job, reason)
        if not job.in_flight:
            self._end(job, now)

    def stop_all(self, reason: str, now: float) -> None:
        """Feed nothing more of any ticket; what is in flight still has to end."""
        for ticket in list(self._jobs):
            self.stop(ticket, reason, now)

    def end_all(self, reason: str, now: float) -> None:
        """End everything as failed: only when the transport itself is gone and reads no source any more."""
        self.stop_all(reason, now)
        for key in list(self._flying):
            self.ended(key, reason, now)

    def take_finished(self) -> list[Receipt]:
        """Return the receipts since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _stop(self, job: _Job, reason: str) -> None:
        job.reason = job.reason or reason
        if job.following is not None:
            job.following = None
            self._waiting.remove(job)

    def _end(self, job: _Job, now: float) -> None:
        del self._jobs[job.ticket]
        started = job.added if job.started is None else job.started
        self._finished.append(
            Receipt(job.ticket, not job.reason, job.acknowledged, started, now, job.reason, job.clean)
        )
