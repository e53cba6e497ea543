# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend's worker, counting the device's KV memory without the latents, which live in the host pool.

Built by vLLM in each worker process of an engine with offload, by the name that :mod:`.platform` gives; all calls come
from its main thread.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm_ascend.worker import worker as stock
from vllm_ascend.worker.worker import NPUWorker

from tidal_connector.config import log_level
from tidal_connector.errors import ConfigError
from tidal_connector.log import configure
from tidal_connector.ops.npu.library import load_operators
from tidal_connector.vllm_plugin.ascend import offload, patches
from tidal_connector.vllm_plugin.ascend.host import HOST
from tidal_connector.vllm_plugin.ascend.model_runner import TidalNpuModelRunner
from tidal_connector.vllm_plugin.ascend.ranks import least
from tidal_connector.vllm_plugin.offload_plan import resolve
from tidal_connector.vllm_plugin.patching import replaced


class TidalNpuWorker(NPUWorker):
    """The NPU worker with our model runner and our attention backend."""

    def init_device(self) -> None:
        """Set the device up and build the model runner.

        Raises:
            ConfigError: vllm-ascend would use its V2 model runner, which has no seam for offload.
            HostChanged: the host is not what we were written for.
            DeviceMissing: the CANN toolkit cannot be loaded.
            NativeOpMissing: our operators are not installed.
        """
        config = resolve(self.vllm_config)
        if config is not None:
            configure(log_level() or config.log.level, config.log.file)
        if self.use_v2_model_runner:
            raise ConfigError(
                "offload needs vllm-ascend's V1 model runner and this engine would use V2; set "
                "VLLM_USE_V2_MODEL_RUNNER=0"
            )
        patches.apply_in_worker()
        with replaced(stock, "NPUModelRunner", TidalNpuModelRunner, HOST):
            super().init_device()
        assert self.device is not None
        if self.device.type != "cpu":
            load_operators()  # a missing operator package shows here, and not at the first decode step

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """Return the bytes that vLLM divides into blocks.

        That is the size of all blocks, latents included, although only index keys take device memory: the number of
        blocks is the smaller of what the pool and the device budget hold, after the selection cache has got its share.

        Raises:
            ConfigError: not even one block fits, or the selection cache does not.
        """
        device_bytes = super().determine_available_memory()
        config = resolve(self.vllm_config)
        runner: Any = self.model_runner
        assert config is not None
        assert isinstance(runner, TidalNpuModelRunner)
        # Ranks that divided different budgets would give requests seats of different sizes.
        device_bytes = least(device_bytes, self.parallel_config.tensor_parallel_size)
        caches = offload.split(self.get_kv_cache_spec(), runner.draft_layers())
        plan = offload.divide(config, caches.parts, runner.costs(caches.parts), len(caches.parts.index), device_bytes)
        runner.tidal_memory = plan
        return plan.blocks.blocks * (caches.parts.latent_block_bytes + caches.parts.index_block_bytes)
