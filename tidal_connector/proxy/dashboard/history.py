# SPDX-License-Identifier: Apache-2.0
"""The bounded past of the dashboard: what happened between two looks, and rows for the charts. Pure, no clock.

Rates are of a short stretch that trails each look, so that a slow trickle is not a row of spikes; quantiles of a longer
one, so that there is something to take a quantile of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tidal_connector.proxy.dashboard.answer import Row
from tidal_connector.proxy.timings import Counts, quantile, total

KEEP_S = 900.0
RATE_S = 10.0
QUANTILE_S = 30.0
MINUTE_S = 60.0
MOST_LOOKS = 480
"""Enough for ``KEEP_S`` at the quickest pace; also the bound if somebody looks quicker."""

STRETCHES = 60
STRETCH_S = KEEP_S / STRETCHES


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What happened since the look before, and what is so now.

    Attributes:
        at: monotonic seconds.
        outcomes: requests that ended, by outcome; failed: how many of them failed for their clients.
        retries: attempts beyond a request's first.
        gains: what the engines' counters gained, over all engines.
        first_byte, per_token: of the requests that ended.
        in_flight, queued, transfers: now.
    """

    at: float
    outcomes: Mapping[str, int]
    failed: int
    retries: int
    gains: Mapping[str, float]
    first_byte: Counts
    per_token: Counts
    in_flight: int
    queued: int
    transfers: float | None


class History:
    """The looks of the last ``KEEP_S`` and a numbered row for each."""

    def __init__(self) -> None:
        self._looks: deque[Look] = deque(maxlen=MOST_LOOKS)
        self._rows: deque[tuple[int, Row]] = deque(maxlen=MOST_LOOKS)
        self._started: float | None = None
        self.sequence = 0

    def add(self, look: Look, seconds: float) -> None:
        """Keep a look.

        Args:
            look: the newest.
            seconds: since the look before it (or since the start), at least a little.
        """
        if self._started is None:
            self._started = look.at - seconds
        while self._looks and self._looks[0].at < look.at - KEEP_S:
            self._looks.popleft()
            self._rows.popleft()
        self._looks.append(look)
        self.sequence += 1
        self._rows.append((self.sequence, self._row(look, seconds)))

    def rows_since(self, sequence: int) -> list[Row]:
        """Return the rows that are newer than a number."""
        return [row for number, row in self._rows if number > sequence]

    def recent(self, seconds: float) -> Iterator[Look]:
        """Yield the looks of the last seconds, newest first."""
        for look in reversed(self._looks):
            if look.at < self._looks[-1].at - seconds:
                return
            yield look

    def _row(self, look: Look, seconds: float) -> Row:
        trailing = max(seconds, min(RATE_S, look.at - (self._started or 0.0)))
        near = list(self.recent(trailing - 1e-3))
        far = list(self.recent(max(seconds, QUANTILE_S)))
        first = total(each.first_byte for each in far)
        token = total(each.per_token for each in far)
        hits = sum(each.gains.get("selection_hits", 0.0) for each in near)
        misses = sum(each.gains.get("selection_misses", 0.0) for each in near)
        values = (
            sum(sum(each.outcomes.values()) for each in near) / trailing,
            sum(each.failed for each in near) / trailing,
            look.in_flight,
            look.queued,
            quantile(first, 0.5),
            quantile(first, 0.99),
            quantile(token, 0.5),
            quantile(token, 0.99),
            sum(each.gains.get("bytes_pushed", 0.0) for each in near) / trailing,
            look.transfers,
            hits / (hits + misses) if hits + misses else None,
        )
        return [round(look.at, 2), *(None if value is None else _short(value) for value in values)]


class Ribbon:
    """The states and the load of one engine, in stretches of ``STRETCH_S``: the worst state, the most requests.

    A stretch that nobody looked into has the letter ``.``.
    """

    WORST_FIRST = "xudsr."

    def __init__(self) -> None:
        self._cells: deque[tuple[str, int]] = deque(maxlen=STRETCHES)
        self._stretch: int | None = None

    def add(self, at: float, letter: str, load: int) -> None:
        """Note a state and a load at a moment not before the last one."""
        stretch = int(at // STRETCH_S)
        if self._stretch is None:
            self._stretch = stretch - 1
        for _ in range(min(stretch - self._stretch, STRETCHES)):
            self._cells.append((".", 0))
        self._stretch = max(stretch, self._stretch)
        before, most = self._cells[-1]
        self._cells[-1] = (min(before, letter, key=self.WORST_FIRST.index), max(most, load))

    @property
    def states(self) -> str:
        """One letter for each stretch, oldest first."""
        return "".join(letter for letter, _ in self._cells)

    @property
    def loads(self) -> Sequence[int]:
        """The most requests in each stretch, oldest first."""
        return [load for _, load in self._cells]


def _short(value: float) -> float:
    """Return five digits of a number: enough for a chart, and a third of the bytes."""
    return float(f"{value:.5g}") if abs(value) < 1e5 else round(value, 1)
