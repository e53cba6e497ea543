# SPDX-License-Identifier: Apache-2.0
"""How the memory of an engine with offload is divided: pool pages, index keys, selection cache. Pure.

The device's KV budget pays for index keys, which grow with the context, and for the selection cache, which does not: a
request costs ``index row x context + latent row x slots`` there, instead of ``(index row + latent row) x context``.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidal_connector.config import Offload, TidalConfig
from tidal_connector.errors import ConfigError
from tidal_connector.layout import BlockBudget, blocks_within

EXTENT_ROWS = 16
"""Rows by which seats grow. A request wastes half an extent on average; the free list stays short."""

LINE_BYTES = 64
"""A slot begins with a cache line: rows of 656 bytes are copied 5 to 9 % faster into slots of 704."""


def slot_bytes(row_bytes: int) -> int:
    """Return the bytes that one layer's row takes in its slot."""
    return -(-row_bytes // LINE_BYTES) * LINE_BYTES


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What the model and vLLM's settings say.

    Attributes:
        top_k: positions that a query selects at most.
        queries: tokens that a decoding request computes per step at most (1, or 1 + draft tokens).
        requests: requests that run at once at most (``max_num_seqs``).
        context: tokens of a request at most (``max_model_len``).
        block_size: tokens per block.
        latent_block_bytes: bytes of one block's latents over all layers.
        index_block_bytes: bytes of one block's index keys over all layers.
        slot_bytes: bytes of a slot over all layers (:func:`slot_bytes` of each).
    """

    top_k: int
    queries: int
    requests: int
    context: int
    block_size: int
    latent_block_bytes: int
    index_block_bytes: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The division.

    Attributes:
        blocks: KV blocks, and which memory limits them.
        slots: rows of one request's selection cache in each layer, as configured.
        base_rows: rows of a seat: the slots, and one for each token that a step computes, in whole extents; more where
            a step with draft tokens selects more than that.
        most_rows: rows up to which a seat may grow (adaptive), else ``base_rows``.
        arena_rows: rows of the selection cache in each layer.
        arena_bytes: bytes of the selection cache over all layers.
        index_bytes: bytes of the index keys over all layers.
        requests: requests that run at once at most.
        block_size: tokens per block.
    """

    blocks: BlockBudget
    slots: int
    base_rows: int
    most_rows: int
    arena_rows: int
    arena_bytes: int
    index_bytes: int
    requests: int
    block_size: int

    def concurrent(self, context: int) -> int:
        """Return how many requests of so many tokens run at once, each with a seat."""
        seat = min(_whole(context), self.base_rows)
        return min(self.requests, self.blocks.blocks // -(-context // self.block_size), self.arena_rows // seat)


def divide_memory(config: TidalConfig, model: ModelCosts, device_bytes: int) -> MemoryPlan:
    """Divide the device's KV budget and the pool.

    Args:
        config: our settings.
        model: what one block, row and request cost.
        device_bytes: bytes that vLLM grants to KV on the device.

    Raises:
        ConfigError: not even one block fits, ``selection.slots`` is below top-k, or ``selection.bytes`` leaves no room
            for index keys or is too small for one request.
    """
    slots = config.selection.slots_for(model.top_k)
    width = model.slot_bytes
    # Drafted tokens select for themselves: all that a step selects and writes has to fit at once.
    base = _whole(min(max(slots + model.queries, model.queries * (model.top_k + 1)), model.context))
    adaptive = config.offload is Offload.ADAPTIVE
    most = max(base, _whole(model.context)) if adaptive else base
    share = config.selection.size
    if share is None:
        share = min(model.requests * base * width, device_bytes // 2)
    else:
        _check_share(share, base * width, device_bytes, model.index_block_bytes)
    rows = min(share // width, model.requests * most) // EXTENT_ROWS * EXTENT_ROWS
    blocks = blocks_within(
        config.pool.size, model.latent_block_bytes, device_bytes - rows * width, model.index_block_bytes
    )
    index_bytes = blocks.blocks * model.index_block_bytes
    if adaptive and config.selection.bytes is None:
        left = (device_bytes - index_bytes) // width
        rows = min(left, model.requests * most) // EXTENT_ROWS * EXTENT_ROWS
    return MemoryPlan(blocks, slots, base, most, rows, rows * width, index_bytes, model.requests, model.block_size)


def _check_share(share: int, seat_bytes: int, device_bytes: int, index_block_bytes: int) -> None:
    if share < seat_bytes:
        raise ConfigError(
            f"selection.bytes = {share}: expected at least the {seat_bytes} bytes that one request takes; raise it, "
            "lower selection.slots, or leave it out"
        )
    if share + index_block_bytes > device_bytes:
        raise ConfigError(
            f"selection.bytes = {share}: the device's KV budget is {device_bytes} bytes and index keys need some of "
            "it; lower it or leave it out"
        )


def _whole(rows: int) -> int:
    return -(-rows // EXTENT_ROWS) * EXTENT_ROWS
