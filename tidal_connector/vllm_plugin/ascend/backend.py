# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend's sparse attention, attending from the selection cache where a step only decodes.

Everything up to the selection of positions is stock, and so is the order in which rows are written, the event of their
writing recorded and the connector told: projections, the writing of new rows into the pool (through the alias that the
KV tuple holds), the indexer. Only the last step differs, attention itself. A step that is not served from the cache
attends from the pool, and so does a layer without a place in the cache (a draft model's, whose latents are on the
device).

In a layer that selects for itself nothing can hide the fetching but the projection of the query, which needs no row. So
there it is put off until the rows are on their way. Forward thread; the same calls run while a graph is captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_ascend.attention.sfa_v1 import AscendSFABackend, AscendSFAImpl
from vllm_ascend.device.device_op import DeviceOperator

if TYPE_CHECKING:
    import torch

    from tidal_connector.vllm_plugin.ascend.selection import LayerSelection

ANY_SLOT = 0
"""The ``sparse_mode`` in which the kernel takes each listed slot as it is; with its causal mode (3) it would take slots
for positions and drop those beyond the query's."""


class TidalSFABackend(AscendSFABackend):
    """vllm-ascend's backend with our implementation."""

    @staticmethod
    def get_impl_cls() -> type[AscendSFAImpl]:
        """Return the class of a layer's attention."""
        return TidalSFAImpl


@dataclass(slots=True)
class _Query:
    """A query that is still to be projected.

    Attributes:
        latent: ``[tokens, q_lora_rank]``, what the projection takes.
        cos, sin: what rotates its second part; None until the stock code hands them over.
    """

    latent: Any
    cos: Any = None
    sin: Any = None


class TidalSFAImpl(AscendSFAImpl):
    """One layer's attention.

    Attributes:
        tidal: the layer's place in the selection cache; None where it has none.
    """

    tidal: LayerSelection | None = None

    def attach(self, layer: LayerSelection) -> None:
        """Let the layer attend from the selection cache; after the caches exist, before the first step."""
        self.tidal = layer

    def _q_proj_and_k_up_proj(self, x: torch.Tensor) -> Any:
        layer = self.tidal
        if layer is None or not layer.seated or not layer.leads:
            return super()._q_proj_and_k_up_proj(x)
        query = _Query(x)
        return query, query

    def rope_single(self, x: Any, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        """Rotate the rope part of the query, later where the query is still to be projected."""
        if not isinstance(x, _Query):
            return super().rope_single(x, cos, sin)
        x.cos, x.sin = cos, sin
        return x

    def _projected(self, ql_nope: Any, q_pe: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(ql_nope, _Query):
            return ql_nope, q_pe
        latent, rope = super()._q_proj_and_k_up_proj(ql_nope.latent)
        return latent, super().rope_single(rope, ql_nope.cos, ql_nope.sin)

    def _execute_sparse_flash_attention_process(
        self,
        ql_nope: Any,
        q_pe: Any,
        kv_cache: tuple[torch.Tensor, ...],
        topk_indices: torch.Tensor,
        attn_metadata: Any,
        actual_seq_lengths_query: torch.Tensor,
        actual_seq_lengths_key: torch.Tensor,
    ) -> Any:
        layer = self.tidal
        if layer is None or not layer.seated:
            return super()._execute_sparse_flash_attention_process(
                ql_nope,
                q_pe,
                kv_cache,
                topk_indices,
                attn_metadata,
                actual_seq_lengths_query,
                actual_seq_lengths_key,
            )
        if layer.leads:
            layer.plan(topk_indices, actual_seq_lengths_key, attn_metadata.block_table)
        ql_nope, q_pe = self._projected(ql_nope, q_pe)
        held = layer.arrive()
        return DeviceOperator.execute_sparse_flash_attention_process(
            self,
            ql_nope,
            q_pe,
            (held.nope, held.rope),
            held.slots,
            attn_metadata,
            actual_seq_lengths_query,
            held.lengths,
            block_table=held.block_table,
            sparse_mode=ANY_SLOT,
        )
