# SPDX-License-Identifier: Apache-2.0
"""Sets of token numbers as sorted, disjoint, non-touching ranges ``(first, end)``. Pure."""

from __future__ import annotations

from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]

EMPTY: Ranges = ()


def unite(ranges: Ranges, first: int, end: int) -> Ranges:
    """Add the tokens ``[first, end)``."""
    if first >= end:
        return ranges
    before = [item for item in ranges if item[1] < first]
    after = [item for item in ranges if item[0] > end]
    touching = ranges[len(before) : len(ranges) - len(after)]
    if touching:
        first, end = min(first, touching[0][0]), max(end, touching[-1][1])
    return (*before, (first, end), *after)


def remove(ranges: Ranges, first: int, end: int) -> Ranges:
    """Take the tokens ``[first, end)`` out."""
    kept: list[tuple[int, int]] = []
    for a, b in ranges:
        kept.extend(piece for piece in ((a, min(b, first)), (max(a, end), b)) if piece[0] < piece[1])
    return tuple(kept) if first < end else ranges


def clip(ranges: Ranges, first: int, end: int) -> Ranges:
    """Keep only the tokens within ``[first, end)``."""
    clipped = ((max(a, first), min(b, end)) for a, b in ranges)
    return tuple(item for item in clipped if item[0] < item[1])


def minus(ranges: Ranges, other: Ranges) -> Ranges:
    """Take the tokens of another set out."""
    for first, end in other:
        ranges = remove(ranges, first, end)
    return ranges


def count(ranges: Ranges) -> int:
    """Number of tokens."""
    return sum(end - first for first, end in ranges)
