# SPDX-License-Identifier: Apache-2.0
"""The whole plan as one value: sizes, pool, limits, transfers, copying, and where one limit takes over from another.

Pure. ``capacity.py`` says how many requests fit; this file asks it along contexts and adds what follows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from tidal_connector.cli import hugepage_lines
from tidal_connector.cli.plan import capacity
from tidal_connector.cli.plan.capacity import Limit, Question, Room, room_for
from tidal_connector.memory.report import size_text

LINKS_GBIT = (10, 25, 100, 200, 400)
HIT_RATES = (0.0, 0.5, 0.7, 0.9, 0.95)
WIRE_SHARE = 0.9
"""Of a link's speed, what a push of merged pages reaches (design D5a: 0.9 of a plain socket)."""
DESCRIPTOR_S = 45e-6
"""Cost of a descriptor in Mooncake over TCP; it bounds a push whose pages lie scattered (README, *Measured*)."""

_CURVE_FROM, _CURVE_TO = 4096, 1 << 20
_ASCEND_POOL = 1 << 40


class FormatLine(msgspec.Struct, frozen=True):
    """What a row takes in one format.

    Attributes:
        latent_format: its name.
        latent_bytes, index_bytes: of one row in one layer.
        bytes_per_token: over all layers, both kinds.
        device_bytes_per_token: of these, what stays on the device with the pool.
        planned: whether this plan is made for it.
    """

    latent_format: str
    latent_bytes: int
    index_bytes: int
    bytes_per_token: float
    device_bytes_per_token: float
    planned: bool


class PoolPlan(msgspec.Struct, frozen=True):
    """The host pool.

    Attributes:
        bytes: what to set ``pool.bytes`` to: what the index keys of the device can address, or what the host gives.
        room: what the host gives to one engine.
        asked: what the requests that were asked for need at once.
        blocks: KV blocks that it holds.
        hugepages_2m, hugepages_1g: pages for the pools of all engines of the host.
        boot_line: for the kernel's command line.
        reserve_line: the same on a running machine.
    """

    bytes: int
    room: int
    asked: int
    blocks: int
    hugepages_2m: int
    hugepages_1g: int
    boot_line: str
    reserve_line: str


class DevicePlan(msgspec.Struct, frozen=True):
    """The device's KV budget, for the requests that fit.

    Attributes:
        budget: bytes for KV.
        requests: how many requests the division is made for.
        slots: rows of a request in each layer.
        seat_bytes: bytes of one request's slots over all layers.
        selection_bytes: of all requests' slots.
        index_bytes: of their index keys (and V4's dense rows).
        set_selection_bytes: whether ``selection.bytes`` has to be set, because the slots take more than half.
    """

    budget: int
    requests: int
    slots: int
    seat_bytes: int
    selection_bytes: int
    index_bytes: int
    set_selection_bytes: bool


class TransferLine(msgspec.Struct, frozen=True):
    """A link between prefill and decode: seconds for one context, and the prompt tokens per second that it carries."""

    gbit_per_s: int
    seconds: float
    tokens_per_s: float


class GatherLine(msgspec.Struct, frozen=True):
    """Copying at one hit rate.

    Attributes:
        hit_rate: share of selected rows that are on the device already.
        request_bytes: of one request per step.
        step_bytes: of all requests that run.
        bytes_per_s: that the time per token asked for needs.
        floor_s: least time per step, from copying alone.
        requests: most that stay within the time per token; None: no limit.
    """

    hit_rate: float
    request_bytes: int
    step_bytes: int
    bytes_per_s: float
    floor_s: float
    requests: int | None


class Knee(msgspec.Struct, frozen=True):
    """Where another limit takes over, to a block.

    Attributes:
        context: from which on the new limit binds.
        before, after: the limits.
        requests: that fit there.
        requests_before: that fit one block earlier.
    """

    context: int
    before: Limit
    after: Limit
    requests: int
    requests_before: int


class Plan(msgspec.Struct, frozen=True):
    """Everything.

    Attributes:
        fits: whether the requests that were asked for run at once.
        notes: what the reader should know, one line each.
        room: the limits at the context that was asked for.
        most: requests at once there: the smaller of what fits and what was asked for.
        first: what ends the number as it was asked for; ``nothing`` where all of them fit.
    """

    model: str
    layers: int
    groups: int
    top_k: int
    row_tokens: int
    context: int
    concurrency: int
    fits: bool
    first: Limit
    most: int
    formats: tuple[FormatLine, ...]
    pool: PoolPlan
    device: DevicePlan
    room: Room
    transfer_bytes: int
    descriptors: int
    descriptor_s: float
    transfers: tuple[TransferLine, ...]
    gather: tuple[GatherLine, ...]
    hit_rate: float
    tpot_s: float
    copy_speed: float
    knees: tuple[Knee, ...]
    curve: tuple[Room, ...]
    notes: tuple[str, ...]


def make_plan(question: Question) -> Plan:
    """Answer a question.

    Raises:
        ConfigError: not even one block fits, or a setting is out of range.
    """
    room = room_for(question, question.context)
    most = min(room.fit, question.concurrency)
    curve = tuple(room_for(question, context) for context in _contexts(question))
    pool, served = _pool(question), max(1, most)
    descriptors = len(question.layout.regions) * question.blocks_of(question.context)
    return Plan(
        model=question.model.name,
        layers=len(question.model.layers),
        groups=len(question.model.groups),
        top_k=question.model.top_k,
        row_tokens=question.model.row_tokens,
        context=question.context,
        concurrency=question.concurrency,
        fits=room.fit >= question.concurrency,
        first=Limit.ASKED if room.fit >= question.concurrency else room.binds,
        most=most,
        formats=_formats(question),
        pool=pool,
        device=_device(question, served),
        room=room,
        transfer_bytes=transfer_bytes(question),
        descriptors=descriptors,
        descriptor_s=descriptors * DESCRIPTOR_S,
        transfers=tuple(_transfer(question, link) for link in LINKS_GBIT),
        gather=tuple(_gather(question, rate, served) for rate in sorted({*HIT_RATES, question.hit_rate})),
        hit_rate=question.hit_rate,
        tpot_s=question.tpot_s,
        copy_speed=capacity.copy_speed(question),
        knees=_knees(question, curve),
        curve=curve,
        notes=tuple(_notes(question, pool, room, curve)),
    )


def transfer_bytes(question: Question) -> int:
    """Return what a hand-over moves: ``KVLayout.transfer_bytes`` of its rows, and what V4 keeps beside them."""
    dense = question.model.dense_layers and (question.blocks_of(question.context) * question.device_block)
    keys = question.blocks_of(question.context) * question.block_rows * question.index_row_bytes
    beside = dense - keys + question.window_bytes if dense else 0
    return question.layout.transfer_bytes(question.rows_of(question.context)) + beside


def _contexts(question: Question) -> list[int]:
    longest = max(question.context, question.model.positions or _CURVE_TO)
    found, context = {question.context}, _CURVE_FROM
    while context <= longest:
        found.add(context)
        context *= 2
    return sorted(found)


def _formats(question: Question) -> tuple[FormatLine, ...]:
    model, found = question.model, []
    for kind in model.formats():
        asked = msgspec.structs.replace(question, latent_format=kind)
        whole = (asked.latent_block + asked.device_block) / asked.block_size
        found.append(
            FormatLine(
                latent_format=kind,
                latent_bytes=model.latent_bytes(kind),
                index_bytes=model.index_bytes(question.index_format),
                bytes_per_token=whole,
                device_bytes_per_token=asked.device_block / asked.block_size,
                planned=kind == question.latent_format,
            )
        )
    return tuple(found)


def _pool(question: Question) -> PoolPlan:
    page = hugepage_lines.page_for(question.pool_room)
    wanted = min(question.pool_room // page * page, -(-question.addressed // page) * page)
    wanted = max(wanted, page)
    small = hugepage_lines.pages_for(wanted, hugepage_lines.TWO_MIB) * question.engines
    large = hugepage_lines.pages_for(wanted, hugepage_lines.ONE_GIB) * question.engines
    count = large if page == hugepage_lines.ONE_GIB else small
    return PoolPlan(
        bytes=wanted,
        room=question.pool_room,
        asked=question.concurrency * question.blocks_of(question.context) * question.latent_block,
        blocks=wanted // question.latent_block,
        hugepages_2m=small,
        hugepages_1g=large,
        boot_line=hugepage_lines.boot_line(count, page),
        reserve_line=hugepage_lines.reserve_now_line(count, page),
    )


def _device(question: Question, requests: int) -> DevicePlan:
    found = capacity.divide(question, question.context, requests)
    seats = found.arena_rows * question.row_bytes
    keys = requests * question.blocks_of(question.context) * question.device_block
    default = min(requests * found.base_rows * question.row_bytes, question.budget // 2)
    return DevicePlan(
        budget=question.budget,
        requests=requests,
        slots=found.slots,
        seat_bytes=capacity.seat_bytes(question, question.context),
        selection_bytes=seats,
        index_bytes=keys,
        set_selection_bytes=seats > default,
    )


def _transfer(question: Question, gbit: int) -> TransferLine:
    speed = gbit * 1e9 / 8 * WIRE_SHARE
    seconds = transfer_bytes(question) / speed
    return TransferLine(gbit, seconds, question.context / seconds)


def _gather(question: Question, hit_rate: float, requests: int) -> GatherLine:
    one = capacity.step_bytes(question, question.context, hit_rate)
    return GatherLine(
        hit_rate=hit_rate,
        request_bytes=one,
        step_bytes=one * requests,
        bytes_per_s=one * requests / question.tpot_s,
        floor_s=one * requests / capacity.copy_speed(question),
        requests=capacity.most_by_copying(msgspec.structs.replace(question, hit_rate=hit_rate), question.context),
    )


def _knees(question: Question, curve: Sequence[Room]) -> tuple[Knee, ...]:
    """Return where the binding limit changes between neighbours of the curve, found by halving to a block."""
    found = []
    for left, right in itertools.pairwise(curve):
        low, high = left, right
        while low.binds is not high.binds and high.context - low.context > question.block_size:
            middle = (low.context + high.context) // 2 // question.block_size * question.block_size
            between = room_for(question, max(middle, low.context + 1))
            low, high = (between, high) if between.binds is low.binds else (low, between)
        if low.binds is not high.binds:
            found.append(Knee(high.context, low.binds, high.binds, high.fit, low.fit))
    return tuple(found)


def _notes(question: Question, pool: PoolPlan, room: Room, curve: Sequence[Room]) -> list[str]:
    notes = []
    if question.weights == 0:
        notes.append("--weights was not given: all of the device's memory is counted for KV")
    if question.model.compressed:
        notes.append(
            "DeepSeek-V4: sizes as published, compressor states not counted; the connector does not serve it yet"
        )
    if room.fit < question.concurrency:
        notes.append(
            f"{question.concurrency} requests of {question.context:,} tokens do not fit: {room.fit} do, the limit is "
            f"{room.binds}. {_remedy(question, pool, room)}"
        )
    short = [each.context for each in curve if each.ratio is not None and each.ratio <= 1]
    if short:
        notes.append(
            f"up to {max(short):,} tokens the device alone holds as many requests (at {question.hit_rate:.0%} hits and "
            f'{question.tpot_s * 1e3:g} ms per token): offload = "adaptive" keeps short requests there'
        )
    if pool.bytes > _ASCEND_POOL:
        notes.append("Ascend registers at most 1 TB of host memory in a process (HDK 25.5.0 on; 20 GB before)")
    if question.slot_rows() == question.model.top_k:
        notes.append("slots equal to top-k leave no row from one step to the next: expect few hits")
    return notes


def _remedy(question: Question, pool: PoolPlan, room: Room) -> str:
    if room.binds is Limit.POOL:
        return f"A pool of {size_text(pool.asked)} would hold them, {size_text(pool.room)} are there."
    if room.binds is Limit.COPYING:
        return (
            "A longer time per token, a higher hit rate (more slots), a faster link or more engines would let them in."
        )
    if room.binds is Limit.SLOTS:
        return f"Fewer slots (at least {question.model.top_k}), or more device memory, would let them in."
    return "More device memory, shorter contexts or more engines would let them in."
