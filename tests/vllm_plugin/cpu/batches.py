# SPDX-License-Identifier: Apache-2.0
"""Batches for the CPU backend's tests: requests on scrambled blocks, built by the real metadata builder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

BLOCKS = 64


def batch(
    requests: list[tuple[int, int]],
    block_size: int,
    padding: int = 0,
    owners: list[int] | None = None,
    longest: int = 0,
) -> Any:
    """Build one step's metadata.

    Args:
        requests: query tokens and context length (queries included) of each request.
        block_size: tokens per block.
        padding: tokens beyond the last request, with slot -1.
        owners: numbers of the requests, which have the same blocks in each batch that names the same ``longest``.
        longest: room for so many tokens; 0 for the longest of the requests.
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from tidal_connector.vllm_plugin.cpu.metadata import TidalMLAMetadataBuilder

    owners = list(range(len(requests))) if owners is None else owners
    per_request = -(-longest // block_size) or max(-(-length // block_size) for _, length in requests)
    blocks = torch.randperm(BLOCKS * 16, generator=torch.Generator().manual_seed(3))
    table = blocks[: (max(owners) + 1) * per_request].view(-1, per_request)[owners].int()
    starts = torch.tensor([0, *torch.tensor([q for q, _ in requests]).cumsum(0).tolist()], dtype=torch.int32)
    slots = [
        int(table[row, position // block_size]) * block_size + position % block_size
        for row, (queries, length) in enumerate(requests)
        for position in range(length - queries, length)
    ] + [-1] * padding
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([length for _, length in requests], dtype=torch.int32),
        num_reqs=len(requests),
        num_actual_tokens=len(slots),
        max_query_len=max(q for q, _ in requests),
        max_seq_len=max(length for _, length in requests),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots),
    )
    builder = TidalMLAMetadataBuilder(
        SimpleNamespace(block_size=block_size),  # type: ignore[arg-type]
        [],
        None,  # type: ignore[arg-type]
        torch.device("cpu"),
    )
    return builder.build_for_drafting(common, 0)


def empty_cache(block_size: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a cache for the blocks of :func:`batch`, filled with values that would be noticed."""
    cache = torch.empty(BLOCKS * 16, block_size, width, dtype=dtype)
    return cache.fill_(77)
