# SPDX-License-Identifier: Apache-2.0
"""The selection cache of an accelerator: rooms 5 to 7 of the walk, decided and carried out on the device.

Takes what the leader of an index group selected; hands on, layer by layer, slots whose rows are there. The host decides
once per step which request sits where (``begin``); which rows are held, fetched and evicted is known on the device
alone, so no layer waits for the host, and a graph captures the whole pass. As soon as a leader's plan stands, the
missing rows of its group are copied on a side stream, and each layer waits for its own. The forward thread, whose
current stream is the one that attends. Needs torch; import it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tidal_connector.ops.npu.library import gather_miss_rows
from tidal_connector.ops.npu.resolve import Pass, prepare, resolve
from tidal_connector.ops.npu.staging import BatchStaging, StagedRequest
from tidal_connector.ops.npu.state import FOREVER, POSITIONS, DeviceBatch, DeviceResolved, DeviceSlotState
from tidal_connector.ops.npu.stream import SideStream
from tidal_connector.selection.device_seats import DeviceSeats
from tidal_connector.selection.device_types import PAGE_SLOTS, ArenaView, DeviceSizes, LatentPool
from tidal_connector.selection.groups import IndexGroup

__all__ = ["ArenaView", "DeviceSelection", "DeviceSizes", "LatentPool"]

GatherMissRows = Callable[..., None]


@dataclass(slots=True)
class _Step:
    """What ``begin`` was told, and how far the pass is.

    Attributes:
        requests: seated ones.
        tokens: rows of theirs.
        padded: requests with padding.
        begun: a plan was begun: from there on seats on the device may be the pass's own.
        shared: what the plans of the pass share; None before the first.
        planned: groups that have planned.
        group: the last of them.
        slots: its slot table.
        new_slots: arena rows of the step's own rows.
        awaited: its layers that have not arrived.
    """

    requests: int = 0
    tokens: int = 0
    padded: int = 0
    begun: bool = False
    shared: Pass | None = None
    planned: set[int] = field(default_factory=set)
    group: int | None = None
    slots: torch.Tensor | None = None
    new_slots: torch.Tensor | None = None
    awaited: set[int] = field(default_factory=set)


class DeviceSelection:
    """Device slots of all requests in all layers.

    Args:
        pools: of each layer, in the model's order.
        groups: which of these layers share a selection.
        sizes: the largest step.
        device: where the arena is, and everything else.
        gather: copies rows; ``torch.ops.tidal.gather_miss_rows`` unless a test brings its own.

    Attributes:
        seats: who sits where.
        counts: int32 ``[groups, 3]`` on the device: hits, misses and evictions of each group in the last whole pass.

    Raises:
        ValueError: pools and groups do not fit one another, or the sizes.
    """

    def __init__(
        self,
        *,
        pools: Sequence[tuple[torch.Tensor, torch.Tensor]],
        groups: Sequence[IndexGroup],
        sizes: DeviceSizes,
        device: torch.device,
        gather: GatherMissRows = gather_miss_rows,
    ) -> None:
        with torch.inference_mode(False):  # tensors made within it could not be written outside, where steps begin
            self._make(pools, groups, sizes, device, gather)

    def _make(
        self,
        pools: Sequence[tuple[torch.Tensor, torch.Tensor]],
        groups: Sequence[IndexGroup],
        sizes: DeviceSizes,
        device: torch.device,
        gather: GatherMissRows,
    ) -> None:
        members = [layer for group in groups for layer in group.members]
        if members != list(range(len(pools))):
            raise ValueError(
                f"groups of layers {[group.members for group in groups]}: expected the {len(pools)} pools in order, "
                "each in one group"
            )
        self._sizes = sizes
        self._gather = gather
        self._pools = [_paged(index, LatentPool(*pool), sizes.page_tokens) for index, pool in enumerate(pools)]
        self._arenas = [_arena(pool, sizes.seats * sizes.slots, device) for pool in self._pools]
        self._groups = tuple(groups)
        self._place = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.members)}
        self._states = [DeviceSlotState(sizes.seats, sizes.slots, device) for _ in groups]
        # A padded batch may have more requests than there are seats, but those that have one come first.
        requests = max(sizes.seats, sizes.tokens)
        self._batch = DeviceBatch(sizes.seats, sizes.seats, sizes.queries, sizes.tokens, device)
        self._resolved = DeviceResolved(self._batch, sizes.top_k, sizes.slots, len(groups), device)
        self._staging = BatchStaging(self._batch)
        self._side = SideStream(device)
        pages = sizes.slots // PAGE_SLOTS
        self._pages = torch.arange(pages, dtype=torch.int32, device=device)
        self._lengths = torch.full((requests,), sizes.slots, dtype=torch.int32, device=device)
        self._block_table = torch.zeros((requests, pages), dtype=torch.int32, device=device)
        self._step = _Step()
        self._passing: list[str] = []
        self.counts = torch.zeros((len(groups), 3), dtype=torch.int32, device=device)
        self.seats = DeviceSeats(seats=sizes.seats, slots=sizes.slots, top_k=sizes.top_k)

    # Host, once per step.

    def begin(
        self, requests: Sequence[str], queries: Sequence[int], *, padded_requests: int, most_queries: int
    ) -> None:
        """Seat the requests of the next forward pass, or of the next replay of a captured one.

        Rows of the selection are in the order of the requests; request ``i`` has ``queries[i]`` of them. Requests and
        rows beyond are padding, so a pass without requests (warm-up, capture, the step of an idle rank) is one of
        padding alone. Before each replay of a graph the two sizes have to be those of its capture.

        Args:
            requests: their ids.
            queries: tokens that each computes.
            padded_requests: requests of the batch with padding.
            most_queries: tokens that any of them computes at most.

        Raises:
            ValueError: the step is larger than the sizes allow.
            PoolExhausted: there is no seat for a request.
        """
        self._end_pass()
        sizes = self._sizes
        if not requests:  # warm-up may be larger than any step that is served
            padded_requests = min(padded_requests, self._block_table.shape[0])
            most_queries = min(most_queries, sizes.queries)
        sittings = [self.seats.sit(request, count) for request, count in zip(requests, queries, strict=True)]
        staged = [
            StagedRequest(sitting.seat, sitting.generation, sitting.stable, count)
            for sitting, count in zip(sittings, queries, strict=True)
        ]
        self._staging.fill(staged, min(padded_requests, sizes.seats), most_queries)
        first_page = self._batch.seat.clamp(min=0).unsqueeze(1) * self._pages.shape[0]
        self._block_table[: sizes.seats].copy_(first_page + self._pages)
        if any(sitting.stable < FOREVER for sitting in sittings):
            self._forget_beyond_stable()
        for request in requests:
            self.seats.served(request)
        self._step = _Step(len(staged), sum(queries), padded_requests)
        self._passing = list(requests)

    def _forget_beyond_stable(self) -> None:
        """Empty the slots of rows that were written past their seats, now: who knows whether the pass will run."""
        batch = self._batch
        home = torch.where(batch.seat < 0, batch.seats, batch.seat).long()
        stable = torch.full_like(batch.owners, FOREVER).index_copy_(0, home, batch.stable)
        stable = stable.clamp_(max=POSITIONS).float().unsqueeze(1)
        for state in self._states:
            state.positions.masked_fill_(state.positions >= stable, POSITIONS)

    def _end_pass(self) -> None:
        """Void the seats of a pass that failed between its first plan and its last layer: their groups do not agree."""
        step = self._step
        for layer in self._side.unjoined:
            self._side.join(layer)
        if step.begun and (step.awaited or len(step.planned) < len(self._groups)):
            for request in self._passing:
                self.seats.void(request)

    def elsewhere(self, request: str, start: int) -> None:
        """Note that a step computed a request's tokens from ``start`` on without its seat, on the pool alone.

        What its seat holds below ``start`` stays valid. ``start`` may be lower than the truth, never higher.
        """
        self.seats.elsewhere(request, start)

    def release(self, request: str) -> None:
        """Take a request's seat back: it ended or was preempted. Unknown requests are none."""
        self.seats.release(request)

    # Device, within the pass.

    def leads(self, layer: int) -> bool:
        """Whether a layer selects for itself (and its followers)."""
        return self._place[layer][1] == 0

    def plan(self, layer: int, selected: torch.Tensor, lengths: torch.Tensor, block_table: torch.Tensor) -> None:
        """Find hits, misses and victims of a leader's selection, and send for the missing rows of its group.

        The step's own rows of the leader have to be in its pool by now; those of followers need not.

        Args:
            layer: a leader.
            selected: int32 ``[t, k]`` or ``[t, 1, k]``, positions, -1 for none.
            lengths: int32, tokens of each request with those of this step. At least the seated requests.
            block_table: int32 ``[b, w]``, pages of each. At least the seated requests.

        Raises:
            ValueError: shapes do not fit the step, the layer is no leader, or a layer of the last plan never arrived.
        """
        at, member = self._place[layer]
        step, batch = self._step, self._batch
        if member:
            raise ValueError(f"layer {layer}: follows layer {self._groups[at].leader}, which plans for it")
        if step.awaited:
            raise ValueError(f"layer {layer}: plans before layers {sorted(step.awaited)} of the last plan arrived")
        selected = selected.flatten(1) if selected.dim() == 3 else selected
        # The tables of vllm-ascend's warm-up may have fewer rows than the padded batch; those are padding, too.
        batch.requests = min(step.padded, self._sizes.seats, lengths.shape[0], block_table.shape[0])
        if batch.requests < step.requests or selected.shape[0] < step.tokens:
            raise ValueError(
                f"selected {tuple(selected.shape)}, lengths {tuple(lengths.shape)}, block_table "
                f"{tuple(block_table.shape)}: expected {step.tokens} rows and {step.requests} requests by begin()"
            )
        resolved = self._resolved
        step.begun = True
        if step.shared is None:
            step.shared = prepare(batch, lengths, block_table, self._sizes.page_tokens, resolved)
        step.slots = resolve(self._states[at], batch, step.shared, selected, resolved, at)
        step.group = at
        step.planned.add(at)
        step.awaited.update(self._groups[at].members)
        self._send(self._groups[at], step.shared)
        if len(step.planned) == len(self._groups):
            hits, chosen, displaced = resolved.statistics[:, : step.shared.requests].unbind(2)
            totals = torch.stack((hits, chosen - hits, displaced.clamp(min=0)), 2)
            self.counts.copy_(totals.sum(1, dtype=torch.int32))

    def _send(self, group: IndexGroup, shared: Pass) -> None:
        """Copy the rows of a plan: a lone layer's at once, since nothing runs meanwhile; a group's on the side."""
        rows, slots = self._resolved.fetch(shared.requests, shared.queries)
        count = self._resolved.count[: shared.requests]
        if len(group.members) == 1:
            self._copy(group.leader, rows, slots, count)
            return
        self._step.new_slots = slots[:, : shared.queries].contiguous()
        with self._side.forked():
            for layer in group.members:
                # A follower's own new rows are not in its pool yet; what is copied in their place is overwritten when
                # it arrives.
                self._copy(layer, rows, slots, count)
                self._side.mark(layer)

    def _copy(self, layer: int, rows: torch.Tensor, slots: torch.Tensor, count: torch.Tensor) -> None:
        pool, arena = self._pools[layer], self._arenas[layer]
        self._gather(arena.rope, arena.nope, pool.rope, pool.nope, rows, slots, count)

    def arrive(self, layer: int) -> ArenaView:
        """Return what a layer attends on; what is enqueued from now on finds the selected rows there.

        The step's own rows of the layer have to be in its pool by now.

        Raises:
            ValueError: the layer's group has no plan in this pass.
        """
        at, member = self._place[layer]
        step = self._step
        if step.group != at or step.shared is None or step.slots is None:
            raise ValueError(f"layer {layer}: its leader {self._groups[at].leader} has not planned in this pass")
        if layer in self._side.unjoined:
            self._side.join(layer)
        step.awaited.discard(layer)
        if member and step.new_slots is not None:
            self._copy(layer, step.shared.new_rows, step.new_slots, self._batch.count[: step.shared.requests])
        arena = self._arenas[layer]
        return ArenaView(
            arena.nope.unsqueeze(2),
            arena.rope.unsqueeze(2),
            self._block_table[: step.padded],
            step.slots.unsqueeze(1),
            self._lengths[: step.padded],
        )

    def check(self) -> None:
        """Verify seats and residency. Reads the device; for tests and the doctor.

        Raises:
            AssertionError: an invariant does not hold.
        """
        self.seats.check()
        for state in self._states:
            state.check()


def _paged(index: int, pool: LatentPool, page_tokens: int) -> LatentPool:
    parts = [part.squeeze(2) if part.dim() == 4 else part for part in pool]
    for name, part in zip(pool._fields, parts, strict=True):
        if part.dim() != 3 or part.shape[1] != page_tokens or part.shape[0] != parts[0].shape[0]:
            raise ValueError(
                f"pools[{index}].{name}: shape {tuple(part.shape)}: expected [blocks, {page_tokens}, dim], or that "
                "with a 1 before dim"
            )
    return LatentPool(*parts)


def _arena(pool: LatentPool, rows: int, device: torch.device) -> LatentPool:
    shape = (rows // PAGE_SLOTS, PAGE_SLOTS)
    return LatentPool(*(torch.zeros((*shape, part.shape[2]), dtype=part.dtype, device=device) for part in pool))
