# SPDX-License-Identifier: Apache-2.0
"""A decode engine in miniature that drives ``resolve``: requests come, grow, roll back, lose room, and go.

Every row carries a stamp, new at each write; the host pool and the arena hold stamps instead of latents. What
``resolve`` plans is done with them, so that a wrong slot, a stale row or a skipped miss shows as a wrong stamp.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tidal_connector.ops import Implementation, ResolveBuffers, Resolved, Seats, SelectionBatch, SlotState, resolve

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

COUNTS = ("hits", "misses", "loads", "evictions", "invalid")


@dataclass
class Shape:
    """Sizes of a world."""

    extent_rows: int = 4
    extents: int = 48
    seats: int = 8
    slots: int = 24  # of a seat that does not hold its whole context
    width: int = 5  # selected at most
    queries: int = 3  # of a request in a step, at most
    page_tokens: int = 4
    context: int = 120  # tokens of the longest request
    eager_rows: int = 20

    def __post_init__(self) -> None:
        self.slots = max(self.slots, self.queries * (self.width + 1) + 1)


@dataclass
class Tenant:
    """A running request."""

    seat: int
    length: int  # tokens whose rows are in the pool
    pages: Int32
    stamps: Int64  # of each position, what its row should hold
    favourites: Int64  # positions that are selected again and again
    extents: list[int] = field(default_factory=list)


class World:
    """Requests over one arena; ``states`` are resolved in lockstep, one for each implementation.

    Args:
        shape: sizes.
        seed: of everything that happens.
        ways: implementations, each with its threads.
    """

    def __init__(self, shape: Shape, seed: int, ways: list[tuple[Implementation, int]]) -> None:
        self.shape = shape
        self.rng = np.random.default_rng(seed)
        self.ways = ways
        rows = shape.extents * shape.extent_rows
        widest = -(-shape.context // shape.extent_rows)
        self.seats = Seats(
            np.zeros(shape.seats, np.int32), np.full((shape.seats, widest), -1, np.int32), shape.extent_rows
        )
        self.states = [SlotState.empty(rows, shape.seats) for _ in ways]
        self.buffers = [ResolveBuffers() for _ in ways]
        self.arena = np.full(rows, -1, np.int64)
        self.tenants: list[Tenant] = []
        self.free = list(range(shape.extents))
        per_tenant = -(-shape.context // shape.page_tokens)
        self.free_pages = self.rng.permutation(shape.seats * per_tenant).astype(np.int32)
        self.pool = np.full(shape.seats * per_tenant * shape.page_tokens, -1, np.int64)
        self.stamp = 0
        self.request_steps = 0
        self.seen: set[str] = set()

    # What happens between steps.

    def join(self) -> None:
        """A request comes, its context in the pool; it gets the slots of its context, or its share."""
        shape, rng = self.shape, self.rng
        taken = {tenant.seat for tenant in self.tenants}
        seats = [seat for seat in range(shape.seats) if seat not in taken]
        if not seats or len(self.free) * shape.extent_rows < shape.slots:
            return
        length = int(rng.integers(0, shape.context - shape.queries))
        per_tenant = -(-shape.context // shape.page_tokens)
        pages, self.free_pages = self.free_pages[:per_tenant], self.free_pages[per_tenant:]
        tenant = Tenant(
            int(rng.choice(seats)), length, pages, np.full(shape.context, -1, np.int64), np.empty(0, np.int64)
        )
        self.tenants.append(tenant)
        self.write(tenant, 0, length)
        wish = max(shape.slots, min(length + 8, shape.context)) if rng.random() < 0.3 else shape.slots
        self._give(tenant, min(-(-wish // shape.extent_rows), len(self.free)))
        for state in self.states:
            state.reset(self.seats, tenant.seat)
        self.seen.add("join")

    def leave(self, tenant: Tenant) -> None:
        """A request ends; others may get its seat, its extents and its pages."""
        for state in self.states:
            state.reset(self.seats, tenant.seat)
        self.tenants.remove(tenant)
        self.free += tenant.extents
        self.free_pages = np.concatenate([self.free_pages, tenant.pages])
        tenant.extents = []
        self._give(tenant, 0)
        self.seen.add("leave")

    def spill(self, tenant: Tenant) -> None:
        """A request in place loses what it holds beyond its share."""
        kept = -(-self.shape.slots // self.shape.extent_rows)
        if len(tenant.extents) <= kept or self.states[0].listed[tenant.seat]:
            return
        self.free += tenant.extents[kept:]
        tenant.extents = tenant.extents[:kept]
        self._give(tenant, 0)
        self.seen.add("spill")

    def grow(self, tenant: Tenant) -> None:
        """A request in place gets another extent."""
        if self.free and not self.states[0].listed[tenant.seat] and len(tenant.extents) < self.seats.extents.shape[1]:
            self._give(tenant, 1)
            rows = tenant.extents[-1] * self.shape.extent_rows + np.arange(self.shape.extent_rows)
            for state in self.states:
                state.forget(rows)
            self.seen.add("grow")

    def roll_back(self, tenant: Tenant) -> None:
        """Tokens are taken back: a rejected speculation, or a resumption from a prefix."""
        if tenant.length:
            deep = self.rng.random() < 0.1
            tenant.length -= int(self.rng.integers(0, tenant.length + 1 if deep else min(3, tenant.length + 1)))
            self.seen.add("roll back")

    def skip(self, tenant: Tenant) -> None:
        """Tokens go by without a step of ours: their rows are in the pool, and none of them was taken back before."""
        count = int(self.rng.integers(0, 6))
        if (
            tenant.length >= self.states[0].length[tenant.seat]
            and tenant.length + count < self.shape.context - self.shape.queries
        ):
            self.write(tenant, tenant.length, tenant.length + count)
            tenant.length += count
            self.seen.add("skip")

    def _give(self, tenant: Tenant, extents: int) -> None:
        self.rng.shuffle(self.free)
        tenant.extents += [self.free.pop() for _ in range(extents)]
        row = self.seats.extents[tenant.seat]
        row[:] = -1
        row[: len(tenant.extents)] = tenant.extents
        rows = len(tenant.extents) * self.shape.extent_rows
        # Not always whole extents.
        self.seats.capacity[tenant.seat] = max(0, rows - int(self.rng.integers(0, 2)))

    def write(self, tenant: Tenant, first: int, end: int) -> Int64:
        """Give positions ``[first, end)`` new rows in the pool; return their stamps."""
        stamps = np.arange(self.stamp, self.stamp + end - first)
        self.stamp += end - first
        positions = np.arange(first, end)
        tenant.stamps[first:end] = stamps
        page, offset = np.divmod(positions, self.shape.page_tokens)
        self.pool[tenant.pages[page].astype(np.int64) * self.shape.page_tokens + offset] = stamps
        return stamps

    # A step.

    def select(self, tenant: Tenant, queries: int, width: int) -> Int64:
        """Return positions ``[queries, width]``: favourites, others, duplicates, padding and nonsense."""
        rng, length = self.rng, tenant.length + queries
        if len(tenant.favourites) == 0 or rng.random() < 0.1:
            tenant.favourites = rng.integers(0, max(length, 1), 2 * width + 1)
        kind, which = rng.random((2, queries, width))
        chosen = tenant.favourites[(which * len(tenant.favourites)).astype(np.int64)]
        chosen = np.where(kind < 0.3, (which * length).astype(np.int64), chosen)
        chosen[kind < 0.08] = -1
        nonsense = np.array([length, length + 1, -2, -(1 << 31), (1 << 31) - 1, 1 << 30])
        return np.where(kind < 0.03, nonsense[(which * len(nonsense)).astype(np.int64)], chosen)

    def batch(self, tenants: list[Tenant], width: int, queries: list[int]) -> SelectionBatch:
        """Return the next step of some requests, whose arrays have gaps between their rows."""
        total, pages = sum(queries), self.shape.context // self.shape.page_tokens + 1
        selected = np.full((total, width + 3), 7, np.int32)
        table = np.full((len(tenants), pages + 2), 1 << 30, np.int32)
        start = np.cumsum([0, *queries])
        for index, (tenant, count) in enumerate(zip(tenants, queries, strict=True)):
            selected[start[index] : start[index + 1], :width] = self.select(tenant, count, width)
            table[index, : len(tenant.pages)] = tenant.pages
        return SelectionBatch(
            selected[:, :width],
            start.astype(np.int32),
            np.array([tenant.seat for tenant in tenants], np.int32),
            np.array([tenant.length for tenant in tenants], np.int32),
            table[:, : -(-self.shape.context // self.shape.page_tokens)],
            self.shape.page_tokens,
        )

    def run(self, *, steps: int = 1 << 30, request_steps: int = 1 << 30) -> None:
        """Make so many steps, or steps until requests made so many."""
        while steps > 0 and self.request_steps < request_steps:
            self.step()
            steps -= 1

    def step(self) -> None:
        """Let something happen, then resolve some requests and verify the outcome."""
        rng, shape = self.rng, self.shape
        if rng.random() < 0.3:
            self.join()
        for tenant in list(self.tenants):
            event = rng.random()
            if event < 0.01 or tenant.length + shape.queries >= shape.context:
                self.leave(tenant)
            elif event < 0.2:
                (self.spill, self.grow, self.roll_back, self.roll_back, self.skip)[int(event * 25)](tenant)
        tenants = [tenant for tenant in self.tenants if rng.random() < 0.9]
        rng.shuffle(tenants)  # type: ignore[arg-type]
        width = int(rng.integers(1, shape.width + 1))
        queries = [int(rng.integers(0, shape.queries + 1)) if rng.random() < 0.3 else 1 for _ in tenants]
        batch = self.batch(tenants, width, queries)
        results = [
            resolve(
                state,
                self.seats,
                batch,
                eager_rows=shape.eager_rows,
                threads=threads,
                buffers=buffers,
                implementation=implementation,
            )
            for state, buffers, (implementation, threads) in zip(self.states, self.buffers, self.ways, strict=True)
        ]
        for state, result in zip(self.states[1:], results[1:], strict=True):
            assert_same_results(results[0], result)
            assert_same_states(self.states[0], state)
        self.carry_out(tenants, queries, batch, results[0])
        if rng.random() < 0.25:
            self.states[0].check(self.seats)
        self.request_steps += len(tenants)
        self.seen |= {name for name in COUNTS if getattr(results[0], name)}
        if self.states[0].listed.any():
            self.seen.add("listed")

    def carry_out(self, tenants: list[Tenant], queries: list[int], batch: SelectionBatch, result: Resolved) -> None:
        """Do what was planned, and verify that every slot then holds the row that was selected."""
        touched = np.concatenate([result.miss_slots, result.written])
        assert len(np.unique(touched)) == len(touched), "a row is used twice in one step"
        for index, (tenant, count) in enumerate(zip(tenants, queries, strict=True)):
            first, end = batch.query_start[index], batch.query_start[index + 1]
            mine = slice(result.miss_start[index], result.miss_start[index + 1])
            own = set(self.seats.rows(tenant.seat).tolist())
            assert own.issuperset(result.miss_slots[mine].tolist()), "a row of another seat"
            assert own.issuperset(result.written[first:end].tolist()), "a row of another seat"
            self.arena[result.miss_slots[mine]] = self.pool[result.miss_rows[mine]]
            self.arena[result.written[first:end]] = self.write(tenant, tenant.length, tenant.length + count)
            verify_slots(self.arena, tenant, batch.selected[first:end], result.slots[first:end])
            tenant.length += count
        assert result.miss_start[0] == 0
        assert result.miss_start[-1] == len(result.miss_rows) == result.misses + result.loads


def verify_slots(arena: Int64, tenant: Tenant, selected: Int32, slots: Int32) -> None:
    """Assert that valid entries, and no others, have a slot with the stamp of their position."""
    ends = tenant.length + 1 + np.arange(len(selected))[:, np.newaxis]
    valid = (selected >= 0) & (selected < ends)
    assert ((slots >= 0) == valid).all(), "a valid entry has no slot, or an invalid one has"
    assert (arena[slots[valid]] == tenant.stamps[selected[valid]]).all(), "a slot holds another row"


def assert_same_results(left: Resolved, right: Resolved) -> None:
    """Assert that two plans are equal, bit for bit."""
    for name in ("slots", "written", "miss_rows", "miss_slots", "miss_start"):
        one, other = getattr(left, name), getattr(right, name)
        assert one.dtype == other.dtype, name
        assert np.array_equal(one, other), name
    for name in COUNTS:
        assert getattr(left, name) == getattr(right, name), name


def assert_same_states(left: SlotState, right: SlotState) -> None:
    """Assert that two states are equal, bit for bit."""
    for name in ("held", "order", "listed", "filled", "length"):
        assert np.array_equal(getattr(left, name), getattr(right, name)), name
