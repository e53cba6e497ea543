# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker, counting the device's KV memory without the latents where these live in the host pool.

Built by vLLM in each worker process, by the name that :mod:`.platform` gives; all calls come from its main
thread.
"""

from __future__ import annotations

import torch
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

from tidal_connector.config import log_level
from tidal_connector.errors import ConfigError
from tidal_connector.log import configure
from tidal_connector.vllm_plugin.cpu import offload
from tidal_connector.vllm_plugin.cpu.model_runner import TidalCpuModelRunner
from tidal_connector.vllm_plugin.patching import replaced


class TidalCpuWorker(CPUWorker):
    """The CPU worker with our model runner."""

    def init_device(self) -> None:
        """Set the process up and build the model runner.

        Raises:
            ConfigError: offload is on, but vLLM would use its V2 model runner, which has no seam for it.
        """
        config = offload.resolve(self.vllm_config)
        if config is not None:
            configure(log_level() or config.log.level, config.log.file)
            if self.use_v2_model_runner:
                raise ConfigError(
                    "offload needs vLLM's V1 model runner and this engine would use V2; set VLLM_USE_V2_MODEL_RUNNER=0"
                )
        with replaced(cpu_worker, "CPUModelRunner", TidalCpuModelRunner):
            super().init_device()

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """Return the bytes that vLLM divides into blocks.

        With offload that is the size of all blocks, latents included, although only index keys take device
        memory: the number of blocks is the smaller of what the pool and the device budget hold, after the selection
        cache has got its share.

        Raises:
            ConfigError: not even one block fits.
        """
        device_bytes = super().determine_available_memory()
        config = offload.resolve(self.vllm_config)
        if config is None:
            return device_bytes
        parts = offload.split(self.get_kv_cache_spec())
        plan = offload.divide(config, parts, offload.costs(self.vllm_config, parts), device_bytes)
        assert isinstance(self.model_runner, TidalCpuModelRunner)
        self.model_runner.tidal_memory = plan
        return plan.blocks.blocks * (parts.latent_block_bytes + parts.index_block_bytes)
