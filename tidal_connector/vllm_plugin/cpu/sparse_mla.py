# SPDX-License-Identifier: Apache-2.0
"""MLA attention backends for CPU: over the positions that an index selected, or over all of them.

vLLM's MLA layer does the projections; it hands absorbed queries and the latent cache to ``forward_mqa`` here,
for prefill and decode tokens alike (see :mod:`.metadata`). All calls come from the forward thread.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MLAAttentionImpl, MultipleOf
from vllm.v1.kv_cache_layout import KVCacheLayout

from tidal_connector.errors import ConfigError
from tidal_connector.metrics import Counters
from tidal_connector.vllm_plugin.cpu.attend import MANY_QUERIES, attend_context, attend_slots
from tidal_connector.vllm_plugin.cpu.metadata import RequestSpan, TidalMLAMetadata, TidalMLAMetadataBuilder

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionLayer
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from tidal_connector.vllm_plugin.cpu.selection import LayerSelection

LATENT_WIDTH = 576
CACHE_DTYPES = ("auto", "bfloat16")


class TidalMLABackend(AttentionBackend):
    """What our two MLA backends share."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(CACHE_DTYPES)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Return the block sizes: any multiple of 16."""
        del kv_cache_spec
        return [MultipleOf(16)]

    @staticmethod
    def get_builder_cls() -> type[TidalMLAMetadataBuilder]:
        """Return the metadata builder."""
        return TidalMLAMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the widths of a latent row."""
        return [LATENT_WIDTH]

    @classmethod
    def is_mla(cls) -> bool:
        """Tell that the cache holds latents."""
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return layouts in which a layer's rows are contiguous, so that a slot is a row number."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)


class TidalSparseMLABackend(TidalMLABackend):
    """DeepSeek sparse attention (V3.2, GLM-5)."""

    @staticmethod
    def get_name() -> str:
        """Return the backend's name in logs."""
        return "TIDAL_CPU_SPARSE_MLA"

    @staticmethod
    def get_impl_cls() -> type[TidalSparseMLAImpl]:
        """Return the implementation."""
        return TidalSparseMLAImpl

    @classmethod
    def is_sparse(cls) -> bool:
        """Tell that attention reads a selection."""
        return True


class TidalDenseMLABackend(TidalMLABackend):
    """MLA over all positions (DeepSeek-V2, V3, R1)."""

    @staticmethod
    def get_name() -> str:
        """Return the backend's name in logs."""
        return "TIDAL_CPU_MLA"

    @staticmethod
    def get_impl_cls() -> type[TidalDenseMLAImpl]:
        """Return the implementation."""
        return TidalDenseMLAImpl


class _LatentImpl(MLAAttentionImpl[TidalMLAMetadata]):
    """Writes latent rows and attends to them; subclasses say to which."""

    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla: Any,
    ) -> None:
        if attn_type != AttentionType.DECODER or any(
            (alibi_slopes, sliding_window, logits_soft_cap, kv_sharing_target_layer_name)
        ):
            raise ConfigError(
                "the CPU backend for MLA takes plain decoder attention; the model asks for one of alibi "
                "slopes, a sliding window, soft-capped scores, a shared KV cache or encoder attention"
            )
        if kv_cache_dtype not in CACHE_DTYPES:
            raise ConfigError(
                f"--kv-cache-dtype {kv_cache_dtype}: the CPU backend for MLA takes "
                f"{' or '.join(CACHE_DTYPES)}; choose one of them"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank: int = mla["kv_lora_rank"]

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write ``[n, 512]`` latents and ``[n, 1, 64]`` rope keys to their slots; slot -1 is skipped."""
        del kv_cache_dtype, k_scale
        if kv_cache.numel() == 0:
            return
        count = slot_mapping.shape[0]
        rows = torch.cat((kv_c_normed[:count], k_pe[:count].reshape(count, -1)), dim=-1)
        self._write(kv_cache, rows, slot_mapping)

    def _write(self, cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the step's rows ``[n, 576]`` where they belong."""
        write_rows(cache, rows, slots)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TidalMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend for all tokens of the step: ``[n, heads, 512]`` in the query's dtype, and no log-sum-exp."""
        del layer
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        rows = kv_c_and_k_pe_cache.view(-1, self.head_size)
        return self._attend(query, rows, attn_metadata).to(query.dtype), None

    @abc.abstractmethod
    def _attend(self, query: torch.Tensor, rows: torch.Tensor, metadata: TidalMLAMetadata) -> torch.Tensor:
        """Attend for all tokens: ``[n, heads, 512]`` float32."""


class TidalDenseMLAImpl(_LatentImpl):
    """MLA over all positions."""

    def _attend(self, query: torch.Tensor, rows: torch.Tensor, metadata: TidalMLAMetadata) -> torch.Tensor:
        output = query.new_zeros((*query.shape[:2], self.kv_lora_rank), dtype=torch.float32)
        for span in metadata.spans:
            part = slice(span.start, span.stop)
            output[part] = attend_context(
                query[part],
                rows,
                metadata.context_slots(span),
                query_positions=metadata.positions[part],
                scale=self.scale,
                value_width=self.kv_lora_rank,
            )
        return output


class TidalSparseMLAImpl(_LatentImpl, SharedTopkIndicesBuffer):
    """MLA over the positions in the shared top-k buffer."""

    is_sparse: ClassVar[bool] = True
    supports_dense_mha_prefill = False
    # Read by vLLM's layer where it could take a masked prefill path; there is none here.
    masked_mha_available = False

    def __init__(self, *args: Any, **mla: Any) -> None:
        super().__init__(*args, **mla)
        self.init_topk_indices_buffer(mla.get("indexer"), mla.get("topk_indices_buffer"))
        self._selection: LayerSelection | None = None
        self._counters: Counters | None = None

    def offload(self, selection: LayerSelection | None, counters: Counters) -> None:
        """Know that the rows lie in the host pool: what decodes is served from the selection cache, where there is one,
        and what is gathered is counted.
        """
        self._selection = selection
        self._counters = counters

    def record_logical_topk_ready(self) -> None:
        """Take vLLM's signal that the selection of this layer is final: its rows are sent for while queries are
        projected.
        """
        if self._selection is not None:
            self._selection.selected(self._indices())

    def _indices(self) -> torch.Tensor:
        # The drafter repoints the buffer after construction, so it is read anew each time.
        indices = self.topk_indices_buffer
        assert indices is not None
        return indices

    def _write(self, cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        passed = self._selection.current() if self._selection is not None else None
        if self._selection is None or passed is None or not self._selection.write(passed, rows):
            write_rows(cache, rows, slots)

    def _attend(self, query: torch.Tensor, rows: torch.Tensor, metadata: TidalMLAMetadata) -> torch.Tensor:
        output = query.new_zeros((*query.shape[:2], self.kv_lora_rank), dtype=torch.float32)
        passed = self._selection.current() if self._selection is not None else None
        if self._selection is None or passed is None:
            self._attend_rows(query, rows, metadata, [metadata.spans], output)
            return output
        held, slots = self._selection.read(passed)
        if isinstance(passed.tokens, slice):
            attend_slots(query[passed.tokens], held, slots, passed.spans, self.scale, output[passed.tokens])
        else:
            part = query.new_zeros((len(passed.tokens), *output.shape[1:]), dtype=torch.float32)
            attend_slots(query[passed.tokens], held, slots, passed.spans, self.scale, part)
            output.index_copy_(0, passed.tokens, part)
        self._attend_rows(query, rows, metadata, passed.others, output)
        return output

    def _attend_rows(
        self,
        query: torch.Tensor,
        rows: torch.Tensor,
        metadata: TidalMLAMetadata,
        runs: Sequence[Sequence[RequestSpan]],
        output: torch.Tensor,
    ) -> None:
        """Attend for runs of adjoining requests to the rows of the cache, through the row buffer, a piece at a time."""
        runs = [spans for spans in runs if spans]
        if not runs:
            return
        selected = _trim(self._indices()[: query.shape[0]])
        buffer, k = metadata.buffer, selected.shape[1]
        row_bytes, gathered = rows.shape[1] * rows.element_size(), 0
        for spans in runs:
            if self._counters is None and all(span.stop - span.start < MANY_QUERIES for span in spans):
                # The rows are on the device already: a few queries read them where they lie.
                part = slice(spans[0].start, spans[-1].stop)
                inside = [(span.start - part.start, span.stop - part.start) for span in spans]
                slots = torch.from_numpy(metadata.wanted(selected[part], part))
                attend_slots(query[part], rows, slots, inside, self.scale, output[part])
                continue
            for part, inside in metadata.pieces(k, buffer.capacity(row_bytes), spans):
                held, slots = buffer.fill(rows, metadata.wanted(selected[part], part))
                attend_slots(query[part], held, slots, inside, self.scale, output[part])
                gathered += held.shape[0]
        if self._counters is not None:
            self._counters.add("rows_gathered", gathered)
            self._counters.add("bytes_gathered", gathered * row_bytes)


def _trim(selected: torch.Tensor) -> torch.Tensor:
    """Cut off trailing columns in which no query selects anything; at least one column stays."""
    used = (selected >= 0).any(dim=0)
    return selected[:, : max(1, int(used.sum()))]


def write_rows(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write one row per token into a paged cache, skipping slot -1.

    Args:
        cache: ``[blocks, block_size, width]``, contiguous.
        rows: ``[n, width]``, cast to the cache's dtype.
        slots: ``[n]`` int64, row numbers within the cache or -1.
    """
    kept = slots >= 0
    if not bool(kept.all()):
        rows, slots = rows[kept], slots[kept]
    cache.view(-1, cache.shape[-1]).index_copy_(0, slots, rows.to(cache.dtype))
