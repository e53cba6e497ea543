# SPDX-License-Identifier: Apache-2.0
"""Looks at the proxy and its engines again and again, beside the requests: often while somebody watches, else rarely.

Takes a :class:`~tidal_connector.proxy.view.View`; hands on an :class:`~tidal_connector.proxy.dashboard.answer.Answer`.
Everything is bounded: engines, pairs, the past, each question's time and size, and how many are asked at once. A look
that fails is logged once and the next one tries again. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping

from tidal_connector import __version__
from tidal_connector.log import get_logger
from tidal_connector.proxy.beside import beside
from tidal_connector.proxy.dashboard.answer import Answer, EngineRow, Finding, Registry, Rollout, Totals
from tidal_connector.proxy.dashboard.findings import (
    CRITICAL,
    WARNING,
    Found,
    Minute,
    clip,
    find,
    mixed_revisions,
    verdict,
)
from tidal_connector.proxy.dashboard.history import KEEP_S, MINUTE_S, History, Look
from tidal_connector.proxy.dashboard.readings import COUNTERS, parse_metrics
from tidal_connector.proxy.dashboard.records import Record, Reply
from tidal_connector.proxy.timings import Timings
from tidal_connector.proxy.view import ProxyState, Sample, View

_log = get_logger(__name__)

WATCHED_S = 2.0
"""Between two looks while somebody watches, or more where there are many engines."""
ALONE_S = 10.0
"""Between two looks otherwise: enough for a past to be there when somebody comes."""
PER_ENGINE_S = 0.05
WATCHER_S = 12.0
"""A page that has not asked for so long is closed."""
READ_S = 1.5
AT_ONCE = 16
STRIDE = 8
MOST_ENGINES = 256
MOST_PAIRS = 400
MOST_FINDINGS = 60
FRESH_WITHIN_S = 2 * READ_S

_FINE = frozenset({"ok", "refused", "disconnected"})  # the client's own doing, or none's
_NUMBERS = re.compile(r"([0-9]+)")
_ROLES = {"prefill": 0, "decode": 1}

Key = tuple[str, str]


class Sampler:
    """The dashboard's memory.

    Args:
        view: the proxy.
        clock: monotonic seconds.
    """

    def __init__(self, view: View, clock: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self._clock = clock
        self._boot = secrets.token_hex(8)
        self._started = self._looked = clock()
        self._watched = -WATCHER_S
        self._watcher = asyncio.Event()
        self._news = asyncio.Event()
        self._history = History()
        self._records: dict[Key, Record] = {}
        self._since: dict[str, float] = {}
        self._before: ProxyState | None = None
        self._bytes = 0.0
        self._broken = ""
        self._answer: Answer | None = None

    @property
    def every_s(self) -> float:
        """Seconds between two looks, as things are."""
        if self._clock() - self._watched > WATCHER_S:
            return ALONE_S
        return max(WATCHED_S, PER_ENGINE_S * len(self._records))

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Look in the background as long as the context is open."""
        return beside(self._run)

    async def answer(self, since: int = 0, boot: str = "") -> Answer | None:
        """Return what the page shows, no older than a few seconds; None where nothing was seen yet.

        Args:
            since: the newest row that the page has.
            boot: the life of the proxy that this number belongs to.
        """
        alone = self._clock() - self._watched > WATCHER_S
        self._watched = self._clock()
        if alone or self._answer is None:
            self._news.clear()
            self._watcher.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FRESH_WITHIN_S):
                    await self._news.wait()
        if self._answer is None:
            return None
        self._answer.now_s = round(self._clock() - self._started, 2)
        self._answer.every_s = self.every_s
        self._answer.rows = self._history.rows_since(since if boot == self._boot else 0)
        return self._answer

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.every_s):
                    await self._watcher.wait()
            self._watcher.clear()
            try:
                await self.look()
                self._broken = ""
            except Exception as error:  # a page must not end what it looks at, nor go blind for good
                if self._broken != (text := f"{type(error).__name__}: {error}"):
                    self._broken = text
                    _log.exception("the dashboard could not look: %s", text)

    async def look(self) -> None:
        """Look once at everything."""
        known = list(dict.fromkeys(view.engine for view in self._view.state().engines))[:MOST_ENGINES]
        slots = asyncio.Semaphore(AT_ONCE)
        replies = dict(zip(known, await asyncio.gather(*(self._ask(name, slots) for name in known)), strict=True))
        state, now = self._view.state(), self._clock()
        gained: dict[str, Mapping[str, float]] = {}  # by engine: one that is there in both roles counts once
        seen: set[Key] = set()
        for view in state.engines:
            if view.engine in replies:  # one that came meanwhile waits for the next look
                seen.add(key := (view.engine, view.role))
                record = self._records.setdefault(key, Record(view, now))
                gained[view.engine] = record.look(view, replies[view.engine], now)
                await self._let_requests_by(len(seen))
        self._note_missing(seen, now)
        gains = {name: sum(each.get(name, 0.0) for each in gained.values()) for name in COUNTERS}
        self._bytes += gains.get("bytes_pushed", 0.0)
        seconds = max(now - self._looked, 1e-3)
        self._looked = now
        self._history.add(self._happened(state, gains, now), seconds)
        self._before = state
        rows = []
        for record in [*self._records.values()]:
            rows.append(record.row(now))
            await self._let_requests_by(len(rows))
        self._answer = self._draw(state, rows, now)
        self._news.set()

    @staticmethod
    async def _let_requests_by(number: int) -> None:
        """Give the event loop away after every few engines: a look at hundreds takes tens of milliseconds."""
        if number % STRIDE == 0:
            await asyncio.sleep(0)

    async def _ask(self, engine: str, slots: asyncio.Semaphore) -> Reply:
        async def read(path: str) -> bytes | None:
            try:
                async with slots, asyncio.timeout(READ_S):
                    return await self._view.read(engine, path)
            except TimeoutError:
                return None

        health, text = await asyncio.gather(read("/health"), read("/metrics"))
        return Reply(None if text is None else parse_metrics(text), health is not None)

    def _note_missing(self, seen: set[Key], now: float) -> None:
        for key in [*self._records.keys() - seen]:
            record = self._records[key]
            record.miss(now)
            if now - record.seen_at > KEEP_S or len(self._records) > MOST_ENGINES:
                del self._records[key]

    def _happened(self, state: ProxyState, gains: dict[str, float], now: float) -> Look:
        before = self._before
        outcomes = {
            kind: max(0, count - (before.requests.get(kind, 0) if before else 0))
            for kind, count in state.requests.items()
        }
        first, token = Timings(), Timings()
        for sample in _new(state.recent, before.recent if before else ()):
            if sample.events and sample.first_byte_s is not None:  # a whole answer's first byte comes with its last
                first.observe(sample.first_byte_s)
            if sample.event_s is not None:
                token.observe(sample.event_s)
        return Look(
            at=now - self._started,
            outcomes=outcomes,
            failed=sum(count for kind, count in outcomes.items() if kind not in _FINE),
            retries=max(0, state.retries - (before.retries if before else 0)),
            gains=gains,
            first_byte=first.take(),
            per_token=token.take(),
            in_flight=state.in_flight,
            queued=state.queued,
            transfers=self._transfers(),
        )

    def _transfers(self) -> float | None:
        """Both sides count a transfer, so the side that sees more is believed."""
        sides: dict[str, float] = {}
        for record in self._records.values():
            if record.transfers is not None:
                sides[record.view.role] = sides.get(record.view.role, 0.0) + record.transfers
        return max(sides.values(), default=None)

    def _draw(self, state: ProxyState, rows: list[EngineRow], now: float) -> Answer:
        rows.sort(key=lambda row: (_ROLES.get(row.role, 2), *_natural(row.engine)))
        minute = self._minute(now)
        found = find(state, rows, minute)
        level, headline = verdict(found, rows)
        busy = sorted((pair for pair in state.traffic if pair.requests), key=lambda pair: -pair.requests)[:MOST_PAIRS]
        barred = [pair for pair in state.traffic if pair.barred][:MOST_PAIRS]
        reasons = {reason: clip(reason) for reason in {pair.barred for pair in barred}}  # few, for many pairs
        registry = state.registry
        return Answer(
            boot=self._boot,
            sequence=self._history.sequence,
            now_s=now - self._started,
            every_s=self.every_s,
            keep_s=KEEP_S,
            listen=state.listen,
            policy=state.policy,
            version=__version__,
            level=level if level in {CRITICAL, WARNING} else "ok",
            headline=headline,
            findings=self._dated(found, now),
            engines=rows,
            pairs=[(pair.prefill, pair.decode, pair.requests) for pair in busy],
            barred=[(pair.prefill, pair.decode, reasons[pair.barred]) for pair in barred],
            totals=Totals(
                in_flight=state.in_flight,
                max_in_flight=state.max_in_flight,
                queued=state.queued,
                max_queue=state.max_queue,
                attempts=state.attempts,
                retries=state.retries,
                retries_minute=minute.retries,
                outcomes=dict(state.requests),
                silent_s=round(state.silent_s, 1),
                bytes=self._bytes,
            ),
            registry=Registry(clip(registry.url), registry.fresh, registry.age_s) if registry else None,
            rollout=Rollout(revisions) if (revisions := mixed_revisions(rows)) else None,
        )

    def _minute(self, now: float) -> Minute:
        failed: dict[str, int] = {}
        for look in self._history.recent(MINUTE_S):
            for kind, count in look.outcomes.items():
                if kind not in _FINE and count:
                    failed[kind] = failed.get(kind, 0) + count

        def by_engine(name: str) -> dict[str, float]:
            return {engine: record.gained(name, MINUTE_S, now) for (engine, _), record in self._records.items()}

        return Minute(
            failed=failed,
            retries=sum(look.retries for look in self._history.recent(MINUTE_S)),
            on_engine={engine: record.failures for (engine, _), record in self._records.items() if record.failures},
            transfers_failed=by_engine("transfers_failed"),
            handshakes_refused=by_engine("handshakes_refused"),
        )

    def _dated(self, found: Iterable[Found], now: float) -> list[Finding]:
        found = list(found)[:MOST_FINDINGS]
        self._since = {each.key: self._since.get(each.key, now) for each in found}
        return [
            Finding(each.level, each.what, each.hint, each.engine, round(now - self._since[each.key], 1))
            for each in found
        ]


def _new(recent: tuple[Sample, ...], before: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Return the samples that have come since; all of them where none is left of the earlier ones."""
    if before:
        for index in range(len(recent) - 1, -1, -1):
            if recent[index] == before[-1]:
                return recent[index + 1 :]
    return recent


def _natural(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return what sorts decode-10 behind decode-9."""
    parts = _NUMBERS.split(name)
    return [(int(part[:18]), "") if index % 2 else (-1, part) for index, part in enumerate(parts)], name
