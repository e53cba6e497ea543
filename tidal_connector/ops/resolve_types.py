# SPDX-License-Identifier: Apache-2.0
"""What goes into ``ops.resolve`` and what comes out: values of one step, and the memory that steps share.

Numpy views of plain memory; who makes one owns it. Any thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tidal_connector.ops.slots import Int32


class Counts(NamedTuple):
    """Totals of a batch, as ``Resolved`` explains them; ``fetched`` is ``misses + loads``."""

    fetched: int
    hits: int
    misses: int
    loads: int
    evictions: int
    invalid: int


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


class Resolved(NamedTuple):
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

    def reserve(self, batch: SelectionBatch) -> None:
        """Make room for the slot table of a batch; what was there is lost."""
        queries, width = batch.selected.shape
        requests = batch.seat.shape[0]
        if self.slots.size < queries * width or self.written.size < queries or self.miss_start.size <= requests:
            self.slots = np.empty(max(self.slots.size, queries * width), np.int32)
            self.written = np.empty(max(self.written.size, queries), np.int32)
            self.miss_start = np.empty(max(self.miss_start.size, requests + 1), np.int32)
            self.view = None

    def reserve_misses(self, count: int) -> None:
        """Make room for ``count`` misses; what was there is lost."""
        if self.miss_rows.size < count:
            self.miss_rows, self.miss_slots = np.empty(count, np.int64), np.empty(count, np.int64)
            self.view = None

    def resolved(self, batch: SelectionBatch, counts: Counts) -> Resolved:
        """Return what was written here for a batch."""
        queries, width = batch.selected.shape
        fetched, hits, misses, loads, evictions, invalid = counts
        return Resolved(
            self.slots[: queries * width].reshape(queries, width),
            self.written[:queries],
            self.miss_rows[:fetched],
            self.miss_slots[:fetched],
            self.miss_start[: batch.seat.shape[0] + 1],
            hits,
            misses,
            loads,
            evictions,
            invalid,
        )
