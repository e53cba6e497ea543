# SPDX-License-Identifier: Apache-2.0
"""What must move for a prompt, computed from the checkpoint alone and not from what the connector says. Pure.

The decode engine computes the last prompt token itself (it needs that token's logits), so a prompt of n tokens moves
the rows of n - 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from tidal_connector.errors import ConfigError

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_INDEX_SCALE_BYTES = 4


class RowBytes(msgspec.Struct, frozen=True):
    """Bytes of one token.

    Attributes:
        layers: decoder layers.
        latent: latent row of one layer.
        index: index keys over all layers (layers that share a selection have none).
    """

    layers: int
    latent: int
    index: int

    @property
    def moved(self) -> int:
        """Bytes that one token's hand-over moves."""
        return self.layers * self.latent + self.index

    @property
    def device_with(self) -> float:
        """Device bytes per token and layer when the latents live in the host pool."""
        return self.index / self.layers

    @property
    def device_without(self) -> float:
        """Device bytes per token and layer when everything lives on the device."""
        return self.moved / self.layers

    def prompt(self, tokens: int) -> int:
        """Bytes that the hand-over of a prompt moves."""
        return max(0, tokens - 1) * self.moved


def row_bytes(model: Path, dtype: str) -> RowBytes:
    """Compute the row sizes of a checkpoint.

    Args:
        model: its folder.
        dtype: the dtype that it is run in.

    Raises:
        ConfigError: the checkpoint's config.json cannot be read.
    """
    file = model / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        layers = int(config["num_hidden_layers"])
        latent = (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * _ELEMENT_BYTES[dtype]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file}: cannot compute row sizes: {error!r}") from None
    key = config.get("index_head_dim", 0)
    row = key + _INDEX_SCALE_BYTES if key else 0
    return RowBytes(layers, latent, row * sum(_has_index_keys(config, layer) for layer in range(layers)))


def _has_index_keys(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer makes a selection of its own, by vLLM's rule for index sharing."""
    pattern = config.get("index_topk_pattern")
    if pattern:
        return bool(pattern[layer] != "S")
    offset = config.get("index_skip_topk_offset", 2)
    frequency = int(config.get("index_topk_freq", 1))
    return max(layer - int(offset) + 1, 0) % frequency == 0
