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

from tidal_connector.config import TidalConfig, log_level, offload_asked
from tidal_connector.errors import ConfigError
from tidal_connector.log import configure, get_logger
from tidal_connector.selection.budget import MemoryPlan, ModelCosts, divide_memory, slot_bytes
from tidal_connector.vllm_plugin.plugins import CONNECTOR
from tidal_connector.vllm_plugin.translate import settings

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
    config = settings(vllm_config)
    if not config.offloads(transfer.kv_role):
        return None
    if getattr(vllm_config.model_config.hf_config, "index_topk", None) is None:
        raise ConfigError(
            f'kv_connector_extra_config: offload = "{config.offload}" with kv_role {transfer.kv_role} keeps '
            f"the latents in host memory, which needs sparse attention; {vllm_config.model_config.model} has no "
            'index_topk: set "offload": "off"'
        )
    return config


def adopt_switch(vllm_config: VllmConfig) -> None:
    """Load the connector for a single engine with offload where the environment asks for it and nothing else does.

    ``VLLM_DSA_KV_OFFLOAD=1`` without ``--kv-transfer-config`` is how TidalCache was switched on.
    """
    from vllm.config import KVTransferConfig

    if vllm_config.kv_transfer_config is None and offload_asked() and vllm_config.model_config is not None:
        configure(log_level() or "INFO")  # the settings that say where to log exist only from here on
        _log.info("VLLM_DSA_KV_OFFLOAD=1 without --kv-transfer-config: TidalConnector is loaded with kv_role kv_both")
        vllm_config.kv_transfer_config = KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both")


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

    @property
    def latent_row_bytes(self) -> int:
        """Bytes of one token's row in one latent cache."""
        return self.latent_block_bytes // len(self.latent) // self.block_size


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
    if len(set(latent.values())) > 1:
        pages = sorted(set(latent.values()))
        raise ConfigError(f"offload needs latent rows of one size in all layers; found pages of {pages} bytes")
    if len(sizes) != 1 or not index or not latent:
        raise ConfigError(
            f"offload needs latents and index keys with one block size; found {len(latent)} latent caches, "
            f"{len(index)} index caches, block sizes {sorted(sizes)}"
        )
    return CacheSplit(tuple(latent), tuple(index), sum(latent.values()), sum(index.values()), next(iter(sizes)))


def costs(vllm_config: VllmConfig, parts: CacheSplit) -> ModelCosts:
    """Read from vLLM's configuration what a block, a row and a request cost."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    speculative = vllm_config.speculative_config
    return ModelCosts(
        top_k=int(model.hf_config.index_topk),
        queries=1 + (speculative.num_speculative_tokens or 0 if speculative is not None else 0),
        requests=scheduler.max_num_seqs,
        context=model.max_model_len,
        block_size=parts.block_size,
        latent_block_bytes=parts.latent_block_bytes,
        index_block_bytes=parts.index_block_bytes,
        slot_bytes=len(parts.latent) * slot_bytes(parts.latent_row_bytes),
    )


def divide(config: TidalConfig, parts: CacheSplit, model: ModelCosts, device_bytes: int) -> MemoryPlan:
    """Divide the host pool and the device's KV budget, and log what came of it.

    Args:
        config: our settings.
        parts: the model's caches.
        model: what they cost.
        device_bytes: bytes that vLLM grants to KV on the device.

    Raises:
        ConfigError: not even one block fits, or the settings of the selection cache contradict that budget.
    """
    plan = divide_memory(config, model, device_bytes)
    blocks, rows = plan.blocks, parts.block_size * len(parts.latent)
    _log.info(
        "latents in host memory: device KV is %.1f bytes per token and layer, %.1f without offload",
        parts.index_block_bytes / rows,
        (parts.index_block_bytes + parts.latent_block_bytes) / rows,
    )
    _log.info(
        "KV blocks of %d tokens: the host pool of %d bytes holds %d, what the selection cache leaves of the device "
        "budget of %d bytes holds %d; %d are used, the %s binds",
        parts.block_size,
        config.pool.size,
        blocks.pool_blocks,
        device_bytes,
        blocks.device_blocks,
        blocks.blocks,
        blocks.limit,
    )
    _log.info(
        "selection cache: %d bytes on the device, %d rows in each layer, %d slots for a request of %s; "
        "requests at once: %s",
        plan.arena_bytes,
        plan.arena_rows,
        plan.slots,
        "any length" if plan.most_rows == plan.base_rows else f"any length, up to {plan.most_rows} while there is room",
        ", ".join(f"{plan.concurrent(n)} of {n} tokens" for n in _examples(plan.slots, model.context)),
    )
    if plan.arena_rows < plan.base_rows * plan.requests:
        _log.warning(
            "the selection cache holds %d of max_num_seqs = %d requests; further ones fetch all that they select at "
            "each step: raise the device's KV budget or selection.bytes, or lower max_num_seqs or selection.slots",
            plan.arena_rows // plan.base_rows,
            plan.requests,
        )
    return plan


def _examples(slots: int, context: int) -> list[int]:
    """Return contexts for which the log says how many requests fit: 16 times the slots, and the longest."""
    return sorted({min(16 * slots, context), context})
