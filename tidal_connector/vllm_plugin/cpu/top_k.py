# SPDX-License-Identifier: Apache-2.0
"""Which positions a query attends to: the k best index scores, ties to the lowest position.

Pure tensor functions without vLLM. The relu of index scores makes many exact zeros, and ``torch.topk`` breaks
ties by the length of the row, so that the selection would depend on the chunk size. Keys that hold score and
position are all distinct, and their order is the rule itself.
"""

from __future__ import annotations

import torch

_LOWEST = torch.iinfo(torch.int64).min
_NONE = torch.iinfo(torch.int32).max
_LOW_BITS = 0xFFFFFFFF


def everything(query_positions: torch.Tensor, k: int) -> torch.Tensor:
    """Select all positions up to each query's own, for queries with fewer than ``k + 1`` of them.

    Args:
        query_positions: ``[n]`` int64, each below ``k``.
        k: width of the result.

    Returns:
        ``[n, k]`` int32, ascending positions, then -1.
    """
    columns = torch.arange(k, dtype=torch.int32)
    return torch.where(columns <= query_positions.unsqueeze(1), columns, -1)


def select(scores: torch.Tensor, query_positions: torch.Tensor, k: int) -> torch.Tensor:
    """Select for each query the k best positions that are not after its own.

    Args:
        scores: ``[n, length]`` float32, any finite values; column j is position j.
        query_positions: ``[n]`` int64, each below ``length``.
        k: width of the result.

    Returns:
        ``[n, k]`` int32, ascending positions, then -1 where fewer than k exist.
    """
    length = scores.shape[1]
    columns = torch.arange(length)
    # Signed bits of a float sort like the float once negative ones are mirrored; adding 0.0 makes -0.0 equal
    # 0.0.
    bits = (scores + 0.0).view(torch.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = bits.to(torch.int64)
    keys <<= 32
    keys |= length - 1 - columns
    keys.masked_fill_(columns > query_positions.unsqueeze(1), _LOWEST)
    best = keys.topk(min(k, length), dim=-1, sorted=False).values
    positions = (length - 1 - (best & _LOW_BITS)).to(torch.int32)
    positions.masked_fill_(best == _LOWEST, _NONE)
    positions = positions.sort(dim=-1).values
    positions.masked_fill_(positions == _NONE, -1)
    if positions.shape[1] < k:
        return torch.nn.functional.pad(positions, (0, k - positions.shape[1]), value=-1)
    return positions
