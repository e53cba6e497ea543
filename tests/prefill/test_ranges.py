# SPDX-License-Identifier: Apache-2.0
"""Ranges against plain sets of numbers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tidal_connector.prefill.ranges import EMPTY, Ranges, clip, count, minus, remove, unite

NUMBERS = st.integers(0, 24)
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=6)


def built(pairs: list[tuple[int, int]]) -> Ranges:
    ranges = EMPTY
    for first, end in pairs:
        ranges = unite(ranges, first, end)
    return ranges


def numbers(ranges: Ranges) -> set[int]:
    return {token for first, end in ranges for token in range(first, end)}


def span(pairs: list[tuple[int, int]]) -> set[int]:
    return {token for first, end in pairs for token in range(first, end)}


@given(PAIRS)
def test_unite_is_a_union_and_stays_canonical(pairs: list[tuple[int, int]]) -> None:
    ranges = built(pairs)
    assert numbers(ranges) == span(pairs)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))
    assert all(first < end for first, end in ranges)
    assert count(ranges) == len(span(pairs))


@given(PAIRS, NUMBERS, NUMBERS)
def test_remove_and_clip_part_a_set_in_two(pairs: list[tuple[int, int]], first: int, end: int) -> None:
    ranges = built(pairs)
    inside, outside = clip(ranges, first, end), remove(ranges, first, end)
    assert numbers(inside) == numbers(ranges) & set(range(first, end))
    assert numbers(outside) == numbers(ranges) - set(range(first, end))


@given(PAIRS, PAIRS)
def test_minus_is_a_difference(pairs: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    assert numbers(minus(built(pairs), built(others))) == span(pairs) - span(others)
