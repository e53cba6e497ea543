# SPDX-License-Identifier: Apache-2.0
"""Durations, kept so that any quantile of any stretch of time can be told. Pure.

Whoever sees durations only counts; whoever shows them takes what has come together since it last asked, and adds
stretches up. Buckets lie 5 % apart, so a quantile is right within 2.5 %, and memory is bounded whatever comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

SHORTEST_S = 1e-5
"""Anything shorter counts as this."""

LONGEST_S = 86400.0
"""Anything longer counts as this."""

_STEP = math.log(1.05)
_LAST = math.ceil(math.log(LONGEST_S / SHORTEST_S) / _STEP)

Counts = Mapping[int, int]
"""How many durations fell into each bucket that is not empty."""


class Timings:
    """Durations of one kind since they were last taken."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def observe(self, seconds: float) -> None:
        """Count one duration; what is no number is not counted, since showing must never fail a request."""
        if not math.isnan(seconds):
            bounded = min(max(seconds, SHORTEST_S), LONGEST_S)
            bucket = min(_LAST, round(math.log(bounded / SHORTEST_S) / _STEP))
            self._counts[bucket] = self._counts.get(bucket, 0) + 1

    def take(self) -> Counts:
        """Return what was counted since the last call."""
        counts, self._counts = self._counts, {}
        return counts


def total(counts: Iterable[Counts]) -> Counts:
    """Return several stretches as one."""
    merged: dict[int, int] = {}
    for each in counts:
        for bucket, number in each.items():
            merged[bucket] = merged.get(bucket, 0) + number
    return merged


def quantile(counts: Counts, share: float) -> float | None:
    """Return the duration that this share of all does not exceed; None where nothing was counted.

    Args:
        counts: from :meth:`Timings.take` or :func:`total`.
        share: 0.5 for the median, 0.99 for the 99th percentile.
    """
    left = math.ceil(share * sum(counts.values()))
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0:
            return SHORTEST_S * math.exp(bucket * _STEP)
    return None
