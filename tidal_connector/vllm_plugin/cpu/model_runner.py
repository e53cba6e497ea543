# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU model runner, with the latents in the host pool where the engine is configured so.

Two seams: the function that allocates KV caches is exchanged while vLLM's own code allocates and binds them, and the
selection cache is told where a step begins and ends. Everything else is the stock runner. Used on the worker's main
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from tidal_connector.log import get_logger
from tidal_connector.memory import Share, open_region, open_shared
from tidal_connector.vllm_plugin.cpu import offload
from tidal_connector.vllm_plugin.cpu.kv_allocation import KvPlacement, allocate
from tidal_connector.vllm_plugin.offload_plan import quarters
from tidal_connector.vllm_plugin.patching import replaced
from tidal_connector.vllm_plugin.ranks import drawn_name, tensor_rank

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sequence import IntermediateTensors
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from tidal_connector.config import TidalConfig
    from tidal_connector.memory.region import MemoryRegion
    from tidal_connector.selection.budget import MemoryPlan
    from tidal_connector.vllm_plugin.cpu.selection import EngineSelection

_log = get_logger(__name__)


class TidalCpuModelRunner(CPUModelRunner):
    """The CPU model runner.

    Attributes:
        tidal_pool: the host pool once caches exist, None where the engine has none.
        tidal_memory: how the worker divided the memory, None where the latents are on the device.
        tidal_selection: the selection cache once caches exist, None where there is none.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.tidal_pool: MemoryRegion | None = None
        self.tidal_memory: MemoryPlan | None = None
        self.tidal_selection: EngineSelection | None = None

    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        kv_cache_allocation_context: AbstractContextManager[Any] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Allocate and bind the caches; with offload, latents come from the pool and the connector is told of
        it.

        Raises:
            ConfigError: the number of blocks exceeds the pool.
            PoolExhausted: the pool's memory cannot be had.
        """
        config = offload.resolve(self.vllm_config)
        if config is None:
            return super().initialize_kv_cache_tensors(kv_cache_config, kernel_block_sizes, kv_cache_allocation_context)
        memory = self.tidal_memory
        assert memory is not None, "vLLM allocates caches after it asked for the memory that they may take"
        placement = allocate(
            kv_cache_config,
            config.pool.size,
            lambda length: self._open_pool(config, length),
            memory.arena_rows,
        )
        self.tidal_pool = placement.pool
        _log.info("host pool: %s", placement.pool.report.line())
        with replaced(gpu_model_runner, "allocate_kv_cache", lambda *_args: placement.kv_caches):
            kv_caches = super().initialize_kv_cache_tensors(
                kv_cache_config, kernel_block_sizes, kv_cache_allocation_context
            )
        self._hand_over(config, memory, placement)
        return kv_caches

    def _open_pool(self, config: TidalConfig, length: int) -> MemoryRegion:
        """Open the pool; the ranks of an engine map the same pages, because P delivers each row once for all of them.

        What they decode, each of them writes there: the same bytes, since latents are not divided among ranks.
        """
        ranks = self.vllm_config.parallel_config.tensor_parallel_size
        if ranks == 1:
            return open_region(length, config.pool, quarters(length))
        share = Share(drawn_name(ranks), tensor_rank(ranks), ranks, fingerprint=f"{length} bytes")
        return open_shared(length, config.pool, share, quarters(length))

    def _hand_over(self, config: TidalConfig, memory: MemoryPlan, placement: KvPlacement) -> None:
        """Give the pool to the connector, which registers it for transfers (vLLM registers the caches right after), and
        the selection cache to the layers that read it.
        """
        from tidal_connector.vllm_plugin.connector import TidalConnector
        from tidal_connector.vllm_plugin.cpu.selection import EngineSelection

        connector = get_kv_transfer_group()
        assert isinstance(connector, TidalConnector)
        parts, counters = placement.parts, connector.worker.counters
        shared = self.vllm_config.parallel_config.tensor_parallel_size > 1
        connector.adopt_pool(placement.pool, list(parts.latent), shared=shared)
        selection = EngineSelection(config, memory, offload.costs(self.vllm_config, parts), placement, counters)
        connector.worker.before_pool_closes(selection.close)
        layers = self.compilation_config.static_forward_context
        for name, layer in zip(parts.latent, selection.layers(parts.latent), strict=True):
            layers[name].impl.offload(layer, counters)
        counters.set("index_cache_bytes", placement.index_bytes)
        counters.set("pool_pages", memory.blocks.blocks)
        self.tidal_selection = selection

    def _update_states(self, scheduler_output: SchedulerOutput) -> Callable[..., Any] | None:
        selection = self.tidal_selection
        if selection is None:
            return super()._update_states(scheduler_output)
        selection.begin(scheduler_output)
        deferred = super()._update_states(scheduler_output)
        batch = self.input_batch
        pages = batch.block_table[0].num_blocks_per_row[: batch.num_reqs].sum()
        selection.batch(batch.req_ids, int(pages))
        return deferred

    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> Any:
        """Run a step, and send the rows that it computed to the pool."""
        output = super().execute_model(scheduler_output, intermediate_tensors)
        if self.tidal_selection is not None:
            self.tidal_selection.end()
        return output
