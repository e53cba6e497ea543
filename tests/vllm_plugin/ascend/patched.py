# SPDX-License-Identifier: Apache-2.0
"""A bed whose layers are ours: latents in a host pool, steps that only decode served from the selection cache.

What the model runner does around a step is done here by the same objects: caches are laid out by ``kv_allocation``,
requests are seated by ``EngineSelection``. Imported in the bed only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm_ascend.attention.sfa_v1 import AscendSFAMetadataBuilder
from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec

from tests.vllm_plugin.ascend.bed.case import Bed, Cache, Case, Run, Step
from tests.vllm_plugin.ascend.bed.world import BLOCK, INDEX, LATENT, ROPE, TOP_K, engine
from tidal_connector.config import PageKind, PoolConfig
from tidal_connector.memory.region import open_region
from tidal_connector.selection.device import DeviceSelection, DeviceSizes
from tidal_connector.selection.groups import index_groups
from tidal_connector.vllm_plugin.ascend.backend import TidalSFAImpl
from tidal_connector.vllm_plugin.ascend.kv_allocation import NpuPlacement, allocate
from tidal_connector.vllm_plugin.ascend.offload import split
from tidal_connector.vllm_plugin.ascend.pool import on_cpu
from tidal_connector.vllm_plugin.ascend.selection import EngineSelection

POOL = PoolConfig(bytes=1 << 30, pages=PageKind.PLAIN)


def specs(layers: tuple[str, ...], dtype: torch.dtype = torch.bfloat16, **changed: Any) -> dict[str, Any]:
    """Return the specs of layers as vllm-ascend makes them: ``own`` has index keys, ``shared`` has none."""
    found = {}
    for at, kind in enumerate(layers):
        dims = (LATENT, ROPE, INDEX if kind == "own" else 0)
        found[f"model.layers.{at}.self_attn.attn"] = AscendMLAAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=sum(dims), sparse_head_dim=dims, dtype=dtype, **changed
        )
    return found


def place(layers: tuple[str, ...], blocks: int, dtype: torch.dtype, draft: tuple[str, ...] = ()) -> NpuPlacement:
    """Lay out caches over plain memory."""
    return allocate(
        split(specs(layers, dtype), draft),
        blocks,
        POOL.size,
        lambda length, cuts: on_cpu(open_region(length, POOL)),
        lambda length: torch.zeros(length, dtype=torch.int8),
        lambda keys, scales: (torch.zeros(keys, dtype=torch.int8), torch.zeros(scales, dtype=torch.int8)),
    )


def shaped(raw: tuple[torch.Tensor, ...], dtype: torch.dtype) -> Cache:
    """View a layer's raw tensors as vllm-ascend does."""
    widths = (LATENT, ROPE, INDEX)
    return tuple(part.view(dtype).view(-1, BLOCK, 1, width) for part, width in zip(raw, widths, strict=False))


class PatchedBed(Bed):
    """A bed that seats the requests of each step before its forward pass.

    Args:
        slots: of a seat.
    """

    def __init__(self, case: Case, config: VllmConfig, slots: int) -> None:
        self._placement: NpuPlacement | None = None
        super().__init__(case, config, TidalSFAImpl, AscendSFAMetadataBuilder, self._ours)
        requests = len(case.contexts) + case.padding
        leaders = {at for at, kind in enumerate(case.layers) if kind == "own"}
        self.cache = DeviceSelection(
            pools=[(cache[0], cache[1]) for cache in self.caches],
            groups=index_groups(range(len(case.layers)), leaders),
            sizes=DeviceSizes(
                seats=requests,
                slots=slots,
                top_k=TOP_K,
                queries=case.queries,
                tokens=requests * case.queries,
                context=case.longest,
                page_tokens=BLOCK,
            ),
            device=torch.device("cpu"),
        )
        self.selection = EngineSelection(self.cache, case.queries)
        for at, layer in enumerate(self.layers):
            layer.attach(self.selection.layer(at))
        self.served = 0

    def _ours(self, layer: int, blocks: int) -> Cache:
        if self._placement is None:
            self._placement = place(self.case.layers, blocks, self.case.dtype)
        return shaped(self._placement.raw[self_attention(layer)], self.case.dtype)

    def _common_metadata(self, step: Step, state: Any, padding: int, padded: int) -> Any:
        requests, computed, queries = zip(*step.requests, strict=True)
        self.selection.arm([f"request-{at}" for at in requests], queries, computed, len(requests) + padding)
        self.served += self.selection.seated
        return super()._common_metadata(step, state, padding, padded)


def self_attention(layer: int) -> str:
    """Return the name of a layer's attention."""
    return f"model.layers.{layer}.self_attn.attn"


@contextmanager
def patched_bed(case: Case, slots: int = 2176, **settings: Any) -> Iterator[PatchedBed]:
    """Open a bed with our attention; further settings go to its engine."""
    requests = len(case.contexts) + case.padding
    with engine(case.shape, case.layers, case.dtype, case.longest, requests, **settings) as config:
        yield PatchedBed(case, config, slots)


def run_patched(case: Case, slots: int = 2176, before_decode: Callable[[PatchedBed], None] | None = None) -> Run:
    """Run a case with our attention, and see that its decode steps were served from the cache.

    ``before_decode`` is called between prefill and decode: what it breaks has to show.
    """
    with patched_bed(case, slots) as opened:
        opened.prefill()
        if before_decode is not None:
            before_decode(opened)
        already = opened.served
        for _ in range(case.steps):
            opened.decode()
        assert opened.served == already + case.steps
        opened.cache.check()
        return opened.run
