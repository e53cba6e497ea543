# SPDX-License-Identifier: Apache-2.0
"""``resolve`` on the device: which selected rows are in their seats, which are fetched, which make room for them.

``ops.resolve`` is the definition; this is it for seats of equal, fixed capacity, in tensor operations of fixed shapes
whose results go into fixed buffers. The host reads nothing, so a graph captures it. Per request the cost is that of
sorting the slots and the selection once, whatever the context; what all groups of a pass share is computed once, by
``prepare``. Forward thread, on its current stream.

Only operators that run on the AI cores of Atlas A2 and A3 are used. There ``sort`` takes floats only, so positions are
floats, which are exact below ``POSITIONS``; ``cumsum`` takes int32 but not int64; ``searchsorted``, ``cummax`` and
whatever yields shapes from data (``nonzero``, ``unique``, masks) run on the AI CPU or need the host. Each operator
costs a launch of some microseconds, whatever its size, and each group pays it, so their number counts most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tidal_connector.ops.npu.state import POSITIONS, DeviceBatch, DeviceResolved, DeviceSlotState


class Pass(NamedTuple):
    """What all groups of a forward pass share; ``b`` requests with padding, ``q`` queries.

    Attributes:
        requests: b.
        queries: q.
        seat: int32 ``[b]``, the spare one for padding.
        home: int64 ``[b]``, the same.
        base: int32 ``[b, 1]``, first slot of the seat, of all.
        given: int32 ``[b, 1]``, queries of the request; q for padding.
        listed: int32 ``[b, 1]``, entries for new rows in its fetch list: q, or 0 for padding.
        limit: int32 ``[b, q, 1]``, positions that each query may select are below it; 0 for padding.
        stable: float32 ``[b, 1]``, positions that may be held are below it.
        new: float32 ``[b, q]``, positions that the step writes.
        new_rows: int32 ``[b, q]``, their rows in a pool; -1: none.
        none: int32 ``[b, 1]``, -1.
        order: int32 ``[c]``: 0, 1, 2...
        block_table: int32 ``[b, w]``.
        page_tokens: positions of a page.
    """

    requests: int
    queries: int
    seat: torch.Tensor
    home: torch.Tensor
    base: torch.Tensor
    given: torch.Tensor
    listed: torch.Tensor
    limit: torch.Tensor
    stable: torch.Tensor
    new: torch.Tensor
    new_rows: torch.Tensor
    none: torch.Tensor
    order: torch.Tensor
    block_table: torch.Tensor
    page_tokens: int


def prepare(
    batch: DeviceBatch, lengths: torch.Tensor, block_table: torch.Tensor, page_tokens: int, out: DeviceResolved
) -> Pass:
    """Work out what all groups share; once per pass, before the first ``resolve`` into ``out``.

    Args:
        batch: the step; its record of owners is brought up to date.
        lengths: int32 ``[b or more]``, tokens of each request with those of this step; read where it has a seat.
        block_table: int32 ``[b or more, w]``, pages of each request in order of position.
        page_tokens: positions of a page.
        out: where the plans of the pass go.

    Raises:
        TypeError: an argument is not int32.
        ValueError: shapes do not fit one another.
    """
    for name, tensor, rank in (("lengths", lengths, 1), ("block_table", block_table, 2)):
        _check_ints(name, tensor, rank)
        if tensor.shape[0] < batch.requests:
            raise ValueError(f"{name}: {tensor.shape[0]} rows: expected {batch.requests}, one for each request")
    requests, queries = batch.requests, batch.queries
    block_table = block_table[:requests]
    padding = batch.seat[:requests] < 0
    given = batch.count[:requests]
    seat = torch.where(padding, batch.seats, batch.seat[:requests])
    start = torch.where(padding, 0, lengths[:requests] - given).clamp_(min=0)
    owner = batch.owner[:requests]
    stable = torch.where(batch.owners.index_select(0, seat) == owner, torch.minimum(batch.stable[:requests], start), 0)
    home = seat.long()
    batch.owners.index_copy_(0, home, owner)
    query, paged = batch.steps[:queries], block_table.shape[1] * page_tokens
    mine = query < given.unsqueeze(1)
    position = start.unsqueeze(1) + query
    limit = torch.where(mine, (position + 1).clamp_(max=paged), 0)
    rows = _pool_rows(position.clamp(max=paged - 1), block_table, page_tokens)
    new_rows = torch.where(mine & (position < paged), rows, -1)
    new = torch.where(mine, position, POSITIONS).float()
    shared = Pass(
        requests,
        queries,
        seat,
        home,
        (seat * out.capacity).unsqueeze(1),
        torch.where(padding, queries, given).unsqueeze(1),
        torch.where(padding, 0, queries).int().unsqueeze(1),
        limit.unsqueeze(2),
        stable.float().unsqueeze(1),
        new,
        new_rows,
        torch.full_like(new_rows[:, :1], -1),
        torch.arange(out.capacity, dtype=torch.int32, device=seat.device),
        block_table,
        page_tokens,
    )
    out.fetch(requests, queries)[0][:, :queries].copy_(new_rows)
    out.incoming(requests, queries)[:, :queries].copy_(new)
    out.matching(requests, queries)[0][:, :1].fill_(1)
    return shared


def resolve(
    state: DeviceSlotState,
    batch: DeviceBatch,
    shared: Pass,
    selected: torch.Tensor,
    out: DeviceResolved,
    group: int = 0,
) -> torch.Tensor:
    """Find the selected rows on the device and give the missing ones a place, for a whole batch.

    Rows selected or written in the step are never evicted by it. The longest unused make room, first for the new rows,
    then for the misses in the order of their first occurrence. Positions of the step, and from ``batch.stable`` on,
    count as not held. Padding rows change nothing but the spare seat.

    Args:
        state: of the index group; changed.
        batch: the step.
        shared: what ``prepare`` made of it.
        selected: int32 ``[t, k]``, positions in any order; duplicates count once; -1: none.
        out: receives the fetch lists, and the statistics of ``group``.
        group: number of the index group.

    Returns:
        int32 ``[t, k]``: slot within the seat of each selected entry; -1: none, or beyond its query or the pages.

    Raises:
        TypeError: the selection is not int32.
        ValueError: its shape does not fit the buffers.
    """
    _check_ints("selected", selected, 2)
    if not 1 <= selected.shape[0] <= batch.most_tokens or selected.shape[1] != out.top_k:
        raise ValueError(
            f"selected: shape {tuple(selected.shape)}: expected up to {batch.most_tokens} rows of {out.top_k} entries, "
            "the sizes that the buffers were made for"
        )
    requests, queries, capacity = shared.requests, shared.queries, state.capacity
    width = queries * (out.top_k + 1)
    chosen, invalid = _chosen(batch, shared, selected)
    slots = state.slots.index_select(0, shared.seat)
    held = state.positions.index_select(0, shared.seat)
    dead = held >= shared.stable
    held = held.masked_fill(dead, POSITIONS)
    keys = chosen.float().masked_fill_(invalid, POSITIONS)
    found = _match(torch.cat((held, shared.new, keys), 1), out, shared, invalid)
    marks = out.matching(requests, queries)[3]
    marks.zero_().scatter_(1, found, 1)
    totals = torch.cumsum(marks[:, :-1], 1, dtype=torch.int32)
    there = totals[:, capacity + queries - 1 : capacity + queries]
    rank = totals[:, capacity + queries :] - there  # of misses, from 1
    misses = rank[:, -1:]
    first = marks[:, capacity + queries : -1]
    at = (rank + (queries - 1)).masked_fill_(first == 0, width).long()  # the place of a miss in the fetch list
    incoming = out.incoming(requests, queries)
    incoming.scatter_(1, at, keys)
    empties = _make_room(state, shared, slots, held, dead, marks[:, :capacity], totals[:, :capacity], misses, out)
    rows, arena = out.fetch(requests, queries)
    rows.scatter_(1, at, _pool_rows(chosen, shared.block_table, shared.page_tokens))
    places = out.places(requests, queries)
    torch.add(places, shared.base, out=arena)
    torch.add(misses, shared.listed, out=out.count[:requests].unsqueeze(1))
    # Numbered as in the match: a slot for each that is held, is new, or is missing; none for what is invalid.
    table = torch.cat((slots, places[:, :queries], places.gather(1, at), shared.none), 1)
    torch.gather(table, 1, found, out=out.table(requests * queries).view(requests, -1))
    statistics = out.statistics[group, :requests]
    statistics[:, :2].copy_(totals[:, capacity + queries - 1 :: queries * out.top_k])
    torch.sub(misses + shared.given, empties, out=statistics[:, 2:])
    found_slots = out.slots(selected.shape[0])
    return torch.index_select(out.whole_table, 0, batch.place[: selected.shape[0]], out=found_slots)


def _check_ints(name: str, tensor: torch.Tensor, rank: int) -> None:
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name}: dtype {tensor.dtype}: expected int32")
    if tensor.dim() != rank:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}: expected {rank} dimensions")


def _pool_rows(positions: torch.Tensor, block_table: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """Return the pool row of each position ``[b, n]``; all lie within the pages."""
    page = torch.div(positions, page_tokens, rounding_mode="floor")
    return (block_table.gather(1, page.long()) - page) * page_tokens + positions


def _chosen(batch: DeviceBatch, shared: Pass, selected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int32 and bool ``[b, q * k]``: what each request selects, 0 where that is invalid."""
    requests, queries = shared.requests, shared.queries
    chosen = selected.index_select(0, batch.rows[: requests * queries]).view(requests, queries, -1)
    invalid = ((chosen < 0) | (chosen >= shared.limit)).flatten(1)
    return chosen.flatten(1).masked_fill_(invalid, 0), invalid


def _match(keys: torch.Tensor, out: DeviceResolved, shared: Pass, invalid: torch.Tensor) -> torch.Tensor:
    """Say which of the slots, new rows and earlier entries has the position of each selected entry.

    All are sorted together. Equal positions then are neighbours, and the first of them is the one that counts: a slot
    that holds it, else the step's own row, else the entry where it occurs first.

    Returns:
        int64 ``[b, q * k]``: its number among all of them; their number where the entry is invalid.
    """
    entries, length = invalid.shape[1], keys.shape[1]
    ordered, origin = torch.sort(keys, dim=1, stable=True)
    begins, first, run_of, _ = out.matching(shared.requests, shared.queries)
    begins[:, 1:].copy_(ordered[:, 1:] != ordered[:, :-1])  # the first column is 1 always
    run = torch.cumsum(begins, 1, dtype=torch.int32)
    first.scatter_(1, (run * begins).long(), origin.int())  # to 0, which is no run, what does not begin one
    run_of.scatter_(1, origin, run)
    found = first.gather(1, run_of[:, length - entries :].long())
    return found.masked_fill_(invalid, length).long()


def _make_room(
    state: DeviceSlotState,
    shared: Pass,
    slots: torch.Tensor,
    held: torch.Tensor,
    dead: torch.Tensor,
    hit: torch.Tensor,
    hits: torch.Tensor,
    misses: torch.Tensor,
    out: DeviceResolved,
) -> torch.Tensor:
    """Give what comes in the slots of what has been unused for longest, and write the lists of the seats anew.

    Victims are numbered as the fetch list is: those of the new rows from 0, those of misses from ``queries`` on. The
    new list is what stays unused, the hits in their old order, the misses, the new rows.

    Args:
        state: changed.
        shared: of the pass.
        slots: int32 ``[b, c]``, the lists.
        held: float32 ``[b, c]``, positions, those that do not count left out.
        dead: bool ``[b, c]``, what holds nothing that counts.
        hit: int32 ``[b, c]``, 1 for what is selected.
        hits: int32 ``[b, c]``, their number up to each.
        misses: int32 ``[b, 1]``.
        out: receives the slots of what comes in (``places``).

    Returns:
        int32 ``[b, 1]``: slots that were empty.
    """
    capacity, queries = slots.shape[1], shared.queries
    vacant = torch.cumsum(dead.int(), 1, dtype=torch.int32)
    empties, all_hits = vacant[:, -1:], hits[:, -1:]
    # An entry is empty, hit or idle, so the idle ones up to each are what the other two leave.
    victim = torch.where(dead, vacant - 1, shared.order + empties - vacant - hits)
    if queries > 1:  # a request with fewer leaves a gap behind its new rows
        victim += (victim >= shared.given) * (queries - shared.given)
    taken = misses + queries
    stays = victim >= taken
    behind = torch.where(victim < queries, capacity - shared.given, capacity - shared.given - taken)
    to = victim + torch.where(stays, -taken, behind)
    chosen = hit > 0
    to = torch.where(chosen, hits + (capacity - 1 + queries - shared.given - taken - all_hits), to).long()
    stays |= chosen
    places = out.places(shared.requests, queries)
    into = victim.masked_fill_(stays, places.shape[1] - 1).long()
    places.scatter_(1, into, slots)
    incoming = out.incoming(shared.requests, queries).gather(1, into)
    held = torch.where(stays, held, incoming)
    state.slots.index_copy_(0, shared.home, torch.empty_like(slots).scatter_(1, to, slots))
    state.positions.index_copy_(0, shared.home, torch.empty_like(held).scatter_(1, to, held))
    return empties
