# SPDX-License-Identifier: Apache-2.0
"""The one place through which attention and the indexer read cached rows, wherever they live. Forward thread.

Attention reads rows in a :class:`RowBuffer`: the selection rooms choose and fetch them, from the host pool or from the
device alike, and attention gets a slot table.
"""

from __future__ import annotations

import torch

from tidal_connector import ops
from tidal_connector.selection.fetch import fetch
from tidal_connector.selection.plan import Int64, choose
from tidal_connector.selection.residency import StepBuffer

BUFFER_BYTES = 128 << 20
"""Bytes of a row buffer; only what a step needs is ever touched."""


def gather_rows(cache_rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Copy rows out of a cache.

    Args:
        cache_rows: ``[rows, width]``, the cache of one layer; the elements of a row are contiguous.
        slots: any shape ``[...]``, int64, each in ``[-1, rows)``.

    Returns:
        ``[..., width]`` of the cache's dtype; zeros for slot -1.

    Raises:
        IndexError: a slot is outside the cache.
    """
    flat = slots.reshape(-1)
    out = torch.empty((flat.shape[0], cache_rows.shape[1]), dtype=cache_rows.dtype)
    if flat.numel() > 0:  # numpy's strides of an empty array say nothing
        ops.gather_rows(
            cache_rows.view(torch.uint8).numpy(),
            flat.numpy(),
            out.view(torch.uint8).numpy(),
            threads=torch.get_num_threads(),
        )
    return out.view(*slots.shape, cache_rows.shape[1])


class RowBuffer:
    """The rows that one layer attends to in one step. All layers of a cache group share it, one after the other.

    Args:
        size: bytes; allocated when first used, and only what a step needs is touched.
    """

    def __init__(self, size: int = BUFFER_BYTES) -> None:
        self._size = size
        self._slots = torch.empty((0, 1), dtype=torch.uint8)
        self._held = StepBuffer(0)

    def capacity(self, row_bytes: int) -> int:
        """Return how many rows of a size fit."""
        return self._size // row_bytes

    def fill(self, cache_rows: torch.Tensor, wanted: Int64) -> tuple[torch.Tensor, torch.Tensor]:
        """Replace what the buffer holds by the wanted rows of a cache.

        Args:
            cache_rows: ``[rows, width]``, the cache of one layer; the elements of a row are contiguous.
            wanted: ``[n, k]`` rows of the cache, -1 for none.

        Returns:
            The buffer's rows ``[m, width]`` of the cache's dtype, each distinct row once in the order in which they
            first occur, and the slot table ``[n, k]`` int32, -1 for none. Both hold until the next call.

        Raises:
            PoolExhausted: more distinct rows are wanted than fit.
            IndexError: a row is outside the cache.
        """
        source = cache_rows.view(torch.uint8).numpy()
        row_bytes = source.shape[1]
        if self._slots.shape[1] != row_bytes:
            self._slots = torch.empty((self.capacity(row_bytes), row_bytes), dtype=torch.uint8)
            self._held = StepBuffer(self.capacity(row_bytes))
        self._held.release()
        plan = choose(wanted, self._held)
        fetch(source, plan, self._slots.numpy(), self._held, threads=torch.get_num_threads())
        return self._slots[: self._held.resident].view(cache_rows.dtype), torch.from_numpy(plan.slots)
