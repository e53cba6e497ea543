# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm_plugin.cpu.configs import transfer
from tidal_connector.config import PoolConfig, TidalConfig
from tidal_connector.errors import ConfigError

pytestmark = pytest.mark.vllm


def engine(transfer_config: dict[str, Any] | None, sparse: bool = True) -> Any:
    hf = SimpleNamespace(index_topk=64) if sparse else SimpleNamespace()
    given = None if transfer_config is None else SimpleNamespace(**transfer_config)
    return SimpleNamespace(kv_transfer_config=given, model_config=SimpleNamespace(model="some/model", hf_config=hf))


@pytest.mark.parametrize(
    ("role", "setting", "expected"),
    [
        ("kv_consumer", None, True),
        ("kv_consumer", "auto", True),
        ("kv_consumer", "on", True),
        ("kv_consumer", "off", False),
        ("kv_both", None, False),
        ("kv_both", "on", True),
        ("kv_both", "off", False),
        ("kv_producer", None, False),
        ("kv_producer", "off", False),
    ],
)
def test_who_keeps_latents_in_the_pool(role: str, setting: str | None, expected: bool) -> None:
    from tidal_connector.vllm_plugin.cpu import offload

    extra = {} if setting is None else {"offload": setting}
    assert (offload.resolve(engine(transfer(role, **extra))) is not None) is expected


def test_engines_without_our_connector_are_left_alone() -> None:
    from tidal_connector.vllm_plugin.cpu import offload

    assert offload.resolve(engine(None)) is None
    other = {**transfer("kv_consumer"), "kv_connector": "NixlConnector"}
    assert offload.resolve(engine(other)) is None


def test_a_model_without_an_index_is_refused_with_the_way_out() -> None:
    from tidal_connector.vllm_plugin.cpu import offload

    with pytest.raises(ConfigError, match=r'some/model has no index_topk: set "offload": "off"'):
        offload.resolve(engine(transfer("kv_consumer"), sparse=False))
    assert offload.resolve(engine(transfer("kv_consumer", offload="off"), sparse=False)) is None


def test_a_misspelt_setting_is_refused() -> None:
    from tidal_connector.vllm_plugin.cpu import offload

    with pytest.raises(ConfigError, match="did you mean 'offload'"):
        offload.resolve(engine(transfer("kv_consumer", ofload="on")))


def specs(layers: int, leaders: int, block_size: int = 16) -> dict[str, Any]:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

    found: dict[str, Any] = {}
    for layer in range(layers):
        name = f"model.layers.{layer}.self_attn"
        found[f"{name}.attn"] = MLAAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=576, dtype=torch.float32
        )
        if layer < leaders:
            found[f"{name}.indexer.k_cache"] = MLAAttentionSpec(
                block_size=block_size,
                num_kv_heads=1,
                head_size=132,
                dtype=torch.uint8,
                cache_role=SparseCacheRole.INDEXER,
            )
    return found


def test_caches_are_sorted_and_counted_per_block() -> None:
    from tidal_connector.vllm_plugin.cpu import offload

    parts = offload.split(specs(layers=4, leaders=1))
    assert len(parts.latent) == 4
    assert parts.index == ("model.layers.0.self_attn.indexer.k_cache",)
    assert (parts.latent_block_bytes, parts.index_block_bytes) == (4 * 16 * 2304, 16 * 132)


def test_a_model_without_index_keys_cannot_be_split() -> None:
    from tidal_connector.vllm_plugin.cpu import offload

    with pytest.raises(ConfigError, match="found 2 latent caches, 0 index caches"):
        offload.split(specs(layers=2, leaders=0))


def costs(parts: Any, **changed: int) -> Any:
    from tidal_connector.selection.budget import ModelCosts

    given = {
        "top_k": 64,
        "queries": 1,
        "requests": 2,
        "context": 1024,
        "block_size": parts.block_size,
        "latent_block_bytes": parts.latent_block_bytes,
        "index_block_bytes": parts.index_block_bytes,
        "slot_bytes": parts.latent_block_bytes // parts.block_size,
        **changed,
    }
    return ModelCosts(**given)


@pytest.mark.parametrize(
    ("pool", "device", "blocks", "limit"),
    [(10 * 4 * 16 * 2304, 100 * 4 * 16 * 132, 10, "host"), (1000 * 4 * 16 * 2304, 700 * 4 * 16 * 132, 385, "device")],
)
def test_the_scarcer_memory_decides_and_the_log_says_which(
    caplog: pytest.LogCaptureFixture, pool: int, device: int, blocks: int, limit: str
) -> None:
    from tidal_connector.vllm_plugin.cpu import offload

    parts = offload.split(specs(layers=4, leaders=4))
    logger = logging.getLogger("tidal.vllm_plugin.cpu.offload")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level("INFO", logger=logger.name):
            found = offload.divide(TidalConfig(pool=PoolConfig(bytes=pool)), parts, costs(parts), device)
    finally:
        logger.removeHandler(caplog.handler)
    assert (found.blocks.blocks, found.blocks.limit) == (blocks, limit)
    assert "device KV is 132.0 bytes per token and layer, 2436.0 without offload" in caplog.text
    assert f"{blocks} are used, the {limit} binds" in caplog.text
    assert f"{found.arena_bytes} bytes on the device" in caplog.text
    assert f"{found.concurrent(1024)} of 1024 tokens" in caplog.text


def test_rows_of_two_sizes_are_refused() -> None:
    from tidal_connector.vllm_plugin.cpu import offload

    found = specs(layers=2, leaders=2)
    other = specs(layers=2, leaders=2, block_size=32)
    name = "model.layers.1.self_attn.attn"
    with pytest.raises(ConfigError, match="latent rows of one size"):
        offload.split({**found, name: other[name]})
