# SPDX-License-Identifier: Apache-2.0
"""Which memory a plane may read or write: registered ranges, never merged across a border.

The transports do not tell: Mooncake over TCP accepts an unregistered source, and rejects a target only at
    the peer, at
the price of a second's pause for everybody. So every plane asks here before it hands a run on. Not
thread-safe.
"""

from __future__ import annotations

import bisect


class Ranges:
    """Disjoint address ranges, in bytes."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, address: int, length: int) -> None:
        """Add a range; neighbours stay apart, as they are apart for the transport.

        Raises:
            ValueError: it is empty or overlaps one that is there.
        """
        if length < 1 or address < 1:
            raise ValueError(f"{length} bytes at {address:#x}: expected a positive length and address")
        place = bisect.bisect_right(self._starts, address)
        before = place > 0 and self._ends[place - 1] > address
        after = place < len(self._starts) and self._starts[place] < address + length
        if before or after:
            raise ValueError(f"{length} bytes at {address:#x} overlap a registered range")
        self._starts.insert(place, address)
        self._ends.insert(place, address + length)

    def covers(self, address: int, length: int) -> bool:
        """Say whether the bytes lie inside one single range."""
        place = bisect.bisect_right(self._starts, address)
        return place > 0 and address + length <= self._ends[place - 1]

    def items(self) -> list[tuple[int, int]]:
        """Return (address, length) of all ranges, ascending."""
        return [(start, end - start) for start, end in zip(self._starts, self._ends, strict=True)]
