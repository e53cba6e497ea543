# SPDX-License-Identifier: Apache-2.0
"""What sparse attention and the indexer share: a batch in layout TND over a cache in layout PA_BSND."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tests.vllm_plugin.ascend.bed.operators.rules import need, need_tensor

INT32 = (torch.int32,)
FOREVER = (1 << 63) - 1


@dataclass(frozen=True)
class Span:
    """One request of a batch: its query rows ``first..last`` and the length of its keys."""

    first: int
    last: int
    keys: int
    blocks: torch.Tensor

    def limits(self, sparse_mode: int) -> torch.Tensor:
        """Return for each query the position where its keys end: causal from the right (3), or all of them (0)."""
        queries = self.last - self.first
        if sparse_mode == 0:
            return torch.full((queries,), self.keys)
        return (torch.arange(queries) + self.keys - queries + 1).clamp(min=0)

    def rows(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the request's first ``keys`` rows of a cache [blocks, block size, 1, D] as [keys, D], float32."""
        size = cache.shape[1]
        pages = self.blocks[: -(-self.keys // size)].long()
        return cache[pages].reshape(-1, cache.shape[-1])[: self.keys].float()


def spans(
    operator: str,
    queries: int,
    cache: torch.Tensor,
    block_table: torch.Tensor | None,
    query_ends: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
) -> Iterator[Span]:
    """Check how a batch is described, then yield its requests.

    ``query_ends`` are running sums (layout TND), ``key_lengths`` are not (layout PA_BSND). Rows past the last sum
    are padding and belong to nobody.
    """
    ends = need_tensor(operator, "actual_seq_lengths_query", query_ends, (None,), INT32)
    batch = ends.shape[0]
    lengths = need_tensor(operator, "the lengths of the keys", key_lengths, (batch,), INT32)
    table = need_tensor(operator, "block_table", block_table, (batch, None), INT32)
    size, blocks = cache.shape[1], cache.shape[0]
    need(size % 16 == 0 and size <= 1024, operator, "the block size has to be a multiple of 16, at most 1024", size)
    starts = [0, *ends.tolist()[:-1]]
    for request, (first, last, keys) in enumerate(zip(starts, ends.tolist(), lengths.tolist(), strict=True)):
        where = f"of request {request}"
        need(first <= last <= queries, operator, f"the query end {where} has to lie in [{first}, {queries}]", last)
        need(keys >= 0, operator, f"the length of the keys {where} must not be negative", keys)
        used = -(-keys // size)
        need(used <= table.shape[1], operator, f"block_table is too narrow for {keys} keys {where}", table.shape[1])
        pages = table[request, :used]
        inside = bool(((pages >= 0) & (pages < blocks)).all())
        need(inside, operator, f"block_table {where} has to name blocks in [0, {blocks})", pages.tolist())
        yield Span(first, last, keys, pages)


def need_defaults(operator: str, layout_query: str, layout_kv: str, pre_tokens: int, next_tokens: int) -> None:
    """Refuse layouts and windows that the operators know and this bed does not use."""
    need(layout_query == "TND", operator, "the bed knows layout_query TND only", layout_query)
    need(layout_kv == "PA_BSND", operator, "the bed knows the paged layout PA_BSND only", layout_kv)
    need(pre_tokens == next_tokens == FOREVER, operator, "pre_tokens and next_tokens keep their defaults")
