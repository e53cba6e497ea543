# SPDX-License-Identifier: Apache-2.0
"""The definition of ``ops.resolve`` in numpy, and the words with which a batch is refused.

Takes what the public operator takes, changes the slot state and fills the buffers as every other implementation has
to, bit for bit. Keeps nothing; the thread that owns the state.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidal_connector.errors import PoolExhausted
from tidal_connector.ops.resolve_types import Counts, ResolveBuffers, SelectionBatch
from tidal_connector.ops.slots import Seats, SlotState

Int64 = npt.NDArray[np.int64]


class _Request(NamedTuple):
    """One request of a batch; ``chosen`` are its valid selected positions, distinct, in order of first occurrence."""

    seat: int
    start: int
    queries: int
    rows: Int64
    paged: int
    chosen: Int64


class _Moves(NamedTuple):
    """What a step does to one request: positions to fetch and their arena rows, rows of the new tokens and of all."""

    fetch: Int64
    into: Int64
    new: Int64
    row_of: Int64
    misses: int
    evictions: int


def resolve(state: SlotState, seats: Seats, batch: SelectionBatch, eager_rows: int, buffers: ResolveBuffers) -> Counts:
    """Do what the public operator says; the batch has passed ``check_batch``."""
    buffers.reserve(batch)
    slots = buffers.slots[: batch.selected.size].reshape(batch.selected.shape)
    written, miss_start = buffers.written, buffers.miss_start
    paged = batch.pages.shape[1] * batch.page_tokens
    fetched: list[tuple[Int64, Int64]] = []
    totals = Counts(0, 0, 0, 0, 0, 0)
    miss_start[0] = 0
    for index, seat in enumerate(batch.seat.tolist()):
        first, end = batch.query_start[index : index + 2].tolist()
        start, selected = int(batch.start[index]), batch.selected[first:end].astype(np.int64)
        limit = np.minimum(start + 1 + np.arange(end - first), paged)[:, np.newaxis]
        valid = (selected >= 0) & (selected < limit)
        request = _Request(seat, start, end - first, seats.rows(seat), paged, _distinct(selected[valid]))
        listed = state.listed[seat] or start + request.queries > len(request.rows)
        moves = _listed(state, request) if listed else _in_place(state, request, eager_rows)
        slots[first:end] = np.where(valid, moves.row_of[np.where(valid, selected, 0)], -1)
        written[first:end] = moves.new
        page, offset = np.divmod(moves.fetch, batch.page_tokens)
        fetched.append((batch.pages[index, page].astype(np.int64) * batch.page_tokens + offset, moves.into))
        miss_start[index + 1] = miss_start[index] + len(moves.fetch)
        totals = Counts(
            fetched=totals.fetched + len(moves.fetch),
            hits=totals.hits + len(request.chosen) - moves.misses,
            misses=totals.misses + moves.misses,
            loads=totals.loads + len(moves.fetch) - moves.misses,
            evictions=totals.evictions + moves.evictions,
            invalid=totals.invalid + int(np.count_nonzero(~valid & (selected != -1))),
        )
    buffers.reserve_misses(totals.fetched)
    for index, (rows, into) in enumerate(fetched):
        part = slice(miss_start[index], miss_start[index + 1])
        buffers.miss_rows[part], buffers.miss_slots[part] = rows, into
    return totals


def check_batch(state: SlotState, seats: Seats, batch: SelectionBatch) -> None:
    """Refuse what cannot be resolved, before anything changes.

    Raises:
        TypeError: an argument is no array of the demanded dtype.
        ValueError: shapes, strides, seats, extents or positions do not fit.
        PoolExhausted: a listed seat has fewer slots than the step may need.
    """
    _check_arrays(batch)
    if len(seats.capacity) != len(state.listed):
        raise ValueError(f"seats: {len(seats.capacity)}, expected {len(state.listed)} by the state")
    total, width = batch.selected.shape
    counts = np.diff(batch.query_start.astype(np.int64))
    if (counts < 0).any() or batch.query_start[0] != 0 or batch.query_start[-1] != total:
        raise ValueError(f"query_start {batch.query_start.tolist()}: expected to rise from 0 to {total}")
    if len(set(batch.seat.tolist())) < len(batch.seat):
        raise ValueError(f"seat {batch.seat.tolist()}: expected each seat once in a batch")
    for index, seat in enumerate(batch.seat.tolist()):
        start, count = int(batch.start[index]), int(counts[index])
        if not 0 <= seat < len(seats.capacity):
            raise ValueError(f"seat[{index}] = {seat}: expected one in [0, {len(seats.capacity)})")
        if start < 0 or start + count >= 1 << 31:
            raise ValueError(f"start[{index}] = {start}: expected a position, with {count} queries below 2**31")
        capacity, extents = int(seats.capacity[seat]), seats.extents_of(seat)
        if extents.size and extents.max() >= len(state.held) // seats.extent_rows:
            raise ValueError(f"seat {seat}: extents {extents.tolist()} reach beyond the arena's {len(state.held)} rows")
        if state.listed[seat]:
            listed = state.order[seats.rows(seat)]
            if ((listed < 0) | (listed >= len(state.held))).any():
                raise ValueError(f"seat {seat}: its order is broken; was its capacity changed without a reset?")
        if (state.listed[seat] or start + count > capacity) and count * (width + 1) > capacity:
            raise PoolExhausted(
                f"seat {seat}: {count} queries that select {width} rows each need {count * (width + 1)} slots, it has "
                f"{capacity}; raise selection.slots"
            )


def _check_arrays(batch: SelectionBatch) -> None:
    fields = (("selected", 2), ("query_start", 1), ("seat", 1), ("start", 1), ("pages", 2))
    for name, ndim in fields:
        array = getattr(batch, name)
        if not isinstance(array, np.ndarray) or array.dtype != np.int32:
            kind = f"{array.dtype} array" if isinstance(array, np.ndarray) else type(array).__name__
            raise TypeError(f"{name}: expected a numpy array of int32, got {kind}")
        if array.ndim != ndim or (array.size > 1 and array.shape[-1] > 1 and array.strides[-1] != array.itemsize):
            raise ValueError(f"{name} {array.shape}: expected {ndim} dimensions, the last one contiguous")
    requests = len(batch.seat)
    if len(batch.query_start) != requests + 1 or len(batch.start) != requests or len(batch.pages) != requests:
        raise ValueError(
            f"query_start {batch.query_start.shape}, start {batch.start.shape}, pages {batch.pages.shape}: expected "
            f"{requests + 1}, {requests} and {requests} by seat {batch.seat.shape}"
        )
    if batch.page_tokens < 1:
        raise ValueError(f"page_tokens = {batch.page_tokens}: expected at least 1")


def _in_place(state: SlotState, request: _Request, eager_rows: int) -> _Moves:
    """Slot p is for position p."""
    seat, start, rows = request.seat, request.start, request.rows
    length = start + request.queries
    state.held[rows[state.length[seat] : start]] = -1  # a gap: rows of positions that came by without a step
    filled = min(int(state.filled[seat]), start)
    known = request.chosen[request.chosen < start]
    absent = known[state.held[rows[known]] < 0]
    fetch = absent
    if start <= eager_rows:
        below = np.arange(filled, min(start, request.paged))
        fetch = below[state.held[rows[below]] < 0]
        filled = max(filled, min(start, request.paged))
    state.held[rows[fetch]] = fetch
    state.held[rows[start:length]] = np.arange(start, length)
    state.filled[seat] = length if filled == start else filled
    state.length[seat] = length
    return _Moves(fetch, rows[fetch], rows[start:length], rows, len(absent), 0)


def _listed(state: SlotState, request: _Request) -> _Moves:
    """Any slot for any position, exact LRU."""
    seat, start, rows = request.seat, request.start, request.rows
    length = start + request.queries
    if not state.listed[seat]:
        state.held[rows[min(start, int(state.length[seat])) :]] = -1
        vacant = state.held[rows] < 0
        state.order[rows] = np.concatenate([rows[vacant], rows[~vacant]])
        state.listed[seat] = 1
        state.filled[seat] = 0
    order = state.order[rows].astype(np.int64)
    state.held[order[state.held[order] >= start]] = -1
    held = state.held[order]
    live = held >= 0
    row_of = np.full(length, -1)
    row_of[held[live]] = order[live]
    known = request.chosen[request.chosen < start]
    fetch = known[row_of[known] < 0]
    wanted = np.zeros(length + 1, np.bool_)
    wanted[known] = True
    hit = live & wanted[held]
    victims = np.concatenate([order[~live], order[live & ~hit]])
    taken = request.queries + len(fetch)
    new, into, rest = victims[: request.queries], victims[request.queries : taken], victims[taken:]
    row_of[start:] = new
    row_of[fetch] = into
    state.held[new] = np.arange(start, length)
    state.held[into] = fetch
    state.order[rows] = np.concatenate([rest, order[hit], into, new])
    state.length[seat] = length
    return _Moves(fetch, into, new, row_of, len(fetch), max(0, taken - int(np.count_nonzero(~live))))


def _distinct(positions: Int64) -> Int64:
    """Return each position once, in the order of first occurrence."""
    return np.array(list(dict.fromkeys(positions.tolist())), np.int64)
