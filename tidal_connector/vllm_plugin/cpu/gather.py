# SPDX-License-Identifier: Apache-2.0
"""The one place through which attention and the indexer read cached rows, wherever they live."""

from __future__ import annotations

import torch

from tidal_connector import ops


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
