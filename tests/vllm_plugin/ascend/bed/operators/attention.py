# SPDX-License-Identifier: Apache-2.0
"""The operators of sparse attention in plain torch: which tokens matter, and attention over those alone.

Both read paged caches through a block table. What a kernel leaves undefined (rows of padding) is NaN here, so that
whoever relies on it is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tests.vllm_plugin.ascend.bed.operators.paged import FOREVER, INT32, Span, need_defaults, spans
from tests.vllm_plugin.ascend.bed.operators.rules import HALVES, need, need_tensor

_SFA = "npu_sparse_flash_attention"
_LI = "npu_lightning_indexer"
_LIQ = "npu_lightning_indexer_quant"
_CHUNK = 512  # queries at a time: 512 x 4500 scores per head fit into a cache


def sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    block_table: torch.Tensor | None = None,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = FOREVER,
    next_tokens: int = FOREVER,
    attention_mode: int = 2,
    return_softmax_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend from ``query`` [T, N, 512] (+ rope 64) to the rows that ``sparse_indices`` [T, 1, K] name.

    An index is a position in the request's keys, found through its block table. In mode 3 what lies past the causal
    limit is not attended to; entries stop at the first negative one.
    """
    need_defaults(_SFA, layout_query, layout_kv, pre_tokens, next_tokens)
    need(attention_mode == 2, _SFA, "attention_mode has to be 2 (absorbed MLA)", attention_mode)
    need(sparse_mode in (0, 3), _SFA, "sparse_mode has to be 0 or 3", sparse_mode)
    need(sparse_block_size == 1, _SFA, "the bed knows sparse_block_size 1 only", sparse_block_size)
    need(not return_softmax_lse, _SFA, "return_softmax_lse is not supported with paged keys")
    need_tensor(_SFA, "query", query, (None, None, 512), HALVES)
    tokens, heads = query.shape[:2]
    need(heads <= 64 or heads == 128, _SFA, "the number of heads has to be 1 to 64, or 128", heads)
    same = (query.dtype,)
    need_tensor(_SFA, "key", key, (None, None, 1, 512), same, contiguous=True)
    need_tensor(_SFA, "value", value, tuple(key.shape), same, contiguous=True)
    need(value.data_ptr() == key.data_ptr(), _SFA, "value has to be the same memory as key in absorbed MLA")
    rope = need_tensor(_SFA, "query_rope", query_rope, (tokens, heads, 64), same)
    rope_cache = need_tensor(_SFA, "key_rope", key_rope, (*key.shape[:3], 64), same, contiguous=True)
    need_tensor(_SFA, "sparse_indices", sparse_indices, (tokens, 1, None), INT32)

    output = torch.full(query.shape, float("nan"), dtype=query.dtype)
    whole = torch.cat([query, rope], dim=-1).float()
    for span in spans(_SFA, tokens, key, block_table, actual_seq_lengths_query, actual_seq_lengths_kv):
        keys = torch.cat([span.rows(key), span.rows(rope_cache)], dim=-1)
        limits = span.limits(sparse_mode)
        for first in range(span.first, span.last, _CHUNK):
            last = min(first + _CHUNK, span.last)
            inside = slice(first - span.first, last - span.first)
            chosen = _chosen(sparse_indices[first:last, 0], span, limits[inside], sparse_mode)
            width = int(limits[inside].max())
            attended = _attend(whole[first:last], keys[:width], chosen[:, :width], scale_value)
            output[first:last] = attended.to(query.dtype)
    nothing = torch.empty(0)
    return output, nothing, nothing


def _attend(query: torch.Tensor, keys: torch.Tensor, chosen: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of [T, N, 576] over [S, 576] where ``chosen`` [T, S]; a query without any key gets zeros."""
    if not len(keys):
        return torch.zeros(*query.shape[:2], 512)
    scores = (query.reshape(-1, query.shape[-1]) @ keys.T).mul_(scale).view(*query.shape[:2], -1)
    scores.masked_fill_(~chosen[:, None, :], float("-inf"))
    weights = scores.softmax(dim=-1).nan_to_num_(nan=0.0)
    return (weights.view(-1, weights.shape[-1]) @ keys[:, :512]).view(*query.shape[:2], 512)


def _chosen(indices: torch.Tensor, span: Span, limits: torch.Tensor, sparse_mode: int) -> torch.Tensor:
    """Turn rows of indices into a mask [T, keys], after checking them."""
    valid = indices >= 0
    need(bool((valid[:, 1:] <= valid[:, :-1]).all()), _SFA, "valid entries of sparse_indices have to come first")
    past = bool((indices >= span.keys).any())
    need(not past, _SFA, f"sparse_indices have to lie below the length of the keys, {span.keys}", int(indices.max()))
    # One column more takes the entries that say nothing.
    columns = torch.where(valid, indices, span.keys).long()
    counts = torch.zeros(indices.shape[0], span.keys + 1, dtype=torch.int16)
    counts.scatter_add_(1, columns, torch.ones_like(columns, dtype=torch.int16))
    counts = counts[:, : span.keys]
    need(bool((counts <= 1).all()), _SFA, "an entry of sparse_indices must not occur twice in its row")
    if sparse_mode == 3:
        return (counts > 0) & (torch.arange(span.keys) < limits[:, None])
    return counts > 0


def lightning_indexer(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_key: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = FOREVER,
    next_tokens: int = FOREVER,
    return_value: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``sparse_count`` best positions of each query as [T, 1, K] int32, best first, then -1.

    The score of a key is the sum over heads of ``weight * relu(query . key)``; of equal scores the earlier position
    comes first.
    """
    need_defaults(_LI, layout_query, layout_key, pre_tokens, next_tokens)
    need(sparse_mode in (0, 3), _LI, "sparse_mode has to be 0 or 3", sparse_mode)
    possible = 1 <= sparse_count <= 2048 or sparse_count in range(3072, 8193, 1024)
    need(possible, _LI, "sparse_count has to be 1 to 2048, or a multiple of 1024 from 3072 to 8192", sparse_count)
    need(not return_value, _LI, "return_value is not supported with paged keys")
    need_tensor(_LI, "query", query, (None, None, 128), HALVES)
    tokens, heads = query.shape[:2]
    need(heads <= 64, _LI, "the number of heads has to be 1 to 64", heads)
    need_tensor(_LI, "key", key, (None, None, 1, 128), (query.dtype,), contiguous=True)
    need_tensor(_LI, "weights", weights, (tokens, heads), (query.dtype, torch.float32))

    def scores(rows: slice, span: Span) -> torch.Tensor:
        return _index_scores(query[rows], weights[rows], span.rows(key))

    found = spans(_LI, tokens, key, block_table, actual_seq_lengths_query, actual_seq_lengths_key)
    return _best(scores, found, tokens, sparse_count, sparse_mode), torch.empty(0, dtype=query.dtype)


def lightning_indexer_quant(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    query_dequant_scale: torch.Tensor,
    key_dequant_scale: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_key: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
) -> torch.Tensor:
    """Do the same with int8 queries and keys; scales are float16, [T, N] and [blocks, block size, 1]."""
    need_defaults(_LIQ, layout_query, layout_key, FOREVER, FOREVER)
    need(sparse_mode in (0, 3), _LIQ, "sparse_mode has to be 0 or 3", sparse_mode)
    need(query_quant_mode == key_quant_mode == 0, _LIQ, "the quantisation modes have to be 0")
    need(1 <= sparse_count <= 2048, _LIQ, "sparse_count has to be 1 to 2048", sparse_count)
    need_tensor(_LIQ, "query", query, (None, None, 128), (torch.int8,))
    tokens, heads = query.shape[:2]
    need(heads <= 64, _LIQ, "the number of heads has to be 1 to 64", heads)
    need_tensor(_LIQ, "key", key, (None, None, 1, 128), (torch.int8,), contiguous=True)
    half = (torch.float16,)
    need_tensor(_LIQ, "weights", weights, (tokens, heads), half)
    need_tensor(_LIQ, "query_dequant_scale", query_dequant_scale, (tokens, heads), half)
    scales = need_tensor(_LIQ, "key_dequant_scale", key_dequant_scale, tuple(key.shape[:3]), half, contiguous=True)

    def scores(rows: slice, span: Span) -> torch.Tensor:
        plain = _index_scores(query[rows], weights[rows].float() * query_dequant_scale[rows].float(), span.rows(key))
        return plain * span.rows(scales[..., None])[:, 0]

    found = spans(_LIQ, tokens, key, block_table, actual_seq_lengths_query, actual_seq_lengths_key)
    return _best(scores, found, tokens, sparse_count, sparse_mode)


def _best(
    scores_of: Callable[[slice, Span], torch.Tensor], found: Iterator[Span], tokens: int, count: int, sparse_mode: int
) -> torch.Tensor:
    """Name the ``count`` positions with the highest scores of each query, within what it may see."""
    indices = torch.full((tokens, 1, count), -1, dtype=torch.int32)
    for span in found:
        limits = span.limits(sparse_mode)
        width = min(count, span.keys)
        for first in range(span.first, span.last, _CHUNK):
            rows = slice(first, min(first + _CHUNK, span.last))
            ends = limits[rows.start - span.first : rows.stop - span.first, None]
            scores = scores_of(rows, span).masked_fill_(torch.arange(span.keys) >= ends, float("-inf"))
            order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :width]
            indices[rows, 0, :width] = order.masked_fill(torch.arange(width) >= ends, -1).int()
    return indices


def _index_scores(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(query.shape[0], keys.shape[0])
    for head in range(query.shape[1]):
        total += (query[:, head].float() @ keys.T).relu_() * weights[:, head, None].float()
    return total
