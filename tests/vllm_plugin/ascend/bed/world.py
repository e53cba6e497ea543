# SPDX-License-Identifier: Apache-2.0
"""A vLLM process of one rank as the attention of vllm-ascend finds it: platform, config, groups, rotation tables.

Everything is vLLM's and vllm-ascend's own but the model's config, which says only what attention asks for: vLLM
would start another process to look at the model class. Imported in the bed only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import _lru_cache_wrapper
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import set_forward_context
from vllm_ascend import ascend_config, utils
from vllm_ascend.attention import utils as attention_utils
from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel
from vllm_ascend.ops import rotary_embedding

from tests.vllm_plugin.ascend.bed.device import OnCpu

LATENT, ROPE, INDEX, BLOCK, TOP_K = 512, 64, 128, 128, 2048
"""DeepSeek-V3.2: elements of a latent, its rope and an index key; tokens per block; tokens that attention selects."""


@dataclass(frozen=True)
class Shape:
    """A model of the family, smaller than V3.2 where no operator can tell; ``model_type`` as in its config.json."""

    hidden: int = 96
    heads: int = 2
    index_heads: int = 4
    q_rank: int = 64
    nope: int = 128
    value: int = 128
    theta: float = 10_000.0
    model_type: str = "deepseek_v32"


def model_config(shape: Shape, layers: tuple[str, ...], dtype: torch.dtype, longest: int) -> Any:
    """Build what attention reads of a model's config; ``layers`` holds ``own`` or ``shared`` for each."""
    hf = PretrainedConfig(
        model_type=shape.model_type,
        architectures=["DeepseekV32ForCausalLM"],
        hidden_size=shape.hidden,
        num_hidden_layers=len(layers),
        num_attention_heads=shape.heads,
        q_lora_rank=shape.q_rank,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=shape.nope,
        qk_rope_head_dim=ROPE,
        v_head_dim=shape.value,
        index_topk=TOP_K,
        index_n_heads=shape.index_heads,
        index_head_dim=INDEX,
        rope_theta=shape.theta,
        max_position_embeddings=longest,
        n_routed_experts=256,
    )
    if "shared" in layers:
        hf.indexer_types = ["shared" if kind == "shared" else "full" for kind in layers]
    return SimpleNamespace(
        hf_config=hf,
        hf_text_config=hf,
        dtype=dtype,
        max_model_len=longest,
        use_mla=True,
        is_deepseek_mla=True,
        enforce_eager=True,
        runner_type="generate",
        quantization=None,
        get_head_size=lambda: LATENT + ROPE,
        get_num_attention_heads=lambda parallel: shape.heads,
        get_total_num_kv_heads=lambda: 1,
        get_num_kv_heads=lambda parallel: 1,
        is_encoder_decoder=False,
        is_moe=True,
    )


@contextmanager
def engine(
    shape: Shape,
    layers: tuple[str, ...],
    dtype: torch.dtype,
    longest: int,
    requests: int,
    kv_transfer: Any = None,
    additional: dict[str, Any] | None = None,
) -> Iterator[VllmConfig]:
    """Make a vLLM process of one rank for the length of a block; only one at a time."""
    config = VllmConfig(
        cache_config=CacheConfig(block_size=BLOCK),
        additional_config={"refresh": True, **(additional or {})},
    )
    config.model_config = model_config(shape, layers, dtype, longest)
    config.kv_transfer_config = kv_transfer
    config.scheduler_config.max_num_seqs = requests
    config.scheduler_config.max_num_batched_tokens = longest
    _forget()
    with set_current_vllm_config(config), OnCpu():
        settings = ascend_config.init_ascend_config(config)
        _join_groups(config)
        utils.set_weight_prefetch_method(settings.weight_prefetch_config)
        _rotation(config, shape, dtype, longest)
        try:
            yield config
        finally:
            ascend_config.clear_ascend_config()


@contextmanager
def forward(config: VllmConfig, metadata: Any, tokens: int) -> Iterator[None]:
    """Enter a forward pass, as the model runner does before it calls the model."""
    with set_forward_context(metadata, config, num_tokens=tokens):
        yield


def _forget() -> None:
    """Drop what vllm-ascend remembers of an earlier config: its answers are cached for the process."""
    for cached in [*vars(utils).values(), *vars(attention_utils).values()]:
        if isinstance(cached, _lru_cache_wrapper):
            cached.cache_clear()
    for name in ("_cos_mla", "_sin_mla", "_cos", "_sin", "_cos_cache", "_sin_cache", "_cos_sin_cache"):
        setattr(rotary_embedding, name, None)


def _join_groups(config: VllmConfig) -> None:
    """Make vLLM's groups of one rank; they stay for the life of the process, as in an engine."""
    if parallel_state.model_parallel_is_initialized():
        return
    with tempfile.TemporaryDirectory(prefix="tidal-bed-") as folder:
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1, backend="gloo")
        init_ascend_model_parallel(config.parallel_config)


def _rotation(config: VllmConfig, shape: Shape, dtype: torch.dtype, longest: int) -> None:
    rotary_embedding.set_cos_and_sin(config, config.scheduler_config.max_num_seqs, 1, dtype, torch.device("cpu"))
    rotary_embedding.AscendRotaryEmbedding(ROPE, ROPE, longest, shape.theta, True, dtype)
