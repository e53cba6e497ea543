# SPDX-License-Identifier: Apache-2.0
"""What one step looks like to attention and to the indexer: requests, positions, slots.

Built once per step and KV cache group, on the forward thread, and read by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """One request of the step.

    Attributes:
        row: its row of the block table.
        start: its first query token in the batch.
        stop: one past its last query token.
        length: tokens of its context, the queries of this step included.
    """

    row: int
    start: int
    stop: int
    length: int


@dataclass(slots=True)
class TidalMLAMetadata(AttentionMetadata):
    """One step's batch.

    vLLM's MLA layer reads the counts and ``prefill`` and ``decode``: it is told that every token is a decode
    token, which sends all of them through ``forward_mqa``.

    Attributes:
        num_actual_tokens: query tokens of the step, padding excluded.
        num_decodes: requests of the step.
        num_decode_tokens: the same as ``num_actual_tokens``.
        spans: requests that have query tokens.
        request_of_token: ``[num_actual_tokens]`` int64, row of the block table.
        positions: ``[num_actual_tokens]`` int64, position of each query token in its request.
        block_table: ``[requests, blocks]`` int32 block ids.
        slot_mapping: ``[num_actual_tokens]`` int64, row to write for each token, -1 for none.
        query_start_loc: ``[requests + 1]`` int32.
        seq_lens: ``[requests]`` int32.
        block_size: tokens per block.
        max_query_len: tokens of the longest query.
        max_seq_len: tokens of the longest context.
    """

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    spans: tuple[RequestSpan, ...]
    request_of_token: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_size: int
    max_query_len: int
    max_seq_len: int
    num_prefills: int = 0
    prefill: None = None

    @property
    def decode(self) -> TidalMLAMetadata:
        """The decode part of the batch, which is all of it."""
        return self

    def context_slots(self, span: RequestSpan) -> torch.Tensor:
        """Return the cache rows of a request's context in order of position: ``[length]`` int64."""
        size = self.block_size
        blocks = self.block_table[span.row, : -(-span.length // size)].long()
        return (blocks.unsqueeze(1) * size + torch.arange(size)).view(-1)[: span.length]

    def slots_of(self, selected: torch.Tensor) -> torch.Tensor:
        """Translate positions within requests to cache rows.

        Args:
            selected: ``[num_actual_tokens, k]`` int32 positions, -1 for none.

        Returns:
            ``[num_actual_tokens, k]`` int64 rows, -1 for none.
        """
        safe = selected.clamp(min=0).long()
        blocks = self.block_table[self.request_of_token.unsqueeze(1), safe // self.block_size]
        return torch.where(selected >= 0, blocks * self.block_size + safe % self.block_size, -1)


class TidalMLAMetadataBuilder(AttentionMetadataBuilder[TidalMLAMetadata]):
    """Builds the metadata; the same for latents and index keys, which share one block table."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TidalMLAMetadata:
        """Build one step's metadata. The parameter names are part of vLLM's contract: the MTP drafter calls
        by keyword."""
        del common_prefix_len, fast_build
        common = common_attn_metadata
        starts = common.query_start_loc_cpu[: common.num_reqs + 1]
        lengths = common.seq_lens[: common.num_reqs]
        bounds, totals = starts.tolist(), lengths.tolist()
        tokens = common.num_actual_tokens
        spans = tuple(
            RequestSpan(row, bounds[row], min(bounds[row + 1], tokens), totals[row])
            for row in range(common.num_reqs)
            if bounds[row] < min(bounds[row + 1], tokens)
        )
        return TidalMLAMetadata(
            num_actual_tokens=tokens,
            num_decodes=common.num_reqs,
            num_decode_tokens=tokens,
            spans=spans,
            request_of_token=_per_token(spans, tokens, [span.row for span in spans]),
            positions=_positions(spans, tokens),
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping[:tokens],
            query_start_loc=starts,
            seq_lens=lengths,
            block_size=self.kv_cache_spec.block_size,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
        )


def _per_token(spans: tuple[RequestSpan, ...], tokens: int, values: list[int]) -> torch.Tensor:
    """Spread one value per request over its tokens: ``[tokens]`` int64; 0 beyond the last request."""
    spread = torch.tensor(values, dtype=torch.int64).repeat_interleave(
        torch.tensor([span.stop - span.start for span in spans], dtype=torch.int64)
    )
    return torch.nn.functional.pad(spread, (0, tokens - spread.shape[0]))


def _positions(spans: tuple[RequestSpan, ...], tokens: int) -> torch.Tensor:
    """Return each token's position in its request: the last query of a request is the last token of its
    context."""
    offsets = _per_token(spans, tokens, [span.length - span.stop for span in spans])
    return torch.arange(tokens) + offsets
