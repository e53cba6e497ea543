# SPDX-License-Identifier: Apache-2.0
"""What one step looks like to attention and to the indexer: requests, positions, slots.

Built once per step and KV cache group, on the forward thread, and read by every layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from tidal_connector.selection.plan import Int64, pool_rows
from tidal_connector.vllm_plugin.cpu.gather import RowBuffer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

PIECE_ENTRIES = 1 << 20
"""Selected entries that are planned at once; each takes about 50 bytes while it is."""


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
        buffer: where attention finds the rows that it reads; the same in every step.
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
    buffer: RowBuffer
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

    def wanted(self, selected: torch.Tensor, tokens: slice) -> Int64:
        """Translate positions within requests to cache rows.

        Args:
            selected: ``[n, k]`` int32 positions of these query tokens, -1 for none.
            tokens: which query tokens.

        Returns:
            ``[n, k]`` int64 rows, -1 for none.

        Raises:
            LayoutMismatch: a position lies beyond its request's blocks.
        """
        requests = self.request_of_token[tokens].numpy()
        return pool_rows(selected.numpy(), self.block_table.numpy(), requests, self.block_size)

    def pieces(
        self, k: int, capacity: int, spans: Sequence[RequestSpan]
    ) -> Iterator[tuple[slice, list[tuple[int, int]]]]:
        """Cut the step, or a part of it, so that what the queries of a piece select fits into a buffer.

        Args:
            k: entries that a query selects at most.
            capacity: rows that the buffer holds, at least ``k``.
            spans: adjoining requests, in order.

        Yields:
            Query tokens of a piece, and within it those of each request as ``(start, stop)`` from 0 on.
        """
        start, used = spans[0].start if spans else 0, 0
        inside: list[tuple[int, int]] = []
        for span in spans:
            at = span.start
            while at < span.stop:
                room = span.stop - at if span.length <= capacity - used else (capacity - used) // k
                count = min(span.stop - at, room, PIECE_ENTRIES // k - (at - start))
                if count < 1 and at > start:
                    yield slice(start, at), inside
                    start, used, inside = at, 0, []
                    continue
                count = max(1, count)
                inside.append((at - start, at - start + count))
                used += min(count * k, span.length)
                at += count
        if inside:
            yield slice(start, spans[-1].stop), inside


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
        self._buffer = RowBuffer()

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
            buffer=self._buffer,
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
