# SPDX-License-Identifier: Apache-2.0
"""The world of ``resolve`` with the device's implementation beside the definition, and its plan carried out.

Seats have one extent of equal size and are listed from the first step on, as they are on a device; everything else that
happens to requests (growth, rejected tokens, steps that pass them by, leaving) is the world's.
"""

from __future__ import annotations

import numpy as np
import torch

from tests.ops.resolve_world import Int32, Shape, Tenant, World
from tidal_connector.ops import Implementation, Resolved, SelectionBatch
from tidal_connector.ops.npu.resolve import prepare, resolve
from tidal_connector.ops.npu.staging import BatchStaging, StagedRequest
from tidal_connector.ops.npu.state import FOREVER, POSITIONS, DeviceBatch, DeviceResolved, DeviceSlotState


def equal_seats(*, seats: int, slots: int, width: int, queries: int, page_tokens: int, context: int) -> Shape:
    """Return a world of so many seats of so many slots, or of what a step needs at least."""
    shape = Shape(slots=slots, width=width, queries=queries, page_tokens=page_tokens, context=context, eager_rows=0)
    return Shape(
        extent_rows=shape.slots,
        extents=seats,
        seats=seats,
        slots=shape.slots,
        width=width,
        queries=queries,
        page_tokens=page_tokens,
        context=context,
        eager_rows=0,
    )


class DeviceWorld(World):
    """A world whose plans are the device's, after they were compared with the definition's."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__(shape, seed, [(Implementation.REFERENCE, 1)])
        tokens = shape.seats * shape.queries + 3
        self.state = DeviceSlotState(shape.extents, shape.extent_rows, "cpu")
        self.step_batch = DeviceBatch(shape.extents, shape.seats + 2, shape.queries, tokens, "cpu")
        self.staging = BatchStaging(self.step_batch)
        self.out = DeviceResolved(self.step_batch, shape.width, shape.extent_rows, 2, "cpu")
        self.generations: dict[int, int] = {}
        self.generation = 0

    def _give(self, tenant: Tenant, extents: int) -> None:
        super()._give(tenant, min(extents, 1))
        rows = self.seats.rows(tenant.seat)
        self.seats.capacity[tenant.seat] = len(tenant.extents) * self.shape.extent_rows
        if len(rows):
            self.generation += 1
            self.generations[tenant.seat] = self.generation

    def join(self) -> None:
        """A request comes; its seat is listed at once, its slots in the order in which its predecessor left them."""
        known = len(self.tenants)
        super().join()
        for tenant in self.tenants[known:]:
            (extent,) = tenant.extents
            state, rows = self.states[0], self.seats.rows(tenant.seat)
            state.listed[tenant.seat] = 1
            state.order[rows] = extent * self.shape.extent_rows + self.state.slots[extent].numpy()

    def carry_out(self, tenants: list[Tenant], queries: list[int], batch: SelectionBatch, result: Resolved) -> None:
        """Resolve on the device, compare all of it, and carry out the device's plan.

        The definition lets a request without queries forget what was taken back; the device has no such request, so
        its seat takes over what the definition left.
        """
        for tenant, count in zip(tenants, queries, strict=True):
            if not count:
                self.take_over(tenant)
        mine = self.resolve(tenants, queries, batch)
        assert mine.slots.tolist() == result.slots.tolist(), "slots"
        assert mine.written.tolist() == result.written.tolist(), "written"
        assert mine.miss_start.tolist() == result.miss_start.tolist(), "miss_start"
        assert mine.miss_rows.tolist() == result.miss_rows.tolist(), "miss_rows"
        assert mine.miss_slots.tolist() == result.miss_slots.tolist(), "miss_slots"
        assert mine[5:9] == result[5:9], "counts"
        self.compare_states()
        super().carry_out(tenants, queries, batch, mine)

    def resolve(self, tenants: list[Tenant], queries: list[int], batch: SelectionBatch) -> Resolved:
        """Return the device's plan in the words of the definition."""
        rng, shape = self.rng, self.shape
        served = [index for index, count in enumerate(queries) if count]
        # The device knows a seat by its place in the arena.
        requests = [
            StagedRequest(
                tenants[index].extents[0],
                self.generations[tenants[index].seat],
                FOREVER,
                queries[index],
            )
            for index in served
        ]
        padded = max(1, len(requests) + int(rng.integers(0, 3)))
        self.staging.fill(requests, padded, shape.queries)
        tokens, width = batch.selected.shape
        selected = torch.full((max(1, tokens + int(rng.integers(0, 4))), shape.width), -1, dtype=torch.int32)
        selected[tokens:] = 3  # padding may hold anything
        selected[:tokens, :width] = torch.from_numpy(batch.selected.copy())
        lengths = torch.from_numpy(rng.integers(-9, 1 << 20, padded).astype(np.int32))
        pages = torch.full((padded, batch.pages.shape[1]), 1 << 25, dtype=torch.int32)
        for place, index in enumerate(served):
            lengths[place] = tenants[index].length + queries[index]
            pages[place] = torch.from_numpy(batch.pages[index].copy())
        shared = prepare(self.step_batch, lengths, pages, shape.page_tokens, self.out)
        slots = resolve(self.state, self.step_batch, shared, selected, self.out, 1)
        assert (slots[tokens:] == -1).all(), "padding has slots"
        assert (self.out.count[len(requests) : padded] == 0).all(), "padding fetches"
        self.state.check()
        assert shared.new_rows[len(requests) :].eq(-1).all(), "padding has new rows"
        return self._as_resolved(tenants, queries, batch, slots[:tokens, :width].numpy())

    def _as_resolved(self, tenants: list[Tenant], queries: list[int], batch: SelectionBatch, found: Int32) -> Resolved:
        capacity, most = self.shape.extent_rows, self.shape.queries
        rows, places = self.out.fetch(self.step_batch.requests, most)
        slots = found.astype(np.int64)
        written: list[int] = []
        misses: list[tuple[int, int]] = []
        starts, place = [0], 0
        for index, (tenant, count) in enumerate(zip(tenants, queries, strict=True)):
            if count:
                first, end = batch.query_start[index : index + 2].tolist()
                part = slots[first:end]
                slots[first:end] = np.where(part >= 0, tenant.extents[0] * capacity + part, -1)
                listed = list(zip(rows[place].tolist(), places[place].tolist(), strict=True))
                written += [slot for _, slot in listed[:count]]
                misses += listed[most : int(self.out.count[place])]
                positions = int(batch.start[index]) + np.arange(count)
                page, offset = np.divmod(positions, self.shape.page_tokens)
                new = (batch.pages[index][page] * self.shape.page_tokens + offset).tolist()
                assert [row for row, _ in listed[:most]] == [*new, *[-1] * (most - count)], "new rows"
                place += 1
            starts.append(len(misses))
        hits, selected, displaced = self.out.statistics[1, :place].unbind(1)
        return Resolved(
            slots.astype(np.int32),
            np.array(written, np.int32),
            np.array([row for row, _ in misses], np.int64),
            np.array([slot for _, slot in misses], np.int64),
            np.array(starts, np.int32),
            int(hits.sum()),
            int((selected - hits).sum()),
            0,
            int(displaced.clamp(min=0).sum()),
            0,
        )

    def take_over(self, tenant: Tenant) -> None:
        """Make a seat hold what it holds by the definition."""
        (extent,) = tenant.extents
        order = torch.from_numpy(self.states[0].order[self.seats.rows(tenant.seat)])
        held = torch.from_numpy(self.states[0].held)[order.long()].float()
        self.state.slots[extent] = order - extent * self.shape.extent_rows
        self.state.positions[extent] = torch.where(held < 0, POSITIONS, held)
        self.step_batch.owners[extent] = self.generations[tenant.seat]

    def compare_states(self) -> None:
        """Assert that every slot of every seat holds the same, and was used in the same order."""
        capacity, held = self.shape.extent_rows, self.state.held().numpy()
        for tenant in self.tenants:
            (extent,) = tenant.extents
            rows = self.seats.rows(tenant.seat)
            if self.step_batch.owners[extent] != self.generations[tenant.seat]:
                assert (self.states[0].held[rows] == -1).all(), "a seat that had no step yet holds something"
                continue
            assert held[extent].tolist() == self.states[0].held[rows].tolist(), "content of the slots"
            order = extent * capacity + self.state.slots[extent].numpy()
            assert order.tolist() == self.states[0].order[rows].tolist(), "order of last use"
