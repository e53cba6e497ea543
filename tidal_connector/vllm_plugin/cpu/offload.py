# SPDX-License-Identifier: Apache-2.0
"""Whether this engine keeps its latents in the host pool, and what that means for the number of blocks.

Reads vLLM's configuration and cache specs; decides nothing about addresses (see :mod:`.kv_allocation`).
Called while the configuration is built, in the front end, and again in the worker at start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

from tidal_connector.config import TidalConfig, load_config
from tidal_connector.errors import ConfigError
from tidal_connector.layout import BlockBudget, blocks_within
from tidal_connector.log import get_logger
from tidal_connector.vllm_plugin.plugins import CONNECTOR

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

_log = get_logger(__name__)


def resolve(vllm_config: VllmConfig) -> TidalConfig | None:
    """Return our settings if the latents of this engine live in the host pool, else None.

    Raises:
        ConfigError: the settings cannot be read, or offload is on for a model that selects no tokens.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        return None
    config = load_config(transfer.kv_connector_extra_config)
    if not config.offloads(transfer.kv_role):
        return None
    if getattr(vllm_config.model_config.hf_config, "index_topk", None) is None:
        raise ConfigError(
            f'kv_connector_extra_config: offload = "{config.offload}" with kv_role {transfer.kv_role} keeps '
            f"the latents in host memory, which needs sparse attention; {vllm_config.model_config.model} has no "
            'index_topk: set "offload": "off"'
        )
    return config


@dataclass(frozen=True, slots=True)
class CacheSplit:
    """A model's caches by what they hold.

    Attributes:
        latent: layer names of the latent caches, in the model's order.
        index: layer names of the index-key caches, in the model's order.
        latent_block_bytes: bytes of one block over all latent caches.
        index_block_bytes: bytes of one block over all index-key caches.
        block_size: tokens per block.
    """

    latent: tuple[str, ...]
    index: tuple[str, ...]
    latent_block_bytes: int
    index_block_bytes: int
    block_size: int


def split(specs: Mapping[str, KVCacheSpec]) -> CacheSplit:
    """Sort a model's caches into latents and index keys.

    Raises:
        ConfigError: a cache is neither, or pages differ in their number of tokens.
    """
    latent: dict[str, int] = {}
    index: dict[str, int] = {}
    for name, spec in specs.items():
        if not isinstance(spec, MLAAttentionSpec):
            raise ConfigError(f"{name}: offload takes MLA caches and their index keys, not {type(spec).__name__}")
        (index if spec.cache_role is SparseCacheRole.INDEXER else latent)[name] = spec.page_size_bytes
    sizes = {spec.block_size for spec in specs.values()}
    if len(sizes) != 1 or not index or not latent:
        raise ConfigError(
            f"offload needs latents and index keys with one block size; found {len(latent)} latent caches, "
            f"{len(index)} index caches, block sizes {sorted(sizes)}"
        )
    return CacheSplit(tuple(latent), tuple(index), sum(latent.values()), sum(index.values()), next(iter(sizes)))


def budget(config: TidalConfig, parts: CacheSplit, device_bytes: int) -> BlockBudget:
    """Say how many blocks fit into the host pool and the device budget, and log what binds.

    Args:
        config: our settings.
        parts: the model's caches.
        device_bytes: bytes that vLLM grants to KV on the device.

    Raises:
        ConfigError: not even one block fits.
    """
    blocks = blocks_within(config.pool.size, parts.latent_block_bytes, device_bytes, parts.index_block_bytes)
    rows = parts.block_size * len(parts.latent)
    _log.info(
        "latents in host memory: device KV is %.1f bytes per token and layer, %.1f without offload",
        parts.index_block_bytes / rows,
        (parts.index_block_bytes + parts.latent_block_bytes) / rows,
    )
    _log.info(
        "KV blocks of %d tokens: the host pool of %d bytes holds %d, the device budget of %d bytes holds %d; "
        "%d are used, the %s binds",
        parts.block_size,
        config.pool.size,
        blocks.pool_blocks,
        device_bytes,
        blocks.device_blocks,
        blocks.blocks,
        blocks.limit,
    )
    return blocks
