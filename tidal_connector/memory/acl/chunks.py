# SPDX-License-Identifier: Apache-2.0
"""Where one registration of a region ends and the next begins. Pure; offsets and lengths are bytes.

A single registration has a largest size, so a pool of hundreds of GiB takes several. Their aliases need not adjoin, and
what a kernel reads as one tensor must not cross such a border: so a chunk ends where a layer does, if its caller says
where that is, and on a hugepage's border otherwise.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

PAGE = 4096  # what the runtime demands of a registration's start
HUGE = 2 << 20  # what the driver maps in one entry, where address and pages allow it
SMALLEST = 64 << 20  # smaller chunks are not tried: then memory is short in all, and not for one registration


@dataclass(frozen=True, slots=True)
class Run:
    """A range of a region."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + self.length


def check_cuts(cuts: Sequence[int], total: int) -> tuple[int, ...]:
    """Return cuts in order, each once.

    Raises:
        ValueError: one lies outside the region or on no 4 KiB border, where no registration can begin.
    """
    for cut in cuts:
        if cut % PAGE or not 0 <= cut <= total:
            raise ValueError(f"cut at {cut}: expected a multiple of {PAGE} from 0 to {total}")
    return tuple(sorted(set(cuts)))


def next_chunk(offset: int, total: int, limit: int, cuts: Sequence[int] = (), address: int = 0) -> Run:
    """Return the chunk that begins at ``offset``.

    It reaches as far as ``limit`` allows, back to the last cut in it, and without one back to the last 2 MiB border.

    Args:
        offset: start, a multiple of 4 KiB and below ``total``.
        total: length of the region.
        limit: most bytes of a chunk, a multiple of 2 MiB.
        cuts: offsets at which a chunk should end, in order.
        address: of the region's first byte: borders are counted in addresses.
    """
    furthest = offset + limit
    if furthest >= total:
        return Run(offset, total - offset)
    found = bisect_right(cuts, furthest) - 1
    if found >= 0 and cuts[found] > offset:
        return Run(offset, cuts[found] - offset)
    end = (address + furthest) // HUGE * HUGE - address
    return Run(offset, (end if end > offset else furthest) - offset)


def plan_chunks(total: int, limit: int, cuts: Sequence[int] = (), address: int = 0) -> tuple[Run, ...]:
    """Return all chunks of a region, in order, as :func:`next_chunk` makes them."""
    chunks: list[Run] = []
    while not chunks or chunks[-1].end < total:
        chunks.append(next_chunk(chunks[-1].end if chunks else 0, total, limit, cuts, address))
    return tuple(chunks)


def longest_parted(cuts: Sequence[int], borders: Sequence[int]) -> int:
    """Return the length of the longest range from one cut to the next that has a border inside; 0 if none has.

    What lies before the first cut and behind the last is nobody's tensor, as far as is known here.

    Args:
        cuts: in order, each once.
        borders: offsets at which the alias jumps, in order.
    """
    parted = (end - start for start, end in pairwise(cuts) if bisect_right(borders, start) < bisect_left(borders, end))
    return max(parted, default=0)


def smaller(length: int) -> int | None:
    """Return the limit to try after a chunk of this length was too large; None if it was among the smallest."""
    if length <= SMALLEST:
        return None
    return max(SMALLEST, length // 2 // HUGE * HUGE)
