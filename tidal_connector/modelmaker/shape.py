# SPDX-License-Identifier: Apache-2.0
"""What a model-maker checkpoint looks like: sizes, architecture and ``config.json``. Pure; called from any thread."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

from tidal_connector.errors import ConfigError

ROPE_THETA = 10_000.0
YARN_FACTOR = 40.0
YARN_ORIGINAL_TOKENS = 4096
YARN_BETA_FAST = 32
YARN_BETA_SLOW = 1
MAX_POSITIONS = 163_840


class Arch(enum.StrEnum):
    """Architectures that the maker writes."""

    V32 = "v32"
    GLM = "glm"
    V3 = "v3"


class Dtype(enum.StrEnum):
    """Element types of the weights and of the latent KV cache."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


_CLASS = {
    Arch.V32: ("DeepseekV32ForCausalLM", "deepseek_v32"),
    Arch.GLM: ("GlmMoeDsaForCausalLM", "glm_moe_dsa"),
    Arch.V3: ("DeepseekV3ForCausalLM", "deepseek_v3"),
}
_DEFAULT_LAYERS = {Arch.V32: 6, Arch.GLM: 8, Arch.V3: 6}
GLM_GROUP = 4  # one leader and three followers, as GLM-5.2 has


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one model, in elements and tokens.

    The KV part (``kv_lora_rank``, ``rope_dim``, ``index_dim``) has the true sizes of DeepSeek-V3.2, so a KV row has its
    true bytes; the rest is as small as the judgement allows.
    """

    arch: Arch
    layers: int
    topk: int
    dtype: Dtype
    vocab: int
    hidden: int = 256
    intermediate: int = 256
    heads: int = 4
    nope_dim: int = 64
    rope_dim: int = 64
    value_dim: int = 64
    kv_lora_rank: int = 512
    q_lora_rank: int = 64
    index_heads: int = 4
    index_dim: int = 128

    @property
    def sparse(self) -> bool:
        """Whether attention selects its rows."""
        return self.arch is not Arch.V3

    @property
    def interleaved_index_rope(self) -> bool:
        """Whether the indexer's rope rotates neighbours (GLM) instead of halves (V3.2)."""
        return self.arch is Arch.GLM

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer chooses rows itself; a GLM follower reads its leader's choice instead."""
        if self.arch is Arch.GLM:
            return layer % GLM_GROUP == 0
        return self.sparse


def model_shape(arch: str, *, layers: int | None, topk: int, dtype: str, vocab: int) -> ModelShape:
    """Return the checked shape of a checkpoint.

    Args:
        arch: ``v32``, ``glm`` or ``v3``.
        layers: number of layers; None for the default of the architecture (6; 8 for glm: two full index groups).
        topk: rows that attention selects for each query (tokens); ignored by ``v3``.
        dtype: ``float32`` or ``bfloat16``.
        vocab: number of tokens.

    Raises:
        ConfigError: a name is unknown or a size out of range.
    """
    if arch not in list(Arch):
        raise ConfigError(f"arch {arch!r} is unknown; expected one of {', '.join(Arch)}")
    if dtype not in list(Dtype):
        raise ConfigError(f"dtype {dtype!r} is unknown; expected one of {', '.join(Dtype)}")
    kind = Arch(arch)
    count = _DEFAULT_LAYERS[kind] if layers is None else layers
    if not 1 <= count <= 64:
        raise ConfigError(f"layers is {count}; expected 1 to 64")
    if not 16 <= topk <= 2048:
        raise ConfigError(f"topk is {topk}; expected 16 to 2048 tokens")
    return ModelShape(arch=kind, layers=count, topk=topk, dtype=Dtype(dtype), vocab=vocab)


def hf_config(shape: ModelShape, *, bos: int, eos: int, pad: int) -> dict[str, Any]:
    """Return the content of ``config.json`` for a shape, with the special token ids given.

    Every MLP is dense (``first_k_dense_replace`` equals the number of layers): experts add nothing to the KV path, and
    a router that flips on a rounding difference would make the checkpoint a worse judge.
    """
    name, model_type = _CLASS[shape.arch]
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "moe_intermediate_size": 64,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "kv_lora_rank": shape.kv_lora_rank,
        "q_lora_rank": shape.q_lora_rank,
        "qk_rope_head_dim": shape.rope_dim,
        "qk_nope_head_dim": shape.nope_dim,
        "v_head_dim": shape.value_dim,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": shape.layers,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": ROPE_THETA,
        # yarn is not a matter of taste here: vLLM's CPU kernel for unscaled rope reads MLA's strided tensors wrongly.
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": YARN_FACTOR,
            "original_max_position_embeddings": YARN_ORIGINAL_TOKENS,
            "beta_fast": YARN_BETA_FAST,
            "beta_slow": YARN_BETA_SLOW,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": shape.dtype.value,
        "use_cache": True,
    }
    if shape.sparse:
        config |= {
            "index_topk": shape.topk,
            "index_n_heads": shape.index_heads,
            "index_head_dim": shape.index_dim,
        }
    if shape.arch is Arch.GLM:
        config |= {
            "index_topk_freq": GLM_GROUP,
            "index_skip_topk_offset": 1,
            "indexer_rope_interleave": True,
        }
    return config


def rope_frequency(pair: int, rope_dim: int = 64) -> float:
    """Return the angle in radians per token of one rope pair under the yarn settings above.

    The weights use it to aim the indexer at a distance; a small error here would only move the aim.
    """
    plain = ROPE_THETA ** (-2.0 * pair / rope_dim)

    def turn(rotations: float) -> float:
        span = math.log(YARN_ORIGINAL_TOKENS / (rotations * 2 * math.pi))
        return rope_dim * span / (2 * math.log(ROPE_THETA))

    low = max(math.floor(turn(YARN_BETA_FAST)), 0)
    high = min(math.ceil(turn(YARN_BETA_SLOW)), rope_dim - 1)
    ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
    return plain * (1.0 - ramp) + plain / YARN_FACTOR * ramp
