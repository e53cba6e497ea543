# SPDX-License-Identifier: Apache-2.0
"""Small batches written by hand, and the implementations that tests of ``resolve`` run over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tidal_connector.errors import NativeOpMissing
from tidal_connector.ops import Implementation, Resolved, Seats, SelectionBatch, SlotState, native, resolve


def _native() -> object:
    try:
        native.load()
    except NativeOpMissing as error:
        return pytest.param(Implementation.NATIVE, marks=[pytest.mark.native, pytest.mark.skip(reason=str(error))])
    return pytest.param(Implementation.NATIVE, marks=pytest.mark.native)


IMPLEMENTATIONS = [Implementation.REFERENCE, _native()]
every = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


class Bench:
    """Seats over an arena of extents of 4 rows, handed out from the last extent to the first.

    Args:
        implementation: which resolves.
        capacity: slots of each seat.
    """

    def __init__(self, implementation: Implementation, *capacity: int) -> None:
        self.implementation = implementation
        counts = [-(-slots // 4) for slots in capacity]
        extents = np.full((len(capacity), max(counts)), -1, np.int32)
        free = list(range(sum(counts)))
        for seat, count in enumerate(counts):
            extents[seat, :count] = [free.pop() for _ in range(count)]
        self.seats = Seats(np.array(capacity, np.int32), extents, 4)
        self.state = SlotState.empty(4 * sum(counts), len(capacity))

    def batch(self, *requests: tuple[int, int, Sequence[Sequence[int]]], pages: int = 64) -> SelectionBatch:
        """Return a batch of requests ``(seat, start, selected of each query)``; page ids are 100, 101, ..."""
        selected = [row for _, _, rows in requests for row in rows]
        width = len(selected[0]) if selected else 3
        ids = 100 + np.arange(len(requests) * pages, dtype=np.int32).reshape(-1, pages)
        return SelectionBatch(
            selected=np.array(selected, np.int32).reshape(len(selected), width),
            query_start=np.cumsum([0, *(len(rows) for _, _, rows in requests)]).astype(np.int32),
            seat=np.array([seat for seat, _, _ in requests], np.int32),
            start=np.array([start for _, start, _ in requests], np.int32),
            pages=ids,
            page_tokens=2,
        )

    def resolve(self, batch: SelectionBatch, eager_rows: int = 0) -> Resolved:
        """Resolve, and verify the state."""
        result = resolve(self.state, self.seats, batch, eager_rows=eager_rows, implementation=self.implementation)
        self.state.check(self.seats)
        return result

    def step(self, start: int, *selected: Sequence[int], eager_rows: int = 0, pages: int = 64) -> Resolved:
        """Resolve a step of the request in seat 0."""
        return self.resolve(self.batch((0, start, selected), pages=pages), eager_rows)

    def held(self, seat: int = 0) -> list[int]:
        """Return the positions in the slots of a seat."""
        return [int(position) for position in self.state.held[self.seats.rows(seat)]]

    def order(self) -> list[int]:
        """Return the positions of seat 0 from the longest unused to the last used."""
        order = self.state.order[self.seats.rows(0)]
        return [int(position) for position in self.state.held[order]]

    def missed(self, result: Resolved) -> list[int]:
        """Return the positions of seat 0 that are fetched, in order."""
        return [int(row) - 200 for row in result.miss_rows]
