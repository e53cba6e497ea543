# SPDX-License-Identifier: Apache-2.0
"""Values around ``DeviceSelection``: how large a step may be, what a layer's latents are, what attention runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tidal_connector.ops.npu.state import POSITIONS

PAGE_SLOTS = 128
"""Slots of a page of the arena: attention reads it as a paged cache of vllm-ascend's block size."""


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """The largest step, and what seats hold.

    Attributes:
        seats: requests that run at once at most (``max_num_seqs``); each has a seat.
        slots: rows of a seat in each layer, a multiple of :data:`PAGE_SLOTS`.
        top_k: positions that a query selects.
        queries: tokens that a request computes per decode step at most (1, or 1 + draft tokens).
        tokens: rows of a padded decode batch at most.
        context: tokens of a request at most (``max_model_len``).
        page_tokens: tokens of a block.

    Raises:
        ValueError: seats are too small for a step, do not consist of whole pages, or positions are too large.
    """

    seats: int
    slots: int
    top_k: int
    queries: int
    tokens: int
    context: int
    page_tokens: int

    def __post_init__(self) -> None:
        needed = self.queries * (self.top_k + 1)
        if self.slots % PAGE_SLOTS or self.slots < needed:
            raise ValueError(
                f"slots = {self.slots}: expected a multiple of {PAGE_SLOTS} of at least {needed}, what {self.queries} "
                f"queries select and write at once; raise selection.slots to {-(-needed // PAGE_SLOTS) * PAGE_SLOTS}"
            )
        if self.context >= POSITIONS:
            raise ValueError(f"context = {self.context}: expected less than {POSITIONS} tokens; lower max_model_len")

    def arena_bytes(self, layers: int, row_bytes: int) -> int:
        """Return the device memory of all slots."""
        return layers * self.seats * self.slots * row_bytes


class LatentPool(NamedTuple):
    """The latents of one layer, as kernels reach them: ``[blocks, block size, 1, dim]``, or without the 1."""

    nope: torch.Tensor
    rope: torch.Tensor


class ArenaView(NamedTuple):
    """What attention runs on in place of a layer's cache.

    Attributes:
        nope: ``[seats * slots / 128, 128, 1, dim]``, the arena as a paged cache.
        rope: likewise.
        block_table: int32 ``[b, slots / 128]``, the pages of each request's seat; those of seat 0 for padding.
        slots: int32 ``[t, 1, k]``, slot within the seat of each selected entry, in their order; -1: none.
        lengths: int32 ``[b]``, slots of each seat: what bounds the entries of ``slots``.
    """

    nope: torch.Tensor
    rope: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
