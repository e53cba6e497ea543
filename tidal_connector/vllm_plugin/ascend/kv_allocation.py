# SPDX-License-Identifier: Apache-2.0
"""Memory for the caches of an engine on an NPU whose latents live in the host pool.

Takes vLLM's KV cache configuration; hands on, for each layer, the raw tensors out of which vllm-ascend makes its
tuple, ``(latents, rope[, index keys[, scales]])`` as bytes. In the pool each layer has two contiguous ranges, first
its latents without rope, then their rope part, page by page, so that a block id is a page number in either. Called
once, on the worker's main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidal_connector.errors import ConfigError
from tidal_connector.vllm_plugin.ascend.offload import NpuCaches, RowBytes
from tidal_connector.vllm_plugin.ascend.pool import HostPool

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

Raw = tuple["torch.Tensor", ...]

ALIGNMENT = 2 << 20
"""Where vllm-ascend lets device tensors begin that are registered for transfers."""


@dataclass(frozen=True, slots=True)
class NpuPlacement:
    """Where the caches are.

    Attributes:
        raw: int8 tensors by layer, in the order in which vllm-ascend wants them.
        pool: the host memory behind the latents; whoever keeps the placement closes its region.
        addresses: by layer, where its latents and their rope part begin in host memory.
        device_bytes: what was taken on the device: index keys, their scales, and the latents of draft layers.
    """

    raw: dict[str, Raw]
    pool: HostPool
    addresses: dict[str, tuple[int, int]]
    device_bytes: int


def layer_specs(kv_cache_config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """Return each layer's own cache spec, in vLLM's order.

    Raises:
        ConfigError: the layers have more than one block table, so that a block id would not be a page number.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(f"offload needs one block table for all layers; vLLM made {len(groups)} groups of caches")
    spec = groups[0].kv_cache_spec
    members = getattr(spec, "kv_cache_specs", None)
    return {name: spec if members is None else members[name] for name in groups[0].layer_names}


def pool_ranges(caches: NpuCaches, blocks: int) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """Return, for each layer in the pool, (offset, length) of its latents without rope and of their rope part."""
    found = {}
    offset = 0
    for name in caches.parts.latent:
        row = caches.rows[name]
        nope, rope = (blocks * caches.parts.block_size * size for size in (row.nope, row.rope))
        found[name] = ((offset, nope), (offset + nope, rope))
        offset += nope + rope
    return found


def allocate(
    caches: NpuCaches,
    blocks: int,
    pool_bytes: int,
    open_pool: Callable[[int, Sequence[int]], HostPool],
    on_device: Callable[[int], torch.Tensor],
    with_scales: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]],
) -> NpuPlacement:
    """Open the pool and lay the caches out.

    Args:
        caches: what the layers hold.
        blocks: vLLM's number of blocks; it holds for every layer.
        pool_bytes: the configured size of the pool.
        open_pool: opens host memory, of a length and with the offsets at which tensors begin.
        on_device: allocates int8 ``[bytes]`` on the device.
        with_scales: allocates index keys and their scales, of so many bytes, in one piece on the device.

    Raises:
        ConfigError: the latents of the blocks exceed the pool (vLLM was told a number of blocks by hand).
        PoolExhausted: the memory cannot be had.
    """
    needed = blocks * caches.parts.latent_block_bytes
    if needed > pool_bytes:
        raise ConfigError(
            f"{blocks} KV blocks need {needed} bytes of host pool, pool.bytes is {pool_bytes}; raise pool.bytes or "
            "drop --num-gpu-blocks-override"
        )
    ranges = pool_ranges(caches, blocks)
    pool = open_pool(needed, [offset for pair in ranges.values() for offset, _ in pair])
    raw: dict[str, Raw] = {}
    taken = 0
    for name, row in caches.rows.items():
        tokens = blocks * caches.parts.block_size
        if name in ranges:
            latents: Raw = tuple(pool.view(offset, length) for offset, length in ranges[name])
        else:
            latents = (on_device(tokens * row.nope), on_device(tokens * row.rope))
            taken += tokens * row.latent
        raw[name] = latents + _index(row, tokens, on_device, with_scales)
        taken += tokens * row.device
    start = pool.region.address
    addresses = {name: (start + first[0], start + second[0]) for name, (first, second) in ranges.items()}
    return NpuPlacement(raw, pool, addresses, taken)


def _index(
    row: RowBytes,
    tokens: int,
    on_device: Callable[[int], torch.Tensor],
    with_scales: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]],
) -> Raw:
    if not row.index:
        return ()
    if not row.scale:
        return (on_device(tokens * row.index),)
    return with_scales(tokens * row.index, tokens * row.scale)
