# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend's model runner, with the latents in the host pool.

Three seams: what allocates the raw tensors of the caches hands out parts of the pool, the selection cache is told of
each step's requests, and prepared for each pass right after its attention metadata is built, which is before the
forward pass or the replay of a graph, and outside its capture. Everything else is the stock runner. Worker's main
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

from tidal_connector.log import get_logger
from tidal_connector.memory import Share
from tidal_connector.selection.device import DeviceSelection, DeviceSizes
from tidal_connector.selection.groups import index_groups
from tidal_connector.vllm_plugin import offload_plan
from tidal_connector.vllm_plugin.ascend import offload
from tidal_connector.vllm_plugin.ascend.backend import TidalSFAImpl
from tidal_connector.vllm_plugin.ascend.counts import SelectionCounts
from tidal_connector.vllm_plugin.ascend.kv_allocation import ALIGNMENT, NpuPlacement, allocate, layer_specs
from tidal_connector.vllm_plugin.ascend.platform import TOP_K
from tidal_connector.vllm_plugin.ascend.pool import HostPool, open_pool
from tidal_connector.vllm_plugin.ascend.selection import EngineSelection
from tidal_connector.vllm_plugin.offload_plan import quarters
from tidal_connector.vllm_plugin.ranks import drawn_name, tensor_rank
from tidal_connector.vllm_plugin.translate import layer_index

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from tidal_connector.config import TidalConfig
    from tidal_connector.selection.budget import MemoryPlan, ModelCosts
    from tidal_connector.vllm_plugin.offload_plan import CacheSplit

_log = get_logger(__name__)


class TidalNpuModelRunner(NPUModelRunner):
    """The NPU model runner.

    Attributes:
        tidal_memory: how the worker divided the memory.
        tidal_placement: where the caches are, once they exist.
        tidal_selection: the selection cache, once caches exist.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.tidal_memory: MemoryPlan | None = None
        self.tidal_placement: NpuPlacement | None = None
        self.tidal_selection: EngineSelection | None = None
        self._tidal_counts: SelectionCounts | None = None

    # --- memory

    def draft_layers(self) -> Collection[str]:
        """Return the attention layers of the draft model; none without one."""
        return () if self.drafter is None else tuple(getattr(self.drafter, "attn_layer_names", ()))

    def costs(self, parts: CacheSplit) -> ModelCosts:
        """Return what a block, a row and a request of this model cost."""
        return offload_plan.costs(self.vllm_config, parts)

    def _allocate_kv_cache_tensors(self, kv_cache_config: KVCacheConfig) -> dict[str, Any]:
        """Return the raw tensors of each layer: latents out of the pool, everything else on the device.

        Raises:
            ConfigError: the number of blocks exceeds the pool.
            PoolExhausted: the pool's memory cannot be had.
            DeviceFailed: it cannot be registered with the NPU.
        """
        config = self._tidal_config()
        specs = layer_specs(kv_cache_config)
        caches = offload.split(specs, self.draft_layers())
        scales = next(s.c8_k_scale_cache_dtype for s in specs.values() if isinstance(s, AscendMLAAttentionSpec))
        self.hybrid_with_attn_and_mamba = False
        self.tidal_placement = allocate(
            caches,
            kv_cache_config.num_blocks,
            config.pool.size,
            lambda length, cuts: self._open_pool(config, length, cuts),
            lambda length: self._allocate_int8_cache_tensor(length, ALIGNMENT),
            lambda keys, scale: self._allocate_sparse_c8_indexer_tensors(keys, scale, ALIGNMENT, scales),
        )
        _log.info("host pool: %s", self.tidal_placement.pool.region.report.line())
        return self.tidal_placement.raw

    def _tidal_config(self) -> TidalConfig:
        config = offload_plan.resolve(self.vllm_config)
        assert config is not None, "our worker is built for engines with offload only"
        return config

    def _open_pool(self, config: TidalConfig, length: int, cuts: Sequence[int]) -> HostPool:
        ranks, share = self.vllm_config.parallel_config.tensor_parallel_size, None
        if ranks > 1:
            parts = f"{len(cuts)} parts, the last at {max(cuts)}"
            share = Share(drawn_name(ranks), tensor_rank(ranks), ranks, parts)
        return open_pool(length, config.pool, self.device, cuts, share, quarters(length))

    def initialize_kv_cache_tensors(  # type: ignore[override]  # NPUModelRunner's own differs from its base, too
        self, kv_cache_config: KVCacheConfig
    ) -> dict[str, Any]:
        """Allocate and bind the caches, make the selection cache, and tell the connector of the pool.

        vLLM registers the caches with the connector right after.
        """
        kv_caches: dict[str, Any] = super().initialize_kv_cache_tensors(kv_cache_config)
        self._hand_over(kv_caches)
        return kv_caches

    def _hand_over(self, kv_caches: dict[str, Any]) -> None:
        from tidal_connector.vllm_plugin.connector import TidalConnector

        connector, memory, placement = get_kv_transfer_group(), self.tidal_memory, self.tidal_placement
        assert isinstance(connector, TidalConnector)
        assert memory is not None, "vLLM allocates caches after it asked for the memory that they may take"
        assert placement is not None
        names = list(placement.addresses)
        connector.adopt_pool(placement.pool.region, names, shared=placement.pool.shared, addresses=placement.addresses)
        connector.worker.before_pool_closes(self._sync_device)
        layers = self.compilation_config.static_forward_context
        leaders = {layer_index(name) for name in names if layers[name].impl.has_indexer}
        groups = index_groups([layer_index(name) for name in names], leaders)
        cache = DeviceSelection(
            pools=[(kv_caches[name][0], kv_caches[name][1]) for name in names],
            groups=groups,
            sizes=self._sizes(memory),
            device=self.device,
        )
        selection = EngineSelection(cache, self.uniform_decode_query_len)
        for at, name in enumerate(names):
            impl = layers[name].impl
            assert isinstance(impl, TidalSFAImpl), f"{name}: {type(impl).__name__} in place of our attention"
            impl.attach(selection.layer(at))
        counters = connector.worker.counters
        row_bytes = sum(part.shape[-1] * part.element_size() for part in kv_caches[names[0]][:2])
        members = [len(group.members) for group in groups]
        self._tidal_counts = SelectionCounts(
            lambda: cache.counts, members, row_bytes, memory.base_rows, counters, self.device
        )
        counters.set("selection_slots", memory.arena_rows)
        counters.set("selection_cache_bytes", memory.arena_bytes)
        counters.set("index_cache_bytes", placement.device_bytes)
        counters.set("pool_pages", memory.blocks.blocks)
        self.tidal_selection = selection

    def _sizes(self, memory: MemoryPlan) -> DeviceSizes:
        queries, parallel = self.uniform_decode_query_len, self.vllm_config.parallel_config
        # A decode batch is padded to the size of a captured graph, or to a multiple of the ranks.
        captured = self.compilation_config.max_cudagraph_capture_size or 0
        return DeviceSizes(
            seats=memory.requests,
            slots=memory.base_rows,
            top_k=TOP_K,
            queries=queries,
            tokens=max(memory.requests * queries, captured) + parallel.tensor_parallel_size,
            context=self.model_config.max_model_len,
            page_tokens=memory.block_size,
        )

    # --- steps

    def _update_states(self, scheduler_output: SchedulerOutput) -> Callable[..., Any] | None:
        if self.tidal_selection is not None:
            self.tidal_selection.begin(scheduler_output)
        found: Callable[..., Any] | None = super()._update_states(scheduler_output)
        return found

    def _build_attention_metadata(self, *given: Any, **named: Any) -> Any:
        """Build the metadata of a pass as the stock runner does, and prepare the selection cache for it."""
        built = super()._build_attention_metadata(*given, **named)
        if self.tidal_selection is not None:
            self._arm(self.tidal_selection, *given, **named)
        return built

    def _arm(
        self,
        selection: EngineSelection,
        num_tokens: int,
        num_reqs: int,
        max_query_len: int,
        num_tokens_padded: int | None = None,
        num_reqs_padded: int | None = None,
        *_given: Any,
        num_scheduled_tokens: Any = None,
        num_scheduled_tokens_np: Any = None,
        **_named: Any,
    ) -> None:
        del num_tokens, num_tokens_padded
        assert self._tidal_counts is not None
        counts, padded = self._tidal_counts, num_reqs_padded or num_reqs
        counts.collect()
        if num_scheduled_tokens is None:  # only a dummy run has none by request
            selection.idle(padded, max_query_len)
            return
        batch = self.input_batch
        selection.arm(
            batch.req_ids[:num_reqs],
            num_scheduled_tokens_np[:num_reqs].tolist(),
            batch.num_computed_tokens_cpu[:num_reqs].tolist(),
            padded,
        )
        pages = int(batch.block_table[0].num_blocks_per_row[:num_reqs].sum())
        counts.expect(selection.seated, selection.requests, pages)
