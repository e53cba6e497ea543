# SPDX-License-Identifier: Apache-2.0
"""Quantiles of what the proxy has seen: right within a bucket, bounded, and taken once."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from tidal_connector.proxy.timings import LONGEST_S, SHORTEST_S, Timings, quantile, total


def test_quantiles_are_right_within_a_bucket() -> None:
    random.seed(7)
    values = [math.exp(random.gauss(-2, 1)) for _ in range(5000)]
    timings = Timings()
    for value in values:
        timings.observe(value)
    counts = timings.take()
    cuts = statistics.quantiles(values, n=100)
    assert quantile(counts, 0.5) == pytest.approx(cuts[49], rel=0.03)
    assert quantile(counts, 0.99) == pytest.approx(cuts[98], rel=0.05)


def test_taking_empties_and_stretches_add_up() -> None:
    timings = Timings()
    timings.observe(1.0)
    first = timings.take()
    assert timings.take() == {}
    timings.observe(100.0)
    timings.observe(100.0)
    both = total([first, timings.take()])
    assert sum(both.values()) == 3
    assert quantile(both, 0.2) == pytest.approx(1.0, rel=0.03)
    assert quantile(both, 0.5) == pytest.approx(100.0, rel=0.03)


def test_nothing_counted_is_no_number() -> None:
    assert quantile({}, 0.99) is None


@pytest.mark.parametrize("odd", [-1.0, 0.0, math.inf, -math.inf, 1e300, 1e-300])
def test_odd_durations_are_kept_within_bounds(odd: float) -> None:
    timings = Timings()
    timings.observe(odd)
    value = quantile(timings.take(), 0.5)
    assert value is not None
    assert SHORTEST_S * 0.95 <= value <= LONGEST_S * 1.05


def test_what_is_no_number_is_left_out() -> None:
    timings = Timings()
    timings.observe(math.nan)
    assert timings.take() == {}


def test_memory_is_bounded_by_the_buckets() -> None:
    timings = Timings()
    for number in range(20_000):
        timings.observe(SHORTEST_S * 1.01 ** (number % 3000))
    assert len(timings.take()) < 500
