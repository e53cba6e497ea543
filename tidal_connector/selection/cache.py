# SPDX-License-Identifier: Apache-2.0
"""The selection cache: rooms 5 to 7 of the walk for the requests that decode. Forward thread, plus the copy stream.

Takes what the leader of an index group selected; hands on a slot table and, layer by layer, rows that are there. One
*arena* of rows per layer holds all requests' slots; residency is kept per request and index group
(:class:`~tidal_connector.ops.SlotState`: 8 bytes per slot), so that all layers of a group move in lockstep. As soon as
a leader's plan stands, the missing rows of all its layers are copied by the copy stream; each layer waits for its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tidal_connector import ops
from tidal_connector.log import get_logger
from tidal_connector.metrics import Counters
from tidal_connector.selection.groups import IndexGroup
from tidal_connector.selection.seats import SeatBook

Rows = npt.NDArray[np.uint8]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_log = get_logger(__name__)

WAIT_S = 60.0
"""Longest wait for a row copy; one that takes longer means that the copy stream is dead."""


@dataclass(slots=True)
class DecodeBatch:
    """The requests of one forward pass that have seats.

    Attributes:
        requests: their ids.
        query_start: ``[r + 1]`` int32, first query of each.
        seat: ``[r]`` int32.
        start: ``[r]`` int32, position of each request's first query.
        pages: ``[r, w]`` int32, pages of each in order of position.
        plans: by group, what was planned in this pass.
    """

    requests: tuple[str, ...]
    query_start: Int32
    seat: Int32
    start: Int32
    pages: Int32
    plans: dict[int, GroupPlan] = field(default_factory=dict)


@dataclass(slots=True)
class GroupPlan:
    """What a leader's selection means for each layer of its group.

    Attributes:
        resolved: slot table, misses and counts.
        ticket: of the leader's copy on the copy stream, the followers' come after it; 0 where each layer copies for
            itself.
    """

    resolved: ops.Resolved
    ticket: int


@dataclass(slots=True)
class _Group:
    layers: IndexGroup
    state: ops.SlotState
    buffers: ops.ResolveBuffers
    moves: ops.MoveSet
    names: str


class SelectionCache:
    """Device slots of all requests in all layers.

    Args:
        arena: ``[layers, rows, row_bytes]`` uint8, the slots.
        pools: per layer ``[rows, row_bytes]`` uint8, the host pool (or wherever the latents live).
        groups: which layers share a selection.
        extent_rows: rows that seats are made of.
        requests: requests that may hold a seat at once.
        top_k: positions that a query selects at most.
        base_rows: rows of a seat.
        most_rows: rows up to which a seat may grow (adaptive).
        eager_rows: contexts up to this are fetched whole at once.
        page_tokens: rows of a page of the pool.
        stream: copies rows.
        counters: what is counted into.
        threads: workers that plan and copy, at most.
        prefetch: copy on the stream, ahead of need.
    """

    def __init__(
        self,
        *,
        arena: Rows,
        pools: Sequence[Rows],
        groups: Sequence[IndexGroup],
        extent_rows: int,
        requests: int,
        top_k: int,
        base_rows: int,
        most_rows: int,
        eager_rows: int,
        page_tokens: int,
        stream: ops.CopyStream,
        counters: Counters,
        threads: int = 1,
        prefetch: bool = True,
    ) -> None:
        self._arena = arena
        self._pools = pools
        self._eager_rows = eager_rows
        self._page_tokens = page_tokens
        self._stream = stream
        self._counters = counters
        self._threads = threads
        self._prefetch = prefetch
        self._row_bytes = int(arena.shape[2])
        rows = int(arena.shape[1])
        self._groups = [
            _Group(
                group,
                ops.SlotState.empty(rows, requests),
                ops.ResolveBuffers(),
                stream.prepare([ops.Move(pools[layer], arena[layer]) for layer in group.members]),
                f"{group.members[0]}..{group.members[-1]}",
            )
            for group in groups
        ]
        self._place = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.members)}
        self.book = SeatBook(
            extents=rows // extent_rows,
            extent_rows=extent_rows,
            requests=requests,
            top_k=top_k,
            base_rows=base_rows,
            most_rows=most_rows,
            forget_rows=self._forget_rows,
            forget_seat=self._forget_seat,
        )

    def _forget_rows(self, rows: Int32) -> None:
        for group in self._groups:
            group.state.held[rows] = -1

    def _forget_seat(self, seat: int) -> None:
        for group in self._groups:
            group.state.reset(self.book.seats, seat)

    def leads(self, layer: int) -> bool:
        """Whether a layer selects for itself (and its followers)."""
        return self._place[layer][1] == 0

    def leader(self, layer: int) -> int:
        """Return the layer that selects for a layer."""
        return self._groups[self._place[layer][0]].layers.leader

    def rows(self, layer: int) -> Rows:
        """Return the slots of a layer, ``[rows, row_bytes]`` uint8."""
        rows: Rows = self._arena[layer]
        return rows

    def plan(self, layer: int, batch: DecodeBatch, selected: Int32) -> ops.Resolved:
        """Find hits, misses and victims of a leader's selection, once per pass, and send for the missing rows.

        Args:
            layer: a leader.
            batch: the pass.
            selected: ``[n, k]`` int32 positions, -1 for none, a row for each query of the batch.

        Returns:
            Where each selected row is or will be, and where the rows that this pass computes go.
        """
        at, _ = self._place[layer]
        known = batch.plans.get(at)
        if known is not None:
            return known.resolved
        group = self._groups[at]
        began = time.perf_counter()
        resolved = ops.resolve(
            group.state,
            self.book.seats,
            ops.SelectionBatch(selected, batch.query_start, batch.seat, batch.start, batch.pages, self._page_tokens),
            eager_rows=self._eager_rows,
            threads=self._threads,
            buffers=group.buffers,
        )
        self._counters.add("resolve_seconds", time.perf_counter() - began)
        ticket = 0
        if self._prefetch and len(resolved.miss_rows):
            moved = len(resolved.miss_rows) * len(group.layers.members) * self._row_bytes
            ticket = self._stream.submit(
                group.moves, resolved.miss_rows, resolved.miss_slots, wake=moved >= ops.WORTH_WAKING_BYTES
            )
        batch.plans[at] = GroupPlan(resolved, ticket)
        self._count(group, batch, resolved)
        return resolved

    def _count(self, group: _Group, batch: DecodeBatch, resolved: ops.Resolved) -> None:
        moved = len(resolved.miss_rows) * len(group.layers.members)
        add = self._counters.add
        add("selection_hits", resolved.hits)
        add("selection_misses", resolved.misses)
        add("selection_evictions", resolved.evictions)
        add("rows_gathered", moved)
        add("bytes_gathered", moved * self._row_bytes)
        if resolved.invalid:
            add("selection_invalid", resolved.invalid)
            _log.error(
                "layers %s: %d selected positions lie outside their request's context; attention is kept from them",
                group.names,
                resolved.invalid,
            )
        if _log.isEnabledFor(logging.DEBUG):
            starts = resolved.miss_start
            for index, request in enumerate(batch.requests):
                _log.debug(
                    "[GATHER] request %s layers %s: %d rows per layer to fetch",
                    request,
                    group.names,
                    starts[index + 1] - starts[index],
                )

    def arrive(self, layer: int, batch: DecodeBatch) -> None:
        """Return once the rows that a layer's plan fetches are in its slots.

        Raises:
            TransferFailed: they did not come within :data:`WAIT_S`.
        """
        at, member = self._place[layer]
        plan, group = batch.plans[at], self._groups[at]
        resolved = plan.resolved
        if not len(resolved.miss_rows):
            return
        began = time.perf_counter()
        if not plan.ticket:
            ops.copy_rows(
                self._pools[layer],
                resolved.miss_rows,
                self._arena[layer],
                resolved.miss_slots,
                threads=self._threads,
            )
            self._counters.add("gather_seconds", time.perf_counter() - began)
            return
        outcome = self._stream.wait(plan.ticket + member, WAIT_S)
        waited = time.perf_counter() - began
        self._counters.add("prefetch_wait_seconds", waited)
        if member:
            self._counters.add("prefetches")
            if outcome is ops.Waited.READY:
                self._counters.add("prefetch_bytes", len(resolved.miss_rows) * self._row_bytes)
            else:
                self._counters.add("prefetches_late")
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "[PREFETCH] layer %d of %s: %d rows, %s, waited %.0f us",
                layer,
                group.names,
                len(resolved.miss_rows),
                outcome.name.lower(),
                waited * 1e6,
            )

    def check(self) -> None:
        """Verify seats and residency.

        Raises:
            AssertionError: an invariant does not hold.
        """
        self.book.check()
        for group in self._groups:
            group.state.check(self.book.seats)
