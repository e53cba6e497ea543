# SPDX-License-Identifier: Apache-2.0
"""``resolve`` on the device: which selected rows are in their seats, which are fetched, which make room for them.

``ops.resolve`` is the definition; this is it for seats of equal, fixed capacity, in tensor operations of fixed shapes
whose results go into fixed buffers. The host reads nothing, so a graph captures it. Per request the cost is that of
sorting the slots and the selection once, whatever the context. Forward thread, on its current stream.

Only operators that run on the AI cores of Atlas A2 and A3 are used. There ``sort`` takes floats only, so positions are
sorted as float32, which is exact below :data:`POSITIONS`; ``cumsum`` takes int32 but not int64; ``searchsorted``,
``cummax`` and whatever yields shapes from data (``nonzero``, ``unique``, masks) run on the AI CPU or need the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tidal_connector.ops.npu.state import DeviceBatch, DeviceResolved, DeviceSlotState

POSITIONS = 1 << 24
"""Positions are below this, because float32 tells neighbours apart up to here."""


class _Requests(NamedTuple):
    """Seat (the spare one for padding) int32 ``[b]``; queries and first position of the step, int32 ``[b, 1]``."""

    seat: torch.Tensor
    queries: torch.Tensor
    start: torch.Tensor


class _Seats(NamedTuple):
    """``[b, c]``, in the order of last use: slots, positions, and whether the row there still counts."""

    slots: torch.Tensor
    positions: torch.Tensor
    live: torch.Tensor


class _Chosen(NamedTuple):
    """``[b, n]`` with n = queries * k: positions; valid ones, those older than the step, those written in it."""

    positions: torch.Tensor
    valid: torch.Tensor
    known: torch.Tensor
    fresh: torch.Tensor


class _Match(NamedTuple):
    """``representative`` int64 ``[b, n]``: place in the seat's list of a hit, else c + the entry where the position
    occurs first. ``hit`` bool ``[b, c]``, ``first`` int32 ``[b, n]`` (1 where a miss occurs first), ``fresh`` ``[b]``.
    """

    representative: torch.Tensor
    hit: torch.Tensor
    first: torch.Tensor
    fresh: torch.Tensor


def resolve(
    state: DeviceSlotState,
    batch: DeviceBatch,
    selected: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    page_tokens: int,
    out: DeviceResolved,
    counts: torch.Tensor,
) -> None:
    """Find the selected rows on the device and give the missing ones a place, for a whole batch.

    Rows selected or written in the step are never evicted by it. The longest unused make room, first for the new rows,
    then for the misses in the order of their first occurrence. Positions of the step, and from ``batch.stable`` on,
    count as not held. Padding rows change nothing but the spare seat.

    Args:
        state: of the index group; changed.
        batch: the step.
        selected: int32 ``[t, k]``, positions in any order; duplicates count once; -1: none.
        lengths: int32 ``[b or more]``, tokens of each request with those of this step; read where it has a seat.
        block_table: int32 ``[b or more, w]``, pages of each request in order of position.
        page_tokens: positions of a page.
        out: receives slots and fetch lists.
        counts: int32 ``[4]``, receives hits, misses, evictions and masked entries of the batch.

    Raises:
        TypeError: an argument is not int32.
        ValueError: shapes do not fit one another, or the seats are too small for a step.
    """
    _check(state, batch, selected, lengths, block_table, out)
    requests = _requests(state, batch, lengths)
    paged = block_table.shape[1] * page_tokens
    seats = _seats(state, batch, requests)
    chosen = _chosen(batch, requests, selected, paged)
    match = _match(seats, chosen, requests, batch.queries)
    rank = torch.cumsum(match.first, 1, dtype=torch.int32)  # of misses, from 1
    misses = rank[:, -1:]
    incoming = _incoming(chosen, match, rank, requests, batch.queries)
    places, evicted = _make_room(state, seats, match.hit, requests, misses, incoming)
    out.count[: batch.requests].copy_((requests.queries + misses).view(-1))
    _write_lists(out, batch, requests, incoming, places, block_table, page_tokens, paged, state.capacity)
    _write_slots(out, batch, seats, chosen, match, rank, requests, places, selected.shape[0])
    hits = match.hit.sum(dtype=torch.int32) + match.fresh
    masked = (~chosen.valid & (chosen.positions != -1)).sum(dtype=torch.int32)
    torch.stack((hits, misses.sum(dtype=torch.int32), evicted, masked), out=counts)


def _check(
    state: DeviceSlotState,
    batch: DeviceBatch,
    selected: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    out: DeviceResolved,
) -> None:
    for name, tensor, rank in (("selected", selected, 2), ("lengths", lengths, 1), ("block_table", block_table, 2)):
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name}: dtype {tensor.dtype}: expected int32")
        if tensor.dim() != rank:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}: expected {rank} dimensions")
    if not 1 <= selected.shape[0] <= batch.most_tokens or selected.shape[1] != out.top_k:
        raise ValueError(
            f"selected: shape {tuple(selected.shape)}: expected up to {batch.most_tokens} rows of {out.top_k} entries, "
            "the sizes that the buffers were made for"
        )
    for name, tensor in (("lengths", lengths), ("block_table", block_table)):
        if tensor.shape[0] < batch.requests:
            raise ValueError(f"{name}: {tensor.shape[0]} rows: expected {batch.requests}, one for each request")
    if state.capacity < batch.queries * (out.top_k + 1):
        raise ValueError(
            f"capacity = {state.capacity}: {batch.queries} queries that select {out.top_k} rows each need "
            f"{batch.queries * (out.top_k + 1)} slots; raise selection.slots"
        )


def _requests(state: DeviceSlotState, batch: DeviceBatch, lengths: torch.Tensor) -> _Requests:
    seat = batch.seat[: batch.requests]
    padding = seat < 0
    count = batch.count[: batch.requests]
    start = torch.where(padding, 0, lengths[: batch.requests] - count).clamp_(min=0)
    return _Requests(torch.where(padding, state.seats, seat), count.unsqueeze(1), start.unsqueeze(1))


def _seats(state: DeviceSlotState, batch: DeviceBatch, requests: _Requests) -> _Seats:
    owner = batch.owner[: batch.requests]
    kept = torch.where(state.owner.index_select(0, requests.seat) == owner, batch.stable[: batch.requests], 0)
    positions = state.positions.index_select(0, requests.seat)
    live = (positions >= 0) & (positions < torch.minimum(kept.unsqueeze(1), requests.start))
    state.owner.index_copy_(0, requests.seat.long(), owner)
    return _Seats(state.slots.index_select(0, requests.seat), positions, live)


def _chosen(batch: DeviceBatch, requests: _Requests, selected: torch.Tensor, paged: int) -> _Chosen:
    rows = batch.rows[: batch.requests * batch.queries]
    shape = (batch.requests, batch.queries, selected.shape[1])
    query = batch.steps[: batch.queries]
    mine = (query < requests.queries).unsqueeze(2)
    positions = torch.where(mine, selected.index_select(0, rows).view(shape), -1)
    limit = (requests.start + 1 + query).clamp_(max=paged).unsqueeze(2)
    valid = ((positions >= 0) & (positions < limit)).flatten(1)
    positions = positions.flatten(1)
    fresh = valid & (positions >= requests.start)
    return _Chosen(positions, valid, valid & ~fresh, fresh)


def _match(seats: _Seats, chosen: _Chosen, requests: _Requests, queries: int) -> _Match:
    """Sort held and selected positions together: entries of one position become neighbours, the held one first."""
    capacity, length = seats.live.shape[1], seats.live.shape[1] + chosen.known.shape[1]
    keys = torch.cat(
        (
            torch.where(seats.live, seats.positions, POSITIONS),
            torch.where(chosen.known, chosen.positions, POSITIONS),
        ),
        1,
    )
    ordered, origin = torch.sort(keys.float(), dim=1, stable=True)
    begins = torch.nn.functional.pad((ordered[:, 1:] != ordered[:, :-1]).int(), (1, 0), value=1)
    run = torch.cumsum(begins, 1, dtype=torch.int32) - 1
    first_of_run = keys.new_zeros((keys.shape[0], length + 1))
    first_of_run.scatter_(1, torch.where(begins > 0, run, length).long(), origin.int())
    run_of = torch.zeros_like(keys).scatter_(1, origin, run)
    representative = first_of_run.gather(1, run_of[:, capacity:].long()).long()
    # One mark for each row that is wanted: a held one, one that is missing, one that this step writes.
    marks = keys.new_zeros((keys.shape[0], length + queries + 1))
    written = length + chosen.positions - requests.start
    marks.scatter_(
        1,
        torch.where(chosen.known, representative, torch.where(chosen.fresh, written, length + queries).long()),
        1,
    )
    return _Match(
        representative,
        marks[:, :capacity] > 0,
        marks[:, capacity:length],
        marks[:, length : length + queries].sum(dtype=torch.int32),
    )


def _incoming(chosen: _Chosen, match: _Match, rank: torch.Tensor, requests: _Requests, queries: int) -> torch.Tensor:
    """Return int32 ``[b, queries + n]``: positions that come into the seat, new ones first, then the misses."""
    width = queries + chosen.positions.shape[1]
    at = torch.where(match.first > 0, requests.queries + rank - 1, width).long()
    positions = rank.new_zeros((rank.shape[0], width + 1))
    positions.scatter_(1, at, chosen.positions)
    query = torch.arange(width, dtype=torch.int32, device=positions.device)
    return torch.where(query < requests.queries, requests.start + query, positions[:, :width])


def _make_room(
    state: DeviceSlotState,
    seats: _Seats,
    hit: torch.Tensor,
    requests: _Requests,
    misses: torch.Tensor,
    incoming: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give what comes in the slots of what has been unused for longest, and write the lists of the seats anew.

    The new list is what stays unused, the hits in their old order, the misses, the new rows.

    Returns:
        int32 ``[b, width + 1]``, the slot of each incoming position; int32 ``[]``, rows that were evicted.
    """
    capacity, width = seats.live.shape[1], incoming.shape[1]
    empty = (~seats.live).int()
    empties, idles, hits = (
        torch.cumsum(flags, 1, dtype=torch.int32) for flags in (empty, (seats.live & ~hit).int(), hit.int())
    )
    taken = requests.queries + misses
    victim = torch.where(empty > 0, empties, empties[:, -1:] + idles) - 1
    stays = hit | (victim >= taken)
    to = torch.where(victim >= taken, victim - taken, capacity - taken - requests.queries + victim)
    to = torch.where(victim < requests.queries, capacity - requests.queries + victim, to)
    to = torch.where(hit, capacity - taken - hits[:, -1:] + hits - 1, to).long()
    held = torch.where(seats.live, seats.positions, -1)
    held = torch.where(stays, held, incoming.gather(1, victim.clamp(min=0, max=width - 1).long()))
    home = requests.seat.long()
    state.slots.index_copy_(0, home, torch.empty_like(seats.slots).scatter_(1, to, seats.slots))
    state.positions.index_copy_(0, home, torch.empty_like(held).scatter_(1, to, held))
    places = taken.new_zeros((taken.shape[0], width + 1))
    places.scatter_(1, torch.where(stays, width, victim).long(), seats.slots)
    return places, (taken - empties[:, -1:]).clamp_(min=0).sum(dtype=torch.int32)


def _write_lists(
    out: DeviceResolved,
    batch: DeviceBatch,
    requests: _Requests,
    incoming: torch.Tensor,
    places: torch.Tensor,
    block_table: torch.Tensor,
    page_tokens: int,
    paged: int,
    capacity: int,
) -> None:
    page = torch.div(incoming, page_tokens, rounding_mode="floor")
    pages = block_table[: batch.requests].gather(1, page.clamp(max=block_table.shape[1] - 1).long())
    pool = torch.where(incoming < paged, pages * page_tokens + (incoming - page * page_tokens), -1)
    arena = requests.seat.unsqueeze(1) * capacity + places[:, :-1]
    rows, slots = out.fetch(batch.requests, batch.queries)
    rows.copy_(pool)
    slots.copy_(arena)
    new_rows, new_slots = out.new(batch.requests, batch.queries)
    new_rows.copy_(pool[:, : batch.queries])
    new_slots.copy_(arena[:, : batch.queries])


def _write_slots(
    out: DeviceResolved,
    batch: DeviceBatch,
    seats: _Seats,
    chosen: _Chosen,
    match: _Match,
    rank: torch.Tensor,
    requests: _Requests,
    places: torch.Tensor,
    tokens: int,
) -> None:
    capacity, entries = seats.slots.shape[1], chosen.positions.shape[1]
    entry = (match.representative - capacity).clamp(min=0)
    missed = capacity + requests.queries + rank.gather(1, entry) - 1
    pick = torch.where(match.representative < capacity, match.representative, missed.long())
    pick = torch.where(chosen.fresh, (capacity + chosen.positions - requests.start).long(), pick)
    pick = torch.where(chosen.valid, pick, 0)
    slots = torch.where(chosen.valid, torch.cat((seats.slots, places), 1).gather(1, pick), -1)
    place = batch.place[:tokens]
    slots = slots.view(batch.requests * batch.queries, entries // batch.queries)
    slots = slots.index_select(0, place.clamp(min=0, max=slots.shape[0] - 1))
    out.slots[:tokens].copy_(torch.where((place >= 0).unsqueeze(1), slots, -1))
