# SPDX-License-Identifier: Apache-2.0
"""Room 5, choose: top-k positions, page tables and residency become a :class:`GatherPlan`. Forward thread.

Takes what the indexer selected; hands on which pool rows must be fetched, and where each selected row will be found.
Moves nothing: it only reserves slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidal_connector.errors import LayoutMismatch
from tidal_connector.selection.residency import StepBuffer

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Which rows to move for one step, and the slot table that attention reads.

    Attributes:
        misses: ``[m]`` int64, pool rows to fetch, in the order in which they first occur, which is that of their slots.
        first_slot: slot of the first miss; the others follow.
        slots: ``[n, k]`` int32, buffer slot of each selected entry, -1 where nothing is selected.
        hits: selected entries that are resident already.
    """

    misses: Int64
    first_slot: int
    slots: Int32
    hits: int


def pool_rows(selected: Int32, page_table: npt.NDArray[np.integer], request_of_query: Int64, page_tokens: int) -> Int64:
    """Translate positions within requests into rows of a paged pool.

    Args:
        selected: ``[n, k]`` int32 positions within the request, -1 for none.
        page_table: ``[requests, pages]`` page ids in order of position, contiguous.
        request_of_query: ``[n]`` int64, row of ``page_table`` for each query.
        page_tokens: rows of a page.

    Returns:
        ``[n, k]`` int64 rows (page x rows of a page + offset), -1 for none.

    Raises:
        LayoutMismatch: a position lies beyond its request's pages.
    """
    width = page_table.shape[1]
    page = selected // page_tokens
    if page.size and int(page.max()) >= width:
        raise LayoutMismatch(f"selected position {int(selected.max())} lies beyond {width} pages of {page_tokens} rows")
    offset = selected - page * page_tokens
    # A page of -1 (nothing selected) reads some entry of the table and is masked right after.
    pages = page_table.reshape(-1).take(page + request_of_query[:, None] * width, mode="wrap")
    rows: Int64 = np.multiply(pages, page_tokens, dtype=np.int64)
    rows += offset
    rows[selected < 0] = -1
    return rows


def choose(rows: Int64, buffer: StepBuffer) -> GatherPlan:
    """Plan the fetch of the selected rows into a buffer; a row that several queries select is fetched once.

    Slots follow the order in which rows first occur, so that the rows of a query which shares none lie side by side.

    Args:
        rows: ``[n, k]`` int64 pool rows, -1 for none.
        buffer: what is resident. A :class:`StepBuffer` keeps nothing between steps, so every distinct row is a miss.

    Raises:
        PoolExhausted: the buffer has fewer slots than distinct rows are selected.
    """
    valid = rows >= 0
    flat = rows[valid]
    order = np.arange(len(flat), dtype=np.int32)
    # Each row is marked with the place where it first occurs: of equal rows the last one written wins.
    marks = buffer.marks(int(flat.max(initial=-1)) + 1)
    marks[flat[::-1]] = order[::-1]
    leader = marks[flat]
    fresh = leader == order
    misses = flat[fresh]
    first = buffer.reserve(len(misses))
    rank = np.cumsum(fresh, dtype=np.int32)
    rank += first - 1
    slots = np.full(rows.shape, -1, dtype=np.int32)
    slots[valid] = rank[leader]
    return GatherPlan(misses, first, slots, hits=0)
