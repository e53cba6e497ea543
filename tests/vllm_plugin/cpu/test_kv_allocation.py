# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm_plugin.cpu.test_offload import specs
from tidal_connector.config import PageKind, PoolConfig
from tidal_connector.errors import ConfigError
from tidal_connector.memory.region import open_region

pytestmark = pytest.mark.vllm

LAYERS, LEADERS, BLOCKS, BLOCK_SIZE = 4, 2, 5, 16
PAGE = BLOCK_SIZE * 2304
ARENA = 48


def cache_config() -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs

    found = specs(LAYERS, LEADERS, BLOCK_SIZE)
    uniform = UniformTypeKVCacheSpecs.from_specs(found)
    assert uniform is not None
    return KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(list(found), uniform)])


def open_plain(length: int) -> Any:
    return open_region(length, PoolConfig(bytes=length, pages=PageKind.PLAIN))


def test_latents_are_views_of_the_pool_layer_by_layer_and_page_by_page() -> None:
    from tidal_connector.vllm_plugin.cpu.kv_allocation import allocate

    placement = allocate(cache_config(), 1 << 30, open_plain, ARENA)
    with placement.pool as pool:
        assert pool.length >= LAYERS * BLOCKS * PAGE
        for layer, name in enumerate(placement.parts.latent):
            cache = placement.kv_caches[name]
            assert cache.shape == (BLOCKS, 1, BLOCK_SIZE, 576)
            assert cache.dtype == torch.float32
            for block in range(BLOCKS):
                assert cache[block].data_ptr() == pool.address + (layer * BLOCKS + block) * PAGE
                assert cache[block].is_contiguous()
        placement.kv_caches[placement.parts.latent[1]][2, 0, 3] = 1.5
        start = (BLOCKS + 2) * PAGE + 3 * 2304
        assert bytes(pool.buffer[start : start + 4]) == b"\x00\x00\xc0\x3f"
        del cache
        placement.kv_caches.clear()


def test_index_keys_stay_on_the_device() -> None:
    from tidal_connector.vllm_plugin.cpu.kv_allocation import allocate

    placement = allocate(cache_config(), 1 << 30, open_plain, ARENA)
    with placement.pool as pool:
        for name in placement.parts.index:
            cache = placement.kv_caches[name]
            assert cache.shape == (BLOCKS, 1, BLOCK_SIZE, 132)
            assert cache.dtype == torch.uint8
            assert not pool.address <= cache.data_ptr() < pool.address + pool.length
            assert int(cache.count_nonzero()) == 0
        del cache
        placement.kv_caches.clear()


def test_more_blocks_than_the_pool_holds_are_refused_before_memory_is_taken() -> None:
    from tidal_connector.vllm_plugin.cpu.kv_allocation import allocate

    with pytest.raises(ConfigError, match=rf"5 KV blocks need {LAYERS * BLOCKS * PAGE} bytes of host pool"):
        allocate(cache_config(), LAYERS * BLOCKS * PAGE - 1, lambda length: pytest.fail("memory was taken"), ARENA)


def test_every_layer_keeps_its_own_spec() -> None:
    from tidal_connector.vllm_plugin.cpu.kv_allocation import layer_specs

    assert layer_specs(cache_config()) == specs(LAYERS, LEADERS, BLOCK_SIZE)
    plain = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["a"], kv_cache_spec=SimpleNamespace(x=1))])
    assert list(layer_specs(plain)) == ["a"]  # type: ignore[arg-type]
