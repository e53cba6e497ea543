# SPDX-License-Identifier: Apache-2.0
"""How many requests fit, and which limit ends it. Pure: questions in, structs out.

Every formula has one home, and it is not here: blocks are ``layout.blocks_within`` (design D2), the division of the
device's budget into index keys and slots is ``selection.budget.divide_memory``, bytes per token are sums of
``layout.KVLayout``, and the gain of the layout is ``bench.capacity_report.layout_bound``. This file asks them with a
model's true sizes, in rows (a row is a token, or four with DeepSeek-V4).
"""

from __future__ import annotations

import enum
import functools

import msgspec

from tidal_connector.cli.bench.capacity_report import layout_bound
from tidal_connector.cli.plan.models import ModelKv
from tidal_connector.config import Offload, PoolConfig, SelectionConfig, TidalConfig
from tidal_connector.errors import ConfigError
from tidal_connector.layout import KVLayout, RegionKind
from tidal_connector.selection.budget import MemoryPlan, ModelCosts, divide_memory, slot_bytes

_MOST_REQUESTS = 1 << 30
_DENSE_RATIO = 128  # tokens per row of V4's dense compressed layers


def _layout(model: ModelKv, latent_format: str, index_format: str, queries: int) -> KVLayout:
    return (model.with_draft_layer() if queries > 1 else model).layout(latent_format, index_format)


@functools.lru_cache(maxsize=64)  # asked thousands of times for one plan, and a sum over a hundred regions
def _row_bytes(model: ModelKv, latent_format: str, index_format: str, queries: int, kind: RegionKind) -> int:
    return _layout(model, latent_format, index_format, queries).row_bytes(kind)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked.

    Attributes:
        model: geometry.
        latent_format, index_format: of the cached rows.
        hbm, weights: bytes of device memory, and of it what the weights take.
        utilization: share of the device's memory that vLLM uses.
        dram: bytes of the host's memory.
        dram_share: share of it that pools may take.
        engines: decode engines on that host; each gets an equal part of the memory and of its bandwidth.
        context, concurrency: tokens of a request, and requests at once on one engine.
        block_size: tokens per KV block.
        slots: rows of a request's selection cache; None: twice top-k.
        queries: tokens that a request computes per step (1, or 1 + draft tokens).
        hit_rate: share of the selected rows that are in the selection cache already.
        tpot_s: longest time per output token that is wanted.
        link, memory: bytes per second from host to device, and of the host's memory (all engines together).
    """

    model: ModelKv
    latent_format: str
    index_format: str
    hbm: int
    weights: int
    utilization: float
    dram: int
    dram_share: float
    engines: int
    context: int
    concurrency: int
    block_size: int
    slots: int | None
    queries: int
    hit_rate: float
    tpot_s: float
    link: float
    memory: float

    @property
    def layout(self) -> KVLayout:
        """The layout of the rows, with the draft layer where tokens are drafted."""
        return _layout(self.model, self.latent_format, self.index_format, self.queries)

    @property
    def row_bytes(self) -> int:
        """Bytes of one latent row over all layers: ``KVLayout.row_bytes``."""
        return _row_bytes(self.model, self.latent_format, self.index_format, self.queries, RegionKind.LATENT)

    @property
    def index_row_bytes(self) -> int:
        """Bytes of one index key over all layers that have one: ``KVLayout.row_bytes``."""
        return _row_bytes(self.model, self.latent_format, self.index_format, self.queries, RegionKind.INDEX)

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return self.block_size // self.model.row_tokens

    @property
    def latent_block(self) -> int:
        """Bytes of a block's latents over all layers."""
        return self.block_rows * self.row_bytes

    @property
    def device_block(self) -> int:
        """Bytes that a block takes on the device although latents are in the pool: index keys, and V4's dense rows."""
        dense = self.model.dense_layers * self.model.latent_bytes(self.latent_format) if self.model.dense_layers else 0
        return self.block_rows * self.index_row_bytes + dense * self.block_size // _DENSE_RATIO

    @property
    def window_bytes(self) -> int:
        """Bytes of a request's sliding windows on the device, whatever its length (V4)."""
        return self.model.window_layers * self.model.window * self.model.latent_bytes(self.latent_format)

    @property
    def budget(self) -> int:
        """Bytes that vLLM grants to KV on the device: memory x utilization, less the weights.

        Raises:
            ConfigError: nothing is left.
        """
        left = int(self.hbm * self.utilization) - self.weights
        if left <= 0:
            raise ConfigError(
                f"--hbm {self.hbm} x --utilization {self.utilization:g} less --weights {self.weights} leaves nothing "
                "for KV; expected weights of one device, not of the whole model"
            )
        return left

    @property
    def addressed(self) -> int:
        """Bytes of latents whose index keys the device could hold: a larger pool is of no use."""
        return self.budget // self.device_block * self.latent_block

    @property
    def pool_room(self) -> int:
        """Bytes that one engine's pool may take."""
        return int(self.dram * self.dram_share) // self.engines

    def blocks_of(self, context: int) -> int:
        """Return the blocks of a request."""
        return -(-context // self.block_size)

    def rows_of(self, context: int) -> int:
        """Return the rows of a request, the last one counted whole."""
        return -(-context // self.model.row_tokens)

    def selected(self) -> int:
        """Return the rows that a request selects in a step and layer at most."""
        return self.model.top_k * self.queries

    def slot_rows(self) -> int:
        """Return the slots of a request in each layer: ``SelectionConfig.slots_for``.

        Raises:
            ConfigError: fewer than top-k.
        """
        return SelectionConfig(slots=self.slots).slots_for(self.model.top_k)


class Limit(enum.StrEnum):
    """What ends the number of requests."""

    POOL = "host pool"
    INDEX = "index keys"
    SLOTS = "slots"
    COPYING = "copying"
    ASKED = "nothing"


class Room(msgspec.Struct, frozen=True):
    """How many requests of one length run at once, by each limit.

    Attributes:
        context: tokens of each request.
        pool: by the host pool's blocks.
        device: by the device's budget for index keys and slots.
        copying: by the bandwidth, at the hit rate and time per token asked for; None: a request that fits into its
            slots copies nothing.
        fit: the smallest of these.
        binds: which one that is; of the device, the larger part of what it holds.
        off: with all KV on the device instead.
        ratio: fit over off; None where off is 0.
        bound: ``bench.capacity_report.layout_bound``: what the rows' sizes alone allow, without pool and bandwidth.
    """

    context: int
    pool: int
    device: int
    copying: int | None
    fit: int
    binds: Limit
    off: int
    ratio: float | None
    bound: float


def room_for(question: Question, context: int) -> Room:
    """Return how many requests of a length run at once.

    Raises:
        ConfigError: not even one block fits, or a setting is out of range.
    """
    blocks = question.blocks_of(context)
    pool = question.pool_room // question.latent_block // blocks
    device = most_on_device(question, context)
    copying = most_by_copying(question, context)
    off_block = question.latent_block + question.device_block
    off = question.budget // (off_block * blocks + question.window_bytes)
    known = {Limit.POOL: pool, _larger_part(question, context): device}
    if copying is not None:
        known[Limit.COPYING] = copying
    fit = min(known.values())
    rows = question.rows_of(context)
    return Room(
        context=context,
        pool=pool,
        device=device,
        copying=copying,
        fit=fit,
        binds=next(limit for limit, value in known.items() if value == fit),
        off=off,
        ratio=fit / off if off else None,
        bound=layout_bound(
            question.row_bytes,
            question.device_block / question.block_rows,
            min(question.slot_rows(), rows),
            rows,
        ),
    )


def most_on_device(question: Question, context: int) -> int:
    """Return the largest number of requests for which :func:`divide` leaves a seat and index keys to each.

    The more requests, the more slots and the fewer blocks, so the answer is found by halving.
    """
    low, high = 0, 1
    while high < _MOST_REQUESTS and _fits(question, context, high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(question, context, middle) else (low, middle)
    return low


def most_by_copying(question: Question, context: int) -> int | None:
    """Return how many requests' missed rows can be copied within the time per token; None where none are missed."""
    each = step_bytes(question, context, question.hit_rate)
    return int(question.tpot_s * copy_speed(question) / each) if each else None


def step_bytes(question: Question, context: int, hit_rate: float) -> int:
    """Return the bytes that one request fetches per step: selected rows x share missed x row bytes of all layers.

    A request that fits into its slots was fetched once and misses nothing (``selection/README.md``, *in place*).
    """
    rows = question.rows_of(context)
    if rows <= question.slot_rows():
        return 0
    return round(min(question.selected(), rows) * (1 - hit_rate)) * question.row_bytes


GATHER_SHARE = 0.6
"""Of the slower of link and memory, what scattered rows reach; ``tidal bench gather`` measured 0.4 to 1 of memcpy."""


def copy_speed(question: Question) -> float:
    """Return the bytes per second at which one engine fetches scattered rows."""
    return GATHER_SHARE * min(question.link, question.memory / question.engines)


def seat_bytes(question: Question, context: int) -> int:
    """Return the device bytes of the slots of one request of a length, by :func:`divide` itself."""
    return divide(question, context, 1).arena_bytes


def divide(question: Question, context: int, requests: int) -> MemoryPlan:
    """Divide the device's budget as an engine with ``max_num_seqs`` requests and a pool that never binds would.

    Args:
        question: sizes and settings.
        context: tokens of a request, at most.
        requests: that run at once.

    Raises:
        ConfigError: it does not fit.
    """
    device = question.budget - requests * question.window_bytes
    row = question.model.latent_bytes(question.latent_format)  # in one layer
    costs = ModelCosts(
        top_k=question.model.top_k,
        queries=question.queries,
        requests=requests,
        context=question.rows_of(context),
        block_size=question.block_rows,
        latent_block_bytes=question.latent_block,
        index_block_bytes=question.device_block,
        slot_bytes=question.row_bytes // row * slot_bytes(row),
    )
    config = TidalConfig(
        offload=Offload.ON,
        pool=PoolConfig(bytes=question.addressed),
        selection=SelectionConfig(slots=question.slots),
    )
    found = divide_memory(config, costs, device)
    if found.arena_rows >= requests * found.base_rows:
        return found
    # By default the slots take half of the budget at most; a larger share has to be asked for.
    selection = SelectionConfig(slots=question.slots, bytes=requests * found.base_rows * question.row_bytes)
    return divide_memory(msgspec.structs.replace(config, selection=selection), costs, device)


def _fits(question: Question, context: int, requests: int) -> bool:
    if requests * question.window_bytes >= question.budget:
        return False
    try:
        return divide(question, context, requests).concurrent(question.rows_of(context)) >= requests
    except ConfigError:
        return False


def _larger_part(question: Question, context: int) -> Limit:
    keys = question.blocks_of(context) * question.device_block
    return Limit.INDEX if keys >= seat_bytes(question, context) else Limit.SLOTS
