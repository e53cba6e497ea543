# SPDX-License-Identifier: Apache-2.0
"""How vllm-ascend's caches divide into pool and device, on its own spec classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs
from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec

from tests.vllm_plugin.ascend.bed.world import BLOCK, TOP_K
from tests.vllm_plugin.ascend.patched import POOL, place, self_attention, specs
from tidal_connector.config import PoolConfig, SelectionConfig, TidalConfig
from tidal_connector.errors import ConfigError
from tidal_connector.selection.budget import ModelCosts
from tidal_connector.vllm_plugin.ascend.kv_allocation import layer_specs
from tidal_connector.vllm_plugin.ascend.offload import divide, split

V32 = ("own",) * 4
GLM = ("own", "shared", "shared", "shared") * 2
LATENT_ROW, INDEX_ROW = 1152, 256


def test_blocks_are_counted_by_the_specs_that_vllm_ascend_makes() -> None:
    parts = split(specs(V32), ()).parts
    assert (parts.latent_block_bytes, parts.index_block_bytes) == (4 * BLOCK * LATENT_ROW, 4 * BLOCK * INDEX_ROW)
    parts = split(specs(GLM), ()).parts
    assert parts.index == (self_attention(0), self_attention(4))
    assert (parts.latent_block_bytes, parts.index_block_bytes) == (8 * BLOCK * LATENT_ROW, 2 * BLOCK * INDEX_ROW)
    assert parts.latent_row_bytes == LATENT_ROW


def test_quantised_index_keys_cost_their_bytes_and_a_scale() -> None:
    parts = split(specs(V32, cache_sparse_li_c8=True), ()).parts
    assert parts.index_block_bytes == 4 * BLOCK * (128 + 2)


def test_the_latents_of_draft_layers_count_for_the_device() -> None:
    parts = split(specs(V32), (self_attention(3),)).parts
    assert parts.latent == tuple(self_attention(layer) for layer in range(3))
    assert parts.latent_block_bytes == 3 * BLOCK * LATENT_ROW
    assert parts.index_block_bytes == BLOCK * (4 * INDEX_ROW + LATENT_ROW)


def test_layers_come_in_the_model_s_order_whatever_the_order_of_their_specs() -> None:
    found = specs(("own",) * 11)
    assert split(dict(sorted(found.items())), ()).parts.latent == tuple(found)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (specs(V32, sfa_dcp_replicated_indexer_size=2), "a page takes"),
        ({"layers.0": FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.half)}, "not Full"),
        (specs(("shared", "shared")), "0 with index keys"),
        ({**specs(("own",)), self_attention(1): AscendMLAAttentionSpec(
            block_size=64, num_kv_heads=1, head_size=704, sparse_head_dim=(512, 64, 128), dtype=torch.bfloat16)},
         r"block sizes \[64, 128\]"),
    ],
)  # fmt: skip
def test_caches_of_another_form_are_refused(found: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        split(found, ())


def test_packed_latents_are_refused() -> None:
    packed = AscendMLAAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=1,
        head_size=656 + 128,
        sparse_head_dim=(656, 0, 128),
        dtype=torch.bfloat16,
        cache_sparse_sfa_c8=True,
    )
    with pytest.raises(ConfigError, match='set "offload": "off"'):
        split({self_attention(0): packed}, ())


def costs(layers: tuple[str, ...] = V32, **changed: int) -> ModelCosts:
    parts = split(specs(layers), ()).parts
    given = {
        "top_k": TOP_K,
        "queries": 1,
        "requests": 2,
        "context": 1 << 17,
        "block_size": BLOCK,
        "latent_block_bytes": parts.latent_block_bytes,
        "index_block_bytes": parts.index_block_bytes,
        "slot_bytes": len(parts.latent) * LATENT_ROW,
        **changed,
    }
    return ModelCosts(**given)


def plan(device: int, pool: int = 1 << 34, layers: tuple[str, ...] = V32, **settings: Any) -> Any:
    parts = split(specs(layers), ()).parts
    changed = settings.pop("costs", {})
    config = TidalConfig(pool=PoolConfig(bytes=pool), selection=SelectionConfig(**settings))
    return divide(config, parts, costs(layers, **changed), len(parts.index), device)


def test_seats_are_whole_pages_and_the_device_pays_for_them_and_index_keys_alone() -> None:
    found = plan(1 << 30)
    assert found.slots == 4224  # twice 2048, and the token of the step
    assert found.arena_rows == 2 * 4224
    assert found.arena_bytes == 2 * 4224 * (4 * LATENT_ROW + 4 * 8)
    left = (1 << 30) - found.arena_bytes
    assert found.blocks.device_blocks == left // (4 * BLOCK * INDEX_ROW)
    assert found.blocks.blocks == min(found.blocks.device_blocks, (1 << 34) // (4 * BLOCK * LATENT_ROW))


def test_the_pool_may_bind() -> None:
    found = plan(1 << 30, pool=100 * 4 * BLOCK * LATENT_ROW + 1)
    assert (found.blocks.blocks, str(found.blocks.limit)) == (100, "host")


def test_seats_shrink_to_their_share_but_not_below_one_step() -> None:
    width = 4 * LATENT_ROW + 4 * 8
    found = plan(1 << 28, bytes=2 * 3000 * width)
    assert found.slots == 2944  # the most whole pages of 3000
    with pytest.raises(ConfigError, match="2 requests of at least 2176 slots take"):
        plan(1 << 28, bytes=2 * 2175 * width)
    with pytest.raises(ConfigError, match="lower --max-num-seqs"):
        plan(1 << 25)


def test_drafts_widen_the_least_seat() -> None:
    assert plan(1 << 30, costs={"queries": 4}).slots == 8320  # 4 x 2049, in whole pages


def test_latents_lie_in_the_pool_layer_by_layer_each_part_in_one_piece() -> None:
    placement = place(GLM, 5, torch.bfloat16)
    rows = 5 * BLOCK
    with placement.pool.region as region:
        expected = region.address
        for layer, kind in enumerate(GLM):
            nope, rope, *index = placement.raw[self_attention(layer)]
            assert placement.addresses[self_attention(layer)] == (expected, expected + rows * 1024)
            assert (nope.data_ptr(), nope.numel()) == (expected, rows * 1024)
            assert (rope.data_ptr(), rope.numel()) == (expected + rows * 1024, rows * 128)
            assert [part.numel() for part in index] == ([rows * INDEX_ROW] if kind == "own" else [])
            expected += rows * LATENT_ROW
        assert expected - region.address == 8 * rows * LATENT_ROW <= region.length
        assert placement.device_bytes == 2 * rows * INDEX_ROW
        del nope, rope, index
        placement.raw.clear()


def test_draft_layers_are_allocated_on_the_device() -> None:
    placement = place(V32, 3, torch.bfloat16, draft=(self_attention(3),))
    with placement.pool.region as region:
        assert self_attention(3) not in placement.addresses
        nope, rope, _ = placement.raw[self_attention(3)]
        assert not region.address <= nope.data_ptr() < region.address + region.length
        assert (nope.numel(), rope.numel()) == (3 * BLOCK * 1024, 3 * BLOCK * 128)
        assert placement.device_bytes == 3 * BLOCK * (4 * INDEX_ROW + LATENT_ROW)
        placement.raw.clear()


def test_more_blocks_than_the_pool_holds_are_refused() -> None:
    blocks = POOL.size // (4 * BLOCK * LATENT_ROW) + 1
    with pytest.raises(ConfigError, match=r"raise pool\.bytes or drop --num-gpu-blocks-override"):
        place(V32, blocks, torch.bfloat16)


def test_each_layer_keeps_its_own_spec_and_a_second_block_table_is_refused() -> None:
    found = specs(GLM)
    uniform = UniformTypeKVCacheSpecs.from_specs(found)
    assert uniform is not None
    one = KVCacheConfig(5, [], [KVCacheGroupSpec(list(found), uniform)])
    assert layer_specs(one) == found
    with pytest.raises(ConfigError, match="one block table"):
        layer_specs(KVCacheConfig(5, [], one.kv_cache_groups * 2))
