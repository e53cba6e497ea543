# SPDX-License-Identifier: Apache-2.0
"""How the caches of vllm-ascend 0.23 divide into latents and what stays on the device, and how memory is divided.

A layer's spec covers all its tensors; the latents of the model's own layers go to the host pool, index keys (with
their scales) stay on the device, and so do the latents of a draft model's layers, one of some sixty, which would
otherwise need a selection cache of their own. Reads specs; decides nothing about addresses (see
:mod:`.kv_allocation`). Called in the worker at start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec

from tidal_connector.config import Offload, TidalConfig
from tidal_connector.errors import ConfigError
from tidal_connector.layout import blocks_within
from tidal_connector.log import get_logger
from tidal_connector.selection.budget import MemoryPlan, ModelCosts
from tidal_connector.vllm_plugin.offload_plan import CacheSplit, say_division
from tidal_connector.vllm_plugin.translate import layer_index

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec

_log = get_logger(__name__)

SLOT_UNIT = 128
"""A seat's slots are whole pages of the attention kernel."""

STATE_BYTES = 8
"""What residency takes for a slot in each group of layers: the position that it holds and the step of its last use."""


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes of one token in one layer.

    Attributes:
        nope: latents without rope.
        rope: their rope part.
        index: index keys; 0 where the layer has no indexer.
        scale: their scales; 0 where they are not quantised.
    """

    nope: int
    rope: int
    index: int
    scale: int

    @property
    def latent(self) -> int:
        """Bytes of the latents."""
        return self.nope + self.rope

    @property
    def device(self) -> int:
        """Bytes of what always stays on the device."""
        return self.index + self.scale


@dataclass(frozen=True, slots=True)
class NpuCaches:
    """A model's caches.

    Attributes:
        parts: which layers' latents are in the host pool, which have index keys, and what a block costs in either
            memory.
        rows: bytes of one token by layer, in the model's order, draft layers included.
    """

    parts: CacheSplit
    rows: Mapping[str, RowBytes]


def split(specs: Mapping[str, KVCacheSpec], draft: Collection[str]) -> NpuCaches:
    """Say what of each layer goes where.

    Args:
        specs: the layers' specs.
        draft: layers of a draft model, whose latents stay on the device.

    Raises:
        ConfigError: a cache is no latent cache of a known form, or pages differ in their number of tokens.
    """
    rows = {name: _row_bytes(name, specs[name]) for name in sorted(specs, key=layer_index)}
    latent = tuple(name for name in rows if name not in draft)
    index = tuple(name for name in latent if rows[name].index)
    sizes = {spec.block_size for spec in specs.values()}
    if len(sizes) != 1 or not latent or not index:
        raise ConfigError(
            f"offload needs latents and index keys with one block size; found {len(latent)} layers, {len(index)} with "
            f"index keys, block sizes {sorted(sizes)}"
        )
    widths = sorted({rows[name].latent for name in latent})
    if len(widths) != 1:
        raise ConfigError(f"offload needs latent rows of one size in all layers; found rows of {widths} bytes")
    block_size = sizes.pop()
    hosted = block_size * len(latent) * widths[0]
    total = sum(spec.page_size_bytes for spec in specs.values())
    return NpuCaches(CacheSplit(latent, index, hosted, total - hosted, block_size), rows)


def _row_bytes(name: str, spec: KVCacheSpec) -> RowBytes:
    if not isinstance(spec, AscendMLAAttentionSpec) or spec.sparse_head_dim is None:
        raise ConfigError(f"{name}: offload takes caches of sparse attention, not {type(spec).__name__}")
    nope, rope, index = spec.sparse_head_dim
    size, quantised = spec.dtype.itemsize, spec.cache_sparse_li_c8
    found = RowBytes(
        nope * size,
        rope * size,
        index * (spec.c8_k_cache_dtype.itemsize if quantised else size),
        spec.c8_k_scale_cache_dtype.itemsize if quantised and index else 0,
    )
    # What we do not know of (packed latents, indexers replicated over ranks) shows in the size of a page.
    if spec.cache_sparse_sfa_c8 or spec.block_size * (found.latent + found.device) != spec.page_size_bytes:
        raise ConfigError(
            f"{name}: a page takes {spec.page_size_bytes} bytes, {spec.block_size} rows of {found.latent} bytes of "
            f'latents and {found.device} of index keys do not; set "offload": "off"'
        )
    return found


def divide(config: TidalConfig, parts: CacheSplit, model: ModelCosts, groups: int, device_bytes: int) -> MemoryPlan:
    """Divide the host pool and the device's KV budget, and log what came of it.

    Every request that may run at once has a seat, of slots that do not change: a graph is captured once and knows no
    request without one.

    Args:
        config: our settings.
        parts: the model's caches.
        model: what they cost.
        groups: groups of layers that share a selection.
        device_bytes: bytes that vLLM grants to KV on the device.

    Raises:
        ConfigError: not even one block fits, or the selection cache does not.
    """
    least = _whole(model.queries * (model.top_k + 1))
    wanted = max(least, _whole(config.selection.slots_for(model.top_k) + model.queries))
    width = model.slot_bytes + groups * STATE_BYTES
    share = config.selection.size
    if share is None:
        share = device_bytes // 2
    slots = min(wanted, share // (model.requests * width) // SLOT_UNIT * SLOT_UNIT)
    if slots < least:
        raise ConfigError(
            f"the selection cache: max_num_seqs = {model.requests} requests of at least {least} slots take "
            f"{model.requests * least * width} bytes, it may take {share}; lower --max-num-seqs, or raise "
            "selection.bytes or the device's KV budget"
        )
    rows = model.requests * slots
    arena = rows * width
    blocks = blocks_within(config.pool.size, model.latent_block_bytes, device_bytes - arena, model.index_block_bytes)
    plan = MemoryPlan(
        blocks=blocks,
        slots=slots,
        base_rows=slots,
        most_rows=slots,
        arena_rows=rows,
        arena_bytes=arena,
        index_bytes=blocks.blocks * model.index_block_bytes,
        requests=model.requests,
        block_size=model.block_size,
    )
    say_division(_log, config, parts, model, plan, device_bytes)
    if slots < wanted:
        _log.warning(
            "the selection cache gives a request %d slots where %d were wanted: raise the device's KV budget or "
            "selection.bytes, or lower max_num_seqs",
            slots,
            wanted,
        )
    if config.offload is Offload.ADAPTIVE:
        _log.warning('offload = "adaptive" is taken for "on": on Ascend a seat does not grow')
    return plan


def _whole(rows: int) -> int:
    return -(-rows // SLOT_UNIT) * SLOT_UNIT
