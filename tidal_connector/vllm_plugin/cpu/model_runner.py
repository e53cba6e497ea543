# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU model runner, with the latents in the host pool where the engine is configured so.

One seam: the function that allocates KV caches is exchanged while vLLM's own code allocates and binds them;
everything else is the stock runner. Used on the worker's main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from tidal_connector.log import get_logger
from tidal_connector.vllm_plugin.cpu import offload
from tidal_connector.vllm_plugin.cpu.kv_allocation import KvPlacement, allocate
from tidal_connector.vllm_plugin.cpu.patching import replaced

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from tidal_connector.memory.region import MemoryRegion

_log = get_logger(__name__)


class TidalCpuModelRunner(CPUModelRunner):
    """The CPU model runner; ``tidal_pool`` is the host pool once caches exist, None where the engine has
    none."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.tidal_pool: MemoryRegion | None = None

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
        from tidal_connector.memory.region import open_region

        placement = allocate(
            kv_cache_config,
            config.pool.size,
            lambda length: open_region(length, config.pool, _progress(length)),
        )
        self.tidal_pool = placement.pool
        _log.info("host pool: %s", placement.pool.report.line())
        with replaced(gpu_model_runner, "allocate_kv_cache", lambda *_args: placement.kv_caches):
            kv_caches = super().initialize_kv_cache_tensors(
                kv_cache_config, kernel_block_sizes, kv_cache_allocation_context
            )
        _hand_over(placement, self.compilation_config.static_forward_context)
        return kv_caches


def _hand_over(placement: KvPlacement, layers: Mapping[str, Any]) -> None:
    """Give the pool to the connector, which registers it for transfers (vLLM registers the caches right after), and
    the connector's counters to the layers that read the pool."""
    from tidal_connector.vllm_plugin.connector import TidalConnector
    from tidal_connector.vllm_plugin.cpu.sparse_mla import TidalSparseMLAImpl

    if has_kv_transfer_group():
        connector = get_kv_transfer_group()
        if isinstance(connector, TidalConnector):
            connector.adopt_pool(placement.pool, list(placement.parts.latent))
            for name in placement.parts.latent:
                if isinstance(layers[name].impl, TidalSparseMLAImpl):
                    layers[name].impl.count_into(connector.worker.counters)


def _progress(length: int) -> Callable[[int, int], None]:
    """Return a callback that logs each further quarter of the pool."""
    logged = [0]

    def report(done: int, total: int) -> None:
        quarter = 4 * done // max(1, total)
        if quarter > logged[0]:
            logged[0] = quarter
            _log.info("host pool: %d %% of %d bytes prepared", 25 * quarter, length)

    return report
