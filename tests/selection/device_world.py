# SPDX-License-Identifier: Apache-2.0
"""A decode engine in miniature around ``DeviceSelection``: layers with pools, requests that come, speculate and go.

Every row of a pool carries a stamp, new at each write. A pass does per layer what attention does: the layer's new rows
go to its pool, a leader plans, and every layer then reads the rows of its selection out of the arena view alone, as a
paged cache. A wrong slot, a stale row or a copy that was not waited for shows as a wrong stamp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tidal_connector.selection.device import ArenaView, DeviceSelection, DeviceSizes
from tidal_connector.selection.groups import IndexGroup

PAGE = 4
NOPE, ROPE = 3, 2  # elements of a row; the first of each is the stamp
Int32 = npt.NDArray[np.int32]


@dataclass
class Tenant:
    """A running request."""

    name: str
    length: int  # tokens whose rows are in the pools
    pages: Int32
    favourites: Int32
    stamps: npt.NDArray[np.int64]  # of each position, what its row holds in every layer (plus the layer's number)
    drafts: int = 0  # tokens of the last step that may be taken back


@dataclass
class World:
    """Requests over pools of all layers."""

    groups: Sequence[IndexGroup]
    seed: int = 0
    seats: int = 3
    slots: int = 128
    top_k: int = 9
    queries: int = 2
    context: int = 300
    element: torch.dtype = torch.int16  # of the rows, 16 bits wide; what operators are told
    gather: Callable[..., None] | None = None
    tenants: list[Tenant] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.layers = sum(len(group.members) for group in self.groups)
        self.per_tenant = -(-self.context // PAGE)
        blocks = self.seats * self.per_tenant
        self.free_pages = self.rng.permutation(blocks).astype(np.int32)
        self.pools = [
            (
                torch.full((blocks, PAGE, 1, NOPE), -1, dtype=torch.int16),
                torch.full((blocks, PAGE, 1, ROPE), -1, dtype=torch.int16),
            )
            for _ in range(self.layers)
        ]
        self.stamp = 0
        self.named = 0
        self.totals = torch.zeros(3, dtype=torch.int64)
        self.build()

    def build(self) -> None:
        """Make the selection cache, empty."""
        sizes = DeviceSizes(
            seats=self.seats,
            slots=self.slots,
            top_k=self.top_k,
            queries=self.queries,
            tokens=self.seats * self.queries + 4,
            context=self.context,
            page_tokens=PAGE,
        )
        extra = {} if self.gather is None else {"gather": self.gather}
        self.selection = DeviceSelection(
            pools=[(nope.view(self.element), rope.view(self.element)) for nope, rope in self.pools],
            groups=self.groups,
            sizes=sizes,
            device=torch.device("cpu"),
            **extra,
        )

    # What happens between steps.

    def join(self) -> None:
        """A request comes, its context in the pools."""
        if len(self.tenants) == self.seats:
            return
        self.named += 1
        length = int(self.rng.integers(1, self.context - 40))
        pages, self.free_pages = self.free_pages[: self.per_tenant], self.free_pages[self.per_tenant :]
        tenant = Tenant(f"r{self.named}", length, pages, np.empty(0, np.int32), np.full(self.context, -1, np.int64))
        self.tenants.append(tenant)
        self.stamps(tenant, 0, length)
        for layer in range(self.layers):
            self.write(tenant, layer, 0, length)
        self.seen.add("join")

    def leave(self, tenant: Tenant) -> None:
        """A request ends; another may get its seat and its pages."""
        self.selection.release(tenant.name)
        self.tenants.remove(tenant)
        self.free_pages = np.concatenate([self.free_pages, tenant.pages])
        self.seen.add("leave")

    def stock_step(self, tenant: Tenant, count: int) -> None:
        """A step computes tokens of a request without its seat, on the pools alone."""
        self.selection.elsewhere(tenant.name, tenant.length)
        self.stamps(tenant, tenant.length, tenant.length + count)
        for layer in range(self.layers):
            self.write(tenant, layer, tenant.length, tenant.length + count)
        tenant.length += count
        tenant.drafts = 0
        self.seen.add("elsewhere")

    def take_back(self, tenant: Tenant) -> None:
        """Drafts of the last step are rejected."""
        taken = int(self.rng.integers(0, tenant.drafts + 1))
        tenant.length -= taken
        tenant.drafts = 0
        if taken:
            self.seen.add("rejected")

    def stamps(self, tenant: Tenant, first: int, end: int) -> None:
        """Give new stamps to positions that are about to be written."""
        tenant.stamps[first:end] = np.arange(self.stamp, self.stamp + end - first) % 30_000
        self.stamp += end - first

    def write(self, tenant: Tenant, layer: int, first: int, end: int) -> None:
        """Write rows of positions to a layer's pool, as the stock code does."""
        positions = np.arange(first, end)
        rows = torch.from_numpy(tenant.pages[positions // PAGE].astype(np.int64) * PAGE + positions % PAGE)
        values = torch.from_numpy((tenant.stamps[first:end] + layer).astype(np.int16))
        for part in self.pools[layer]:
            part.view(-1, part.shape[-1])[rows] = values[:, None] + torch.arange(part.shape[-1], dtype=torch.int16)

    # A step.

    def select(self, tenant: Tenant, count: int) -> Int32:
        """Return ``[count, k]`` positions that each query may see, some again and again, then -1."""
        if not len(tenant.favourites) or self.rng.random() < 0.1:
            tenant.favourites = self.rng.integers(0, tenant.length + 1, 2 * self.top_k).astype(np.int32)
        chosen = np.full((count, self.top_k), -1, np.int32)
        for query in range(count):
            limit = tenant.length + 1 + query
            wanted = [*self.rng.choice(tenant.favourites, self.top_k - 2), *self.rng.integers(0, limit, 2), limit - 1]
            unique = [p for p in dict.fromkeys(int(p) for p in wanted) if p < limit][: self.top_k]
            chosen[query, : len(unique)] = unique
        return chosen

    def run(self, steps: int) -> None:
        """Make so many steps."""
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        """Let something happen, make a pass, verify what every layer reads."""
        if self.rng.random() < 0.4 or not self.tenants:
            self.join()
        for tenant in list(self.tenants):
            self.take_back(tenant)
            if tenant.length + self.queries >= self.context or self.rng.random() < 0.03:
                self.leave(tenant)
            elif self.rng.random() < 0.1 and tenant.length + 5 + self.queries < self.context:
                self.stock_step(tenant, int(self.rng.integers(1, 5)))
        tenants = [tenant for tenant in self.tenants if self.rng.random() < 0.9]
        self.rng.shuffle(tenants)  # type: ignore[arg-type]
        counts = [int(self.rng.integers(1, self.queries + 1)) for _ in tenants]
        padded = len(tenants) + int(self.rng.integers(0, 2))
        self.run_pass(tenants, counts, max(padded, 1), spare_rows=int(self.rng.integers(0, 3)))

    def run_pass(self, tenants: list[Tenant], counts: list[int], padded: int, spare_rows: int = 0) -> None:
        """Make one forward pass."""
        self.selection.begin(
            [tenant.name for tenant in tenants], counts, padded_requests=padded, most_queries=self.queries
        )
        rows = sum(counts) + spare_rows
        lengths = torch.full((padded,), 7, dtype=torch.int32)  # of padding: whatever an earlier step left there
        table = torch.full((padded, self.per_tenant), 1 << 20, dtype=torch.int32)
        for index, (tenant, count) in enumerate(zip(tenants, counts, strict=True)):
            lengths[index] = tenant.length + count
            table[index] = torch.from_numpy(tenant.pages)
            self.stamps(tenant, tenant.length, tenant.length + count)
        selected = np.zeros((rows, 0), np.int32)
        for layer in range(self.layers):
            for tenant, count in zip(tenants, counts, strict=True):
                self.write(tenant, layer, tenant.length, tenant.length + count)
            if self.selection.leads(layer):
                chosen = [self.select(tenant, count) for tenant, count in zip(tenants, counts, strict=True)]
                chosen.append(np.full((spare_rows, self.top_k), 5, np.int32))
                selected = np.concatenate(chosen)
                if len(selected):
                    self.selection.plan(layer, torch.from_numpy(selected).unsqueeze(1), lengths, table)
            if len(selected):
                self.verify(layer, self.selection.arrive(layer), tenants, counts, selected)
        self.selection.check()
        if len(selected):
            self.totals += self.selection.counts.sum(0)
        for tenant, count in zip(tenants, counts, strict=True):
            tenant.length += count
            tenant.drafts = count - 1

    def verify(self, layer: int, view: ArenaView, tenants: list[Tenant], counts: list[int], selected: Int32) -> None:
        """Read through the view as attention does, and compare with what the positions hold."""
        assert view.slots.shape == (len(selected), 1, self.top_k)
        row = 0
        for index, (tenant, count) in enumerate(zip(tenants, counts, strict=True)):
            for _ in range(count):
                valid = torch.from_numpy(selected[row] >= 0)
                slots = view.slots[row, 0].long()
                assert ((slots >= 0) == valid).all(), "a valid entry has no slot, or an invalid one has"
                assert (slots[valid] < view.lengths[index]).all(), "attention would drop a slot"
                page = view.block_table[index][slots[valid] // 128].long()
                stamps = tenant.stamps[selected[row][selected[row] >= 0]] + layer
                for part in (view.nope, view.rope):
                    read = part.view(torch.int16)[page, slots[valid] % 128, 0]
                    wanted = torch.from_numpy(stamps.astype(np.int16))[:, None] + torch.arange(
                        part.shape[-1], dtype=torch.int16
                    )
                    assert torch.equal(read, wanted), f"layer {layer}: a slot holds another row"
                row += 1
        assert (view.slots[row:] == -1).all(), "padding has slots"
