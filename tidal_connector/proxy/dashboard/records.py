# SPDX-License-Identifier: Apache-2.0
"""One engine in one role over time: its state, what its counters gained lately, and its ribbon. Pure, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from tidal_connector.proxy.dashboard.answer import EngineRow
from tidal_connector.proxy.dashboard.findings import clip
from tidal_connector.proxy.dashboard.history import MINUTE_S, RATE_S, Ribbon
from tidal_connector.proxy.dashboard.readings import Gains, Reading
from tidal_connector.proxy.view import EngineView

MISSES = 2
"""An engine that was heard of before cannot be reached once it has not answered so often in succession."""

LETTERS = {"ready": "r", "starting": "s", "draining": "d", "down": "x", "unreachable": "u"}


class Reply(msgspec.Struct, frozen=True):
    """What an engine answered to one look: its numbers, None without an answer, and whether it calls itself healthy."""

    reading: Reading | None
    healthy: bool


class _Mark(msgspec.Struct, frozen=True):
    """What the counters have gained since the engine was first seen, and over how many seconds that was read."""

    at: float
    covered_s: float
    gained: Mapping[str, float]


class Record:
    """What is remembered of one engine in one role.

    Args:
        view: the engine, as the proxy sees it.
        at: monotonic seconds.
    """

    def __init__(self, view: EngineView, at: float) -> None:
        self.view = view
        self.seen_at = at
        self.state = "starting"
        self._since = at
        self._heard = False
        self._misses = 0
        self._reading: Reading = {}
        self._read_at: float | None = None
        self._gains = Gains()
        self._lately: deque[_Mark] = deque([_Mark(at, 0.0, {})])
        self._failures: deque[tuple[float, int]] = deque([(at, view.failures)])
        self._ribbon = Ribbon()

    def look(self, view: EngineView, reply: Reply, at: float) -> Mapping[str, float]:
        """Note what was seen, and return what the engine's counters gained since the look before.

        Args:
            view: the engine as the proxy sees it now.
            reply: what it answered.
            at: monotonic seconds.
        """
        self.view, self.seen_at = view, at
        silent = reply.reading is None and not reply.healthy
        self._misses = self._misses + 1 if silent else 0
        self._heard = self._heard or not silent
        gains: Mapping[str, float] = {}
        if reply.reading is not None:
            gains = self._gains.since_last(reply.reading)
            before = self._lately[-1]
            covered = before.covered_s + (at - self._read_at if self._read_at is not None else 0.0)
            gained = {name: before.gained.get(name, 0.0) + gain for name, gain in gains.items()}
            self._lately.append(_Mark(at, covered, {**before.gained, **gained}))
            self._reading, self._read_at = reply.reading, at
        while len(self._lately) > 1 and self._lately[1].at <= at - MINUTE_S:
            self._lately.popleft()
        self._failures.append((at, view.failures))
        while len(self._failures) > 1 and self._failures[1][0] < at - MINUTE_S:
            self._failures.popleft()
        self._become(self._judge(reply), at)
        self._ribbon.add(at, LETTERS[self.state], self._load)
        return gains

    def miss(self, at: float) -> None:
        """Note that the proxy no longer knows the engine."""
        if self.state not in {"gone", "left"}:
            self._become("left" if self.state == "draining" else "gone", at)
        self._ribbon.add(at, ".", 0)

    def gained(self, name: str, seconds: float, at: float) -> float:
        """Return what a counter gained in the last seconds, at most a minute."""
        return self._lately[-1].gained.get(name, 0.0) - self._mark(at - seconds).gained.get(name, 0.0)

    @property
    def failures(self) -> int:
        """Requests that failed on the engine in the last minute."""
        return max(0, self._failures[-1][1] - self._failures[0][1])

    @property
    def transfers(self) -> float | None:
        """Transfers in flight on the engine's side; None where it is not known."""
        return self._now("transfers_in_flight")

    def row(self, at: float) -> EngineRow:
        """Return what the page shows of the engine."""
        view = self.view
        counter = "bytes_pushed" if view.role == "prefill" else "bytes_received"
        hits, misses = (self.gained(name, RATE_S, at) for name in ("selection_hits", "selection_misses"))
        over = self._lately[-1].covered_s - self._mark(at - RATE_S).covered_s
        return EngineRow(
            engine=view.engine,
            role=view.role,
            state=self.state,
            state_s=round(at - self._since, 1),
            http=clip(view.http),
            node=clip(view.node),
            revision=clip(view.revision),
            note=clip(view.note or self._sick),
            requests=view.requests,
            tokens=view.tokens,
            failures=view.failures,
            running=self._now("num_requests_running"),
            waiting=self._now("num_requests_waiting"),
            transfers=self.transfers,
            bytes_s=round(self.gained(counter, RATE_S, at) / over, 1) if over and self._answers else None,
            bytes=self._now(counter),
            kv=self._share("pool_pages_used", "pool_pages") or self._now("kv_cache_usage_perc"),
            slots=self._share("selection_slots_used", "selection_slots"),
            hit_rate=round(hits / (hits + misses), 4) if hits + misses else None,
            quarantined=self._now("pages_quarantined"),
            states=self._ribbon.states,
            loads=self._ribbon.loads,
        )

    @property
    def _answers(self) -> bool:
        return self.state not in {"gone", "left", "unreachable"} and self._read_at == self.seen_at

    @property
    def _load(self) -> int:
        inside = self._reading.get("num_requests_running", 0) + self._reading.get("num_requests_waiting", 0)
        return max(int(inside) if self._answers else 0, self.view.requests)

    @property
    def _sick(self) -> str:
        return "its /health does not answer 200" if self.state == "down" and self.view.state != "down" else ""

    def _mark(self, at: float) -> _Mark:
        """Return the last mark that is not newer than a moment, or the oldest."""
        for mark in reversed(self._lately):
            if mark.at <= at:
                return mark
        return self._lately[0]

    def _judge(self, reply: Reply) -> str:
        state = self.view.state
        if state not in {"ready", "draining"}:
            return state if state in LETTERS else "down"
        if not self.view.reachable or self._misses >= (MISSES if self._heard else 1):
            return "unreachable"
        return "down" if reply.reading is not None and not reply.healthy else state

    def _become(self, state: str, at: float) -> None:
        if state != self.state:
            self.state, self._since = state, at

    def _now(self, name: str) -> float | None:
        return self._reading.get(name) if self._answers else None

    def _share(self, part: str, whole: str) -> float | None:
        used, there = self._now(part), self._now(whole)
        return round(used / there, 4) if used is not None and there else None
