# SPDX-License-Identifier: Apache-2.0
"""The one place through which attention reads latent rows, wherever they live."""

from __future__ import annotations

import torch


def gather_rows(cache_rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Copy rows out of a latent cache.

    Args:
        cache_rows: ``[rows, width]``, the cache of one layer, contiguous.
        slots: any shape ``[...]``, int64, each within ``[0, rows)``.

    Returns:
        ``[..., width]`` of the cache's dtype.
    """
    return cache_rows.index_select(0, slots.reshape(-1)).view(*slots.shape, cache_rows.shape[1])
