# SPDX-License-Identifier: Apache-2.0
"""vLLM configurations of tiny DeepSeek models, without weights or tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 5,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
_SPARSE = {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 128}
_KINDS = {
    "v3": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    "v32": {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", **_SPARSE},
}


def vllm_config(folder: Path, kind: str, **arguments: Any) -> Any:
    """Build vLLM's configuration for a model of a kind, as the command line would.

    Args:
        folder: an empty folder for the model's ``config.json``.
        kind: ``v3`` (dense) or ``v32`` (sparse).
        arguments: fields of vLLM's ``EngineArgs``.
    """
    from vllm.engine.arg_utils import EngineArgs

    (folder / "config.json").write_text(json.dumps({**_SHAPE, **_KINDS[kind]}))
    settings = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 4096}
    return EngineArgs(model=str(folder), **{**settings, **arguments}).create_engine_config()


def transfer(role: str, **extra: Any) -> dict[str, Any]:
    """Return a ``kv_transfer_config`` that names our connector."""
    return {
        "kv_connector": "TidalConnector",
        "kv_connector_module_path": "tidal_connector.vllm_plugin.connector",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }
