# SPDX-License-Identifier: Apache-2.0
"""Write-back: rows that were computed here go to their pool pages. Forward thread, plus the copy stream.

Takes each layer's new rows as they are computed and keeps them in a staging buffer; at the end of the step one batched
scatter of all layers goes to the copy stream, while the engine samples and schedules. :meth:`WriteBack.settle` comes
before anything that may read those pages or give them away: another fetch, a peer's write, a reader of the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tidal_connector import ops
from tidal_connector.log import get_logger
from tidal_connector.metrics import Counters

Rows = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]

_log = get_logger(__name__)

SETTLE_S = 60.0
"""Longest wait for a scatter; one that takes longer means that the copy stream is dead."""


class WriteBack:
    """The rows of one step on their way to the pool.

    Args:
        pools: per layer ``[rows, row_bytes]`` uint8.
        capacity: rows of a step at most.
        stream: copies rows.
        counters: what is counted into.
    """

    def __init__(self, pools: Sequence[Rows], capacity: int, stream: ops.CopyStream, counters: Counters) -> None:
        self._stream = stream
        self._counters = counters
        self._row_bytes = int(pools[0].shape[1])
        self.staging: Rows = np.empty((len(pools), capacity, self._row_bytes), np.uint8)
        self._moves = stream.prepare([ops.Move(staged, pool) for staged, pool in zip(self.staging, pools, strict=True)])
        self._index = np.arange(capacity, dtype=np.int64)
        self._rows: Int64 | None = None
        self._first = 0
        self._end = 0
        self._last_ticket = 0

    def begin(self, pool_rows: Int64) -> None:
        """Say where the rows of a forward pass belong; layer l's go to ``staging[l]`` in this order.

        Rows of an earlier pass of the step (the drafter's target) are sent off first.

        Args:
            pool_rows: ``[n]`` int64 rows of the pool, -1 for none.
        """
        self.submit()
        self.settle()
        self._rows = pool_rows.copy()
        self._first = self._end = 0

    def staged(self, layer: int) -> None:
        """Note that a layer's rows are in the staging buffer; layers come in order."""
        if self._end == self._first:
            self._first = layer
        self._end = layer + 1

    def submit(self) -> None:
        """Send the staged rows of all layers off; nothing where there are none."""
        rows, self._rows = self._rows, None
        layers = self._end - self._first
        if rows is None or layers == 0:
            return
        count = len(rows)
        ticket = self._stream.submit(
            self._moves,
            self._index[:count],
            rows,
            first=self._first,
            count=layers,
            wake=layers * count * self._row_bytes >= ops.WORTH_WAKING_BYTES,
        )
        self._last_ticket = ticket + layers - 1
        self._counters.add("bytes_written_back", layers * count * self._row_bytes)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("[SCATTER] layers %d..%d: %d rows per layer", self._first, self._end - 1, count)

    def settle(self) -> None:
        """Return once everything that was submitted is in the pool.

        Raises:
            TransferFailed: it is not within :data:`SETTLE_S`.
        """
        ticket, self._last_ticket = self._last_ticket, 0
        # Of all layers: waiting for the last alone would let it overtake the others.
        self._stream.settle(ticket, SETTLE_S)
