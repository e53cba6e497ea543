# SPDX-License-Identifier: Apache-2.0
"""``resolve``: which selected rows are on the device, which are fetched, and which rows make room for them.

Takes a batch of selections, the seats of its requests, and the state of one index group, which it changes. Hands on the
slot table on which attention runs and the list of rows to copy (``gather_rows`` and its kin); it touches no rows. One
call serves the whole batch. The thread that owns the state; the native implementation releases the interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tidal_connector.errors import NativeOpMissing
from tidal_connector.ops import resolve_reference
from tidal_connector.ops.gather import Implementation
from tidal_connector.ops.slots import Int32, Seats, SlotState


@dataclass(slots=True, eq=False)
class SelectionBatch:
    """What the indexer selected in one step, for ``n`` queries of ``r`` requests.

    Attributes:
        selected: int32 ``[n, k]``, positions in any order; duplicates count once; -1: none. Rows may have gaps.
        query_start: int32 ``[r + 1]``; the queries of request ``i`` are ``query_start[i]`` to ``query_start[i + 1]``.
        seat: int32 ``[r]``, each seat at most once.
        start: int32 ``[r]``, position of the request's first query; its others follow.
        pages: int32 ``[r, w]``, page ids of each request in the order of its positions. Rows may have gaps. The ids are
            handed on unread: whoever copies ``miss_rows`` checks them against the pool.
        page_tokens: positions of a page.
    """

    selected: Int32
    query_start: Int32
    seat: Int32
    start: Int32
    pages: Int32
    page_tokens: int


@dataclass(slots=True, frozen=True, eq=False)
class Resolved:
    """The plan of one step. With ``buffers`` the arrays are views of them, valid until these are used again.

    Attributes:
        slots: int32 ``[n, k]``, arena row of each selected entry; -1 where it is none or invalid.
        written: int32 ``[n]``, arena row into which the caller writes the query's own row in this step.
        miss_rows: int64 ``[m]``, pool rows to fetch: page id * page_tokens + position % page_tokens.
        miss_slots: int64 ``[m]``, arena rows that they go to; none twice, none in ``written``.
        miss_start: int32 ``[r + 1]``; request ``i`` fetches ``miss_start[i]`` to ``miss_start[i + 1]``.
        hits: distinct selected rows that were there, or are written in this step.
        misses: distinct selected rows that were not.
        loads: rows fetched ahead of any selection; ``misses + loads == m``.
        evictions: fetched or written rows that took the place of one that was held.
        invalid: entries masked because their position is beyond their query, or beyond the pages.
    """

    slots: Int32
    written: Int32
    miss_rows: npt.NDArray[np.int64]
    miss_slots: npt.NDArray[np.int64]
    miss_start: Int32
    hits: int
    misses: int
    loads: int
    evictions: int
    invalid: int


@dataclass(slots=True, eq=False)
class ResolveBuffers:
    """Memory for the results of ``resolve``, used again by each call; grows to the largest."""

    slots: Int32 = field(default_factory=lambda: np.empty(0, np.int32), init=False)
    written: Int32 = field(default_factory=lambda: np.empty(0, np.int32), init=False)
    miss_rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), init=False)
    miss_slots: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), init=False)
    miss_start: Int32 = field(default_factory=lambda: np.empty(0, np.int32), init=False)
    view: Any = field(default=None, init=False, repr=False)  # what the native operator made of it

    def reserve(self, queries: int, width: int, requests: int) -> tuple[Int32, Int32, Int32]:
        """Return ``slots [queries, width]``, ``written [queries]`` and ``miss_start [requests + 1]``."""
        if self.slots.size < queries * width or self.written.size < queries or self.miss_start.size <= requests:
            self.slots = np.empty(max(self.slots.size, queries * width), np.int32)
            self.written = np.empty(max(self.written.size, queries), np.int32)
            self.miss_start = np.empty(max(self.miss_start.size, requests + 1), np.int32)
            self.view = None
        slots = self.slots[: queries * width].reshape(queries, width)
        return slots, self.written[:queries], self.miss_start[: requests + 1]

    def reserve_misses(self, count: int) -> None:
        """Make room for ``count`` misses; what was there is lost."""
        if self.miss_rows.size < count:
            self.miss_rows, self.miss_slots = np.empty(count, np.int64), np.empty(count, np.int64)
            self.view = None


def resolve(
    state: SlotState,
    seats: Seats,
    batch: SelectionBatch,
    *,
    eager_rows: int = 0,
    threads: int = 1,
    buffers: ResolveBuffers | None = None,
    implementation: Implementation | None = None,
) -> Resolved:
    """Find the selected rows on the device and give the missing ones a place, for a whole batch.

    An entry is valid if its position is at most that of its query and lies in the pages. A request that fits its
    capacity keeps every row that it ever fetched. Beyond that its slots are an exact LRU: rows selected or written in
    this step are never evicted by it; the longest unused make room, first for the new rows, then for the misses in the
    order of their first occurrence. Positions from ``start`` on count as not held: they are written anew, also after a
    rejected speculation. A request may come with no queries, which forgets them.

    Args:
        state: of the index group; changed.
        seats: where the slots are.
        batch: the step.
        eager_rows: a request in place whose ``start`` is at most this fetches all of its context that is not held.
        threads: workers at most; small batches use fewer (native only).
        buffers: memory for the results; None allocates.
        implementation: None takes native where it was built, else the reference.

    Raises:
        TypeError: an argument is no array of the demanded dtype.
        ValueError: shapes, strides, seats, extents or positions do not fit, or the state is broken.
        PoolExhausted: a listed seat has fewer than ``queries * (k + 1)`` slots; nothing was changed.
        NativeOpMissing: native was asked for and is not there.
    """
    if buffers is None:
        buffers = ResolveBuffers()
    if implementation is Implementation.NATIVE:
        raise NativeOpMissing("resolve has no native implementation yet; take the reference")
    resolve_reference.check_batch(state, seats, batch)
    counts = resolve_reference.resolve(state, seats, batch, eager_rows, buffers)
    queries, width = batch.selected.shape
    slots, written, miss_start = buffers.reserve(queries, width, len(batch.seat))
    fetched, *totals = counts
    return Resolved(slots, written, buffers.miss_rows[:fetched], buffers.miss_slots[:fetched], miss_start, *totals)
