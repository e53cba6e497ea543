# SPDX-License-Identifier: Apache-2.0
"""The KV geometry of a model, from its ``config.json`` or by its name. Pure but for reading that file.

Hands on a :class:`ModelKv`; ``layout.KVLayout`` made from it is what all sums are taken of. A *row* is what the latent
cache keeps for one token (DeepSeek-V3.2, GLM-5) or for one compressed entry of four tokens (DeepSeek-V4).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tidal_connector.errors import ConfigError
from tidal_connector.layout import KVLayout, RegionKind, RegionSpec
from tidal_connector.selection.groups import IndexGroup, index_groups

_GLM: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_head_dim": 128,
}
_V4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
}
BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    "deepseek-v3.2": {
        "model_type": "deepseek_v32",
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 2048,
        "index_head_dim": 128,
        "max_position_embeddings": 163_840,
    },
    "glm-5.1": _GLM,
    "glm-5.2": {**_GLM, "index_topk_freq": 4},  # 21 leaders: layers 0, 1, 5, 9, ... 77
    "deepseek-v4-flash": {
        **_V4,
        "num_hidden_layers": 43,
        "index_topk": 512,
        "compress_ratios": [1, 1, *(4 if layer % 2 == 0 else 128 for layer in range(2, 43))],
    },
    "deepseek-v4-pro": {
        **_V4,
        "num_hidden_layers": 61,
        "index_topk": 1024,
        "compress_ratios": [128, 128, *(4 if layer % 2 == 0 else 128 for layer in range(2, 61))],
    },
}
"""The fields of the published ``config.json`` files that decide about KV."""

LATENT_FORMATS = ("bf16", "fp8_ds_mla", "int8", "float32")

_CSA, _HCA = 4, 128
_TILE = 128  # elements that share a scale in the 8-bit latent rows
_DEFAULT_OFFSET = 2  # index_skip_topk_offset where config.json has none


class ModelKv(msgspec.Struct, frozen=True, kw_only=True):
    """What a model keeps per row, and where.

    Attributes:
        name: for people.
        layers: decoder layers whose latents attention selects from, so that they may live in the host pool.
        leaders: those of them with an indexer of their own.
        top_k: rows that a query selects.
        row_tokens: tokens per row.
        latent, rope, index: elements of a latent row without its rope part, of that part, and of an index key.
        dense_layers: further layers that keep one row per 128 tokens on the device (HCA of V4).
        window_layers, window: layers with a sliding window on the device, and its tokens.
        positions: longest context that the model is made for; 0: not said.
    """

    name: str
    layers: tuple[int, ...]
    leaders: tuple[int, ...]
    top_k: int
    row_tokens: int
    latent: int
    rope: int
    index: int
    dense_layers: int = 0
    window_layers: int = 0
    window: int = 0
    positions: int = 0

    @property
    def compressed(self) -> bool:
        """Whether a row stands for several tokens (DeepSeek-V4)."""
        return self.row_tokens > 1

    @property
    def groups(self) -> tuple[IndexGroup, ...]:
        """The layers by whose selection they read (``selection.groups``)."""
        return index_groups(self.layers, self.leaders)

    def latent_bytes(self, kind: str) -> int:
        """Bytes of one latent row in one layer.

        bf16 and float32: every element. ``fp8_ds_mla`` and int8: one byte per latent element, four of scale per 128 of
        them, rope in bf16 (656 of DeepSeek-V3.2); V4's fp8 row has eight bytes of scales and padding instead (584).

        Raises:
            ConfigError: the model has no such format.
        """
        if kind in ("bf16", "float32"):
            return (self.latent + self.rope) * (2 if kind == "bf16" else 4)
        if kind not in LATENT_FORMATS or (self.compressed and kind == "int8"):
            raise ConfigError(f"--format {kind}: {self.name} is kept in {', '.join(self.formats())}")
        return self.latent + (8 if self.compressed else 4 * (self.latent // _TILE)) + 2 * self.rope

    def index_bytes(self, kind: str) -> int:
        """Bytes of one index key: fp8 with a scale of 4 B (vLLM), int8 with 2 B, or bf16 (vllm-ascend)."""
        return {"fp8": self.index + 4, "int8": self.index + 2, "bf16": 2 * self.index}[kind]

    def formats(self) -> tuple[str, ...]:
        """The latent formats that this model is kept in."""
        return tuple(kind for kind in LATENT_FORMATS if not (self.compressed and kind in ("int8", "float32")))

    def layout(self, latent_format: str, index_format: str) -> KVLayout:
        """Return the layout that two engines of this model would agree on, for its sums."""
        rope_bytes = self.rope * (4 if latent_format == "float32" else 2)
        regions = []
        for layer in self.layers:
            size = self.latent_bytes(latent_format)
            regions.append(RegionSpec(RegionKind.LATENT, layer, size, latent_format, "bf16", rope_bytes))
            if layer in self.leaders:
                regions.append(RegionSpec(RegionKind.INDEX, layer, self.index_bytes(index_format), index_format))
        sharing = tuple(self.layers[group.leader] for group in self.groups for _ in group.members)
        return KVLayout(self.name, tuple(regions), self.top_k, sharing, "", "", latent_format)

    def with_draft_layer(self) -> ModelKv:
        """Return the model with its multi-token-prediction layer, which always has an indexer of its own."""
        layer = max(self.layers) + 1
        return msgspec.structs.replace(self, layers=(*self.layers, layer), leaders=(*self.leaders, layer))


def find_model(model: str) -> ModelKv:
    """Return a model by its built-in name, by its folder, or by its ``config.json``.

    Raises:
        ConfigError: it is none of these, or not a model whose attention selects.
    """
    if model.lower() in BUILT_IN:
        return model_of(BUILT_IN[model.lower()], model.lower())
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        names = ", ".join(BUILT_IN)
        raise ConfigError(
            f"MODEL_CONFIG {model!r}: {error.strerror}; expected a config.json, its folder, or one of {names}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file}: {error}; expected a model's config.json") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a model's config.json, an object")
    return model_of(found.get("text_config", found), path.name if path.is_dir() else path.parent.name or path.name)


def model_of(config: Mapping[str, Any], name: str) -> ModelKv:
    """Translate the fields of a ``config.json``.

    Raises:
        ConfigError: a field is missing or odd, or the model's attention selects nothing.
    """
    if not config.get("index_topk"):
        raise ConfigError(
            f"{name}: config.json has no index_topk, so attention reads every row of the context and latents cannot "
            'leave the device (such a model is served with offload = "off"); expected DeepSeek-V3.2, V4 or GLM-5'
        )
    total, top_k = _count(config, "num_hidden_layers", name), _count(config, "index_topk", name)
    rope, index = _count(config, "qk_rope_head_dim", name), _count(config, "index_head_dim", name)
    positions = config.get("max_position_embeddings", 0)
    ratios = config.get("compress_ratios")
    if ratios:
        return _compressed(config, name, ratios[:total], top_k, rope, index, positions)
    layers = tuple(range(total))
    return ModelKv(
        name=name,
        layers=layers,
        leaders=tuple(layer for layer in layers if _has_indexer(config, layer)),
        top_k=top_k,
        row_tokens=1,
        latent=_count(config, "kv_lora_rank", name),
        rope=rope,
        index=index,
        positions=positions,
    )


def _compressed(
    config: Mapping[str, Any], name: str, ratios: Sequence[int], top_k: int, rope: int, index: int, positions: int
) -> ModelKv:
    csa = tuple(layer for layer, ratio in enumerate(ratios) if ratio == _CSA)
    odd = sorted({ratio for ratio in ratios if ratio > 1} - {_CSA, _HCA})
    if odd or not csa:
        raise ConfigError(f"{name}: compress_ratios holds {odd or 'no 4'}; expected layers of 1, {_CSA} and {_HCA}")
    return ModelKv(
        name=name,
        layers=csa,
        leaders=csa,
        top_k=top_k,
        row_tokens=_CSA,
        latent=_count(config, "head_dim", name) - rope,
        rope=rope,
        index=index,
        dense_layers=sum(ratio == _HCA for ratio in ratios),
        window_layers=len(ratios),
        window=_count(config, "sliding_window", name),
        positions=positions,
    )


def _has_indexer(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer chooses for itself: vLLM's rule (``deepseek_v2.py``), by pattern, or by frequency and offset."""
    types, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
    if types:
        return layer >= len(types) or types[layer] != "shared"
    if pattern:
        return layer >= len(pattern) or pattern[layer] != "S"
    frequency, offset = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset")
    return max(layer - (_DEFAULT_OFFSET if offset is None else offset) + 1, 0) % frequency == 0


def _count(config: Mapping[str, Any], field: str, name: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}: {field} = {value!r} in config.json: expected a number of at least 1")
    return value
