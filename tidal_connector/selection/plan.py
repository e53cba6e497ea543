# SPDX-License-Identifier: Apache-2.0
"""Room 5, choose: top-k positions, page tables and residency become a :class:`GatherPlan`. Pure; forward thread.

Takes what the indexer selected; hands on which pool rows must be fetched, and where each selected row will be found.
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
        misses: ``[m]`` int64, pool rows to fetch, in order of their slots.
        first_slot: slot of the first miss; the others follow.
        slots: ``[n, k]`` int32, buffer slot of each selected entry, -1 where nothing is selected.
        hits: selected entries that are resident already.
    """

    misses: Int64
    first_slot: int
    slots: Int32
    hits: int


def pool_rows(selected: Int32, page_table: Int64, request_of_query: Int64, page_tokens: int) -> Int64:
    """Translate positions within requests into rows of a paged pool.

    Args:
        selected: ``[n, k]`` int32 positions within the request, -1 for none.
        page_table: ``[requests, pages]`` page ids in order of position.
        request_of_query: ``[n]`` row of ``page_table`` for each query.
        page_tokens: rows of a page.

    Returns:
        ``[n, k]`` int64 rows (page x rows of a page + offset), -1 for none.

    Raises:
        LayoutMismatch: a position lies beyond its request's pages.
    """
    page, offset = np.divmod(selected.astype(np.int64), page_tokens)
    if page.size and int(page.max()) >= page_table.shape[1]:
        raise LayoutMismatch(
            f"selected position {int(selected.max())} lies beyond {page_table.shape[1]} pages of {page_tokens} rows"
        )
    # A page of -1 (nothing selected) reads the last entry of the table and is masked right after.
    rows = page_table[request_of_query[:, None], page] * page_tokens + offset
    return np.where(selected >= 0, rows, -1)


def choose(rows: Int64, buffer: StepBuffer) -> GatherPlan:
    """Plan the fetch of the selected rows into a buffer; a row that several queries select is fetched once.

    Args:
        rows: ``[n, k]`` int64 pool rows, -1 for none.
        buffer: what is resident. A :class:`StepBuffer` keeps nothing between steps, so every distinct row is a miss.

    Raises:
        PoolExhausted: the buffer has fewer slots than distinct rows are selected.
    """
    valid = rows >= 0
    misses, where = np.unique(rows[valid], return_inverse=True)
    first = buffer.reserve(len(misses))
    slots = np.full(rows.shape, -1, dtype=np.int32)
    slots[valid] = where + first
    return GatherPlan(misses, first, slots, hits=0)
