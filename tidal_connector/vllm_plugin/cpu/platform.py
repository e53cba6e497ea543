# SPDX-License-Identifier: Apache-2.0
"""The CPU platform that lets DeepSeek sparse attention, and dense MLA, run with every scheduling feature.

Stock vLLM refuses sparse attention on CPU, and without AMX it forces MLA models to blocks of 16 tokens and
takes chunked prefill and prefix caching away, because its reference kernel needs that. Our backend does not,
so the user's choices come back. Called once per process while vLLM builds its configuration, and again for
each attention layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tidal_connector.errors import ConfigError
from tidal_connector.vllm_plugin import front_door
from tidal_connector.vllm_plugin.plugins import CONNECTOR
from tidal_connector.vllm_plugin.translate import EngineFacts, engine_facts

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.inputs import EngineInput
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.attention.selector import AttentionSelectorConfig

BLOCK_SIZES = (16, 32, 64, 128)
DEFAULT_BLOCK_SIZE = 128
_FOLDER = "tidal_connector.vllm_plugin.cpu"
SPARSE_BACKEND = f"{_FOLDER}.sparse_mla.TidalSparseMLABackend"
DENSE_BACKEND = f"{_FOLDER}.sparse_mla.TidalDenseMLABackend"
WORKER = f"{_FOLDER}.worker.TidalCpuWorker"
_STOCK_MLA = (AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA)


class TidalCpuPlatform(CpuPlatform):
    """vLLM's CPU platform with our MLA backends and our worker, and a door that refuses bad transfer parameters."""

    # vLLM asks the class, not an object, about each request; set in the process that builds the configuration,
    # which is the front end.
    _facts: ClassVar[EngineFacts | None] = None

    @classmethod
    def validate_request(cls, processed_inputs: EngineInput, params: SamplingParams | PoolingParams) -> None:
        """Refuse a request whose ``kv_transfer_params`` this engine cannot use; its client gets HTTP 400.

        Raises:
            VLLMValidationError: what is wrong with them.
        """
        super().validate_request(processed_inputs, params)
        if cls._facts is not None:
            front_door.check_request(cls._facts, params)

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """Return the dotted name of the attention backend for one layer."""
        if attn_selector_config.use_sparse:
            return SPARSE_BACKEND
        if attn_selector_config.use_mla and selected_backend not in _STOCK_MLA:
            return DENSE_BACKEND
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Apply the stock rules, then restore what they took away from MLA models.

        Raises:
            ConfigError: the block size is none of 16, 32, 64 and 128, or the model cannot have its latents in host
                memory as the connector's settings ask.
        """
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = WORKER
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        block_size = cache.block_size if cache.user_specified_block_size else DEFAULT_BLOCK_SIZE
        prefix_caching = cache.enable_prefix_caching
        chunked_prefill = scheduler.enable_chunked_prefill
        batched_tokens = scheduler.max_num_batched_tokens
        super().check_and_update_config(vllm_config)
        from tidal_connector.vllm_plugin.cpu import offload

        offload.adopt_switch(vllm_config)
        offload.resolve(vllm_config)
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.kv_connector == CONNECTOR:
            cls._facts = engine_facts(vllm_config)
        if not _served(vllm_config.model_config, vllm_config.attention_config.backend):
            return
        if block_size not in BLOCK_SIZES:
            known = ", ".join(map(str, BLOCK_SIZES))
            raise ConfigError(f"--block-size {block_size}: the CPU backend for MLA takes {known}; choose one of them")
        cache.block_size = block_size
        cache.enable_prefix_caching = prefix_caching
        scheduler.enable_chunked_prefill = chunked_prefill
        scheduler.max_num_batched_tokens = batched_tokens

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Apply the stock overrides and our patches; vLLM calls this in each worker before it builds the model.

        Raises:
            HostChanged: vLLM is not what the patches were written for.
        """
        from tidal_connector.vllm_plugin.cpu import patches

        super().register_triton_kernel_overrides()
        patches.apply()


def _served(model: ModelConfig | None, backend: AttentionBackendEnum | None) -> bool:
    """Tell whether our backends serve the model: MLA, but not DeepSeek-V4, nor where a stock backend was
    asked for."""
    if model is None or not model.use_mla or model.hf_config.model_type == "deepseek_v4":
        return False
    return backend not in _STOCK_MLA or is_sparse(model)


def is_sparse(model: ModelConfig) -> bool:
    """Tell whether the model selects tokens by an index (it has ``index_topk``)."""
    return getattr(model.hf_config, "index_topk", None) is not None
