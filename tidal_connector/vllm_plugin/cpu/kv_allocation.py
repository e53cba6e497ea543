# SPDX-License-Identifier: Apache-2.0
"""Memory for the caches of an engine whose latents live in the host pool.

Takes vLLM's KV cache configuration and hands on one tensor per layer in the shape that vLLM expects,
``[blocks, 1, block_size, width]``, plus the pool that backs the latents. Layer-major in both memories: a
layer's pages are contiguous, so that a block id is a page number within each layer. Called once,
on the worker's main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from tidal_connector.errors import ConfigError
from tidal_connector.selection.budget import slot_bytes
from tidal_connector.vllm_plugin.cpu.offload import CacheSplit, split

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec

    from tidal_connector.memory.region import MemoryRegion


@dataclass(frozen=True, slots=True)
class KvPlacement:
    """Where the caches are.

    Attributes:
        kv_caches: one tensor ``[blocks, 1, block_size, width]`` per layer.
        pool: the host memory behind the latents; whoever keeps the placement closes it.
        parts: which layers are where.
        arena: ``[latent caches, rows, slot bytes]`` uint8, the selection cache on the device; each slot begins with a
            row and ends with a cache line.
        index_bytes: device bytes of the index keys, as allocated.
    """

    kv_caches: dict[str, torch.Tensor]
    pool: MemoryRegion
    parts: CacheSplit
    arena: torch.Tensor
    index_bytes: int


def allocate(
    kv_cache_config: KVCacheConfig, pool_bytes: int, open_pool: Callable[[int], MemoryRegion], arena_rows: int
) -> KvPlacement:
    """Open the pool and lay the caches out.

    Args:
        kv_cache_config: vLLM's configuration; its number of blocks holds for every layer.
        pool_bytes: the configured size of the pool.
        open_pool: opens host memory of a length in bytes.
        arena_rows: rows of the selection cache in each layer.

    Raises:
        ConfigError: the latents of the blocks exceed the pool (vLLM was told a number of blocks by hand), or the layers
            have more than one block table.
        PoolExhausted: the memory cannot be had.
    """
    groups = len(kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise ConfigError(f"offload needs one block table for all layers; vLLM made {groups} groups of caches")
    specs = layer_specs(kv_cache_config)
    parts = split(specs)
    blocks = kv_cache_config.num_blocks
    needed = blocks * parts.latent_block_bytes
    if needed > pool_bytes:
        raise ConfigError(
            f"{blocks} KV blocks need {needed} bytes of host pool, pool.bytes is {pool_bytes}; raise "
            "pool.bytes or drop --num-gpu-blocks-override"
        )
    pool = open_pool(needed)
    host = torch.frombuffer(pool.buffer, dtype=torch.uint8)
    device = torch.zeros(blocks * parts.index_block_bytes, dtype=torch.uint8)
    caches = carve(host, parts.latent, specs, blocks) | carve(device, parts.index, specs, blocks)
    arena = torch.zeros((len(parts.latent), arena_rows, slot_bytes(parts.latent_row_bytes)), dtype=torch.uint8)
    return KvPlacement(caches, pool, parts, arena, device.nbytes)


def layer_specs(kv_cache_config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """Return each layer's own cache spec, in vLLM's order."""
    found: dict[str, KVCacheSpec] = {}
    for group in kv_cache_config.kv_cache_groups:
        members = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            found[name] = group.kv_cache_spec if members is None else members[name]
    return found


def carve(
    memory: torch.Tensor, layers: Sequence[str], specs: dict[str, KVCacheSpec], blocks: int
) -> dict[str, torch.Tensor]:
    """View flat uint8 memory as one cache per layer, one layer after the other."""
    caches: dict[str, torch.Tensor] = {}
    offset = 0
    for name in layers:
        spec = cast("AttentionSpec", specs[name])  # a latent's or an index key's, as they were told apart
        length = blocks * spec.page_size_bytes
        part = memory[offset : offset + length].view(spec.dtype)
        caches[name] = part.view(blocks, 1, spec.block_size, -1)
        offset += length
    return caches
