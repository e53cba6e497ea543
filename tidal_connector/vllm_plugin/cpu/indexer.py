# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer on CPU: keep a key per token, score all of a request's keys, choose the top k.

Replaces pieces of vLLM (see :mod:`.patches`); called on the forward thread, once per layer that has an
indexer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionBackend

from tidal_connector.vllm_plugin.cpu import fp8_rows, top_k
from tidal_connector.vllm_plugin.cpu.gather import gather_rows
from tidal_connector.vllm_plugin.cpu.metadata import RequestSpan, TidalMLAMetadata
from tidal_connector.vllm_plugin.cpu.sparse_mla import TidalMLABackend, write_rows
from tidal_connector.vllm_plugin.patching import HostChanged

if TYPE_CHECKING:
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

_SCORE_BYTES = 16 << 20
_FLOAT = 4


class TidalIndexerBackend(TidalMLABackend):
    """Names the metadata builder for index-key caches; attention never runs on them."""

    @staticmethod
    def get_name() -> str:
        """Return the backend's name in logs."""
        return "TIDAL_CPU_INDEXER"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Refuse: index keys are not attended to.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("index keys have no attention implementation; they are read by the indexer")

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the bytes of one index key."""
        return [fp8_rows.ROW_BYTES]


def indexer_backend(cache: object) -> type[AttentionBackend]:
    """Return the backend of an index-key cache (takes the place of
    ``DeepseekV32IndexerCache.get_attn_backend``)."""
    del cache
    return TidalIndexerBackend


def quantise_query(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: torch.Tensor | None = None,
    use_ue8m0: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise index queries (takes the place of ``per_token_group_quant_fp8``).

    Args:
        x: ``[n, 128]``.
        group_size: 128, the whole row.
        eps: accepted for the signature; the smallest scale is fixed.
        dtype: accepted for the signature; e4m3 is used.
        column_major_scales: False.
        tma_aligned_scales: False.
        out_q: None.
        use_ue8m0: accepted for the signature; scales are powers of two.

    Returns:
        e4m3 values ``[n, 128]`` and fp32 scales ``[n, 1]``.
    """
    del eps, dtype, use_ue8m0
    if group_size != x.shape[-1] or column_major_scales or tma_aligned_scales or out_q is not None:
        raise HostChanged("the indexer asks for another quantisation of its queries than one scale per row")
    return fp8_rows.quantise(x)


def forward_indexer(
    self: SparseAttnIndexer,
    hidden_states: torch.Tensor,
    q_quant: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    k: torch.Tensor | None,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Store this step's keys and fill the top-k buffer (takes the place of
    ``SparseAttnIndexer.forward_cpu``).

    Args:
        self: vLLM's indexer layer.
        hidden_states: ``[n, hidden]``, only its length is used.
        q_quant: ``[n, heads, 128]`` e4m3; its scales are already in ``weights``.
        k: ``[n, 128]`` keys of the step's tokens.
        weights: ``[n, heads]`` weights of the index heads.

    Returns:
        The buffer ``[max tokens, top_k]`` int32: positions within each request, ascending, then -1.
    """
    if k is None or self.skip_k_cache_insert or self.use_pcp or self.dcp_world_size > 1:
        raise HostChanged("the CPU indexer keeps its own keys and takes no context parallelism; set both sizes to 1")
    assert isinstance(q_quant, torch.Tensor)
    buffer: torch.Tensor = self.topk_indices_buffer
    step = get_forward_context().attn_metadata
    if not isinstance(step, dict):
        return buffer  # a dummy run, which has no caches
    metadata = step[self.k_cache.prefix]
    assert isinstance(metadata, TidalMLAMetadata)
    cache: torch.Tensor = self.k_cache.kv_cache
    slots = metadata.slot_mapping
    write_rows(cache, fp8_rows.pack(k[: slots.shape[0]]), slots)
    buffer[: hidden_states.shape[0]] = -1
    rows = cache.view(-1, cache.shape[-1])
    query = fp8_rows.widen(q_quant[: metadata.num_actual_tokens].view(torch.uint8))
    for span in metadata.spans:
        part = slice(span.start, span.stop)
        buffer[part, : self.topk_tokens] = choose(
            query[part], weights[part].float(), rows, metadata=metadata, span=span, k=self.topk_tokens
        )
    return buffer


def choose(
    query: torch.Tensor,
    weights: torch.Tensor,
    cache_rows: torch.Tensor,
    *,
    metadata: TidalMLAMetadata,
    span: RequestSpan,
    k: int,
) -> torch.Tensor:
    """Choose positions for the queries of one request.

    A position's score is the weighted sum over index heads of relu(query . key).

    Args:
        query: ``[n, heads, 128]`` float32.
        weights: ``[n, heads]`` float32.
        cache_rows: ``[rows, 132]`` uint8, the index keys of the layer.
        metadata: the step.
        span: the request.
        k: positions to choose.

    Returns:
        ``[n, k]`` int32: ascending positions up to the query's own, then -1.
    """
    positions = metadata.positions[span.start : span.stop]
    if span.length <= k:
        return top_k.everything(positions, k)
    keys = fp8_rows.unpack(gather_rows(cache_rows, metadata.context_slots(span)))
    count, heads, width = query.shape
    chosen = torch.empty((count, k), dtype=torch.int32)
    step = max(1, _SCORE_BYTES // (heads * span.length * _FLOAT))
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        seen = int(positions[part][-1]) + 1
        dots = (query[part].reshape(-1, width) @ keys[:seen].T).relu_().view(-1, heads, seen)
        scores = torch.bmm(weights[part].unsqueeze(1), dots).squeeze(1)
        chosen[part] = top_k.select(scores, positions[part], k)
    return chosen
