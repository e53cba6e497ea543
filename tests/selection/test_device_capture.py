# SPDX-License-Identifier: Apache-2.0
"""A whole pass as a captured graph: recorded once with padding alone, then replayed with whatever ``begin`` says.

``make_fx`` stands for the NPU's capture: it keeps the operators of one run with their tensors, and none of the Python
around them. What Python had decided by values of the dummy batch would show in a replay.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402 - after torch is known to be there

from tests.selection.device_world import Tenant, World  # noqa: E402
from tidal_connector.selection.groups import IndexGroup  # noqa: E402

REQUESTS = 4  # with padding


class CapturedWorld(World):
    """A world whose passes are replays."""

    def capture(self) -> None:
        """Record a pass over all layers with a batch of padding."""
        rows = REQUESTS * self.queries
        self.lengths = torch.full((REQUESTS,), 3, dtype=torch.int32)
        self.table = torch.zeros((REQUESTS, self.per_tenant), dtype=torch.int32)
        self.selected = torch.zeros((len(self.groups), rows, 1, self.top_k), dtype=torch.int32)
        self.selection.begin([], [], padded_requests=REQUESTS, most_queries=self.queries)

        def one_pass() -> list[Any]:
            return self.layers_of_a_pass()

        self.graph = make_fx(one_pass)()

    def layers_of_a_pass(self) -> list[Any]:
        """Return, layer by layer, the slots and the rows that attention would read."""
        read = []
        for layer in range(self.layers):
            group = next(index for index, each in enumerate(self.groups) if layer in each.members)
            if self.selection.leads(layer):
                self.selection.plan(layer, self.selected[group], self.lengths, self.table)
            view = self.selection.arrive(layer)
            slots = view.slots[:, 0].clamp(min=0).long()
            pages = view.block_table.repeat_interleave(self.queries, 0).gather(1, slots // 128).long()
            read += [view.slots.clone(), view.nope[pages, slots % 128, 0], view.rope[pages, slots % 128, 0]]
        return read

    def run_pass(self, tenants: list[Tenant], counts: list[int], padded: int, spare_rows: int = 0) -> None:
        """Replay the pass for other requests."""
        self.selection.begin(
            [tenant.name for tenant in tenants],
            [self.queries] * len(tenants),
            padded_requests=REQUESTS,
            most_queries=self.queries,
        )
        for index, tenant in enumerate(tenants):
            self.lengths[index] = tenant.length + self.queries
            self.table[index] = torch.from_numpy(tenant.pages)
            self.stamps(tenant, tenant.length, tenant.length + self.queries)
            for layer in range(self.layers):
                self.write(tenant, layer, tenant.length, tenant.length + self.queries)
            for group in range(len(self.groups)):
                part = slice(index * self.queries, (index + 1) * self.queries)
                self.selected[group, part, 0] = torch.from_numpy(self.select(tenant, self.queries))
        read = self.graph()
        self.selection.check()
        for layer in range(self.layers):
            group = next(index for index, each in enumerate(self.groups) if layer in each.members)
            self.compare(layer, tenants, self.selected[group][:, 0].numpy(), *read[3 * layer : 3 * layer + 3])
        for tenant in tenants:
            tenant.length += self.queries
            tenant.drafts = self.queries - 1

    def compare(self, layer: int, tenants: list[Tenant], selected: Any, slots: Any, *parts: Any) -> None:
        """Compare what a replay read with what the positions hold."""
        rows = len(tenants) * self.queries
        assert (slots[rows:] == -1).all(), "padding has slots"
        for row in range(rows):
            valid = selected[row] >= 0
            assert np.array_equal(slots[row, 0].numpy() >= 0, valid)
            stamps = torch.from_numpy(
                (tenants[row // self.queries].stamps[selected[row][valid]] + layer).astype(np.int16)
            )
            for part in parts:
                wanted = stamps[:, None] + torch.arange(part.shape[-1], dtype=torch.int16)
                assert torch.equal(part[row][torch.from_numpy(valid)], wanted), f"layer {layer}: another row"


@pytest.mark.parametrize("groups", [((0,), (1,)), ((0, 1, 2), (3,))], ids=["alone", "shared"])
@pytest.mark.parametrize("queries", [1, 2])
def test_a_captured_pass_serves_batches_that_it_has_not_seen(groups: tuple[tuple[int, ...], ...], queries: int) -> None:
    world = CapturedWorld(tuple(IndexGroup(members) for members in groups), seed=queries, queries=queries)
    world.capture()
    world.run(40)
    assert world.seen >= {"join", "leave", "elsewhere"}


def test_a_graph_that_has_kept_a_value_of_the_dummy_batch_is_noticed() -> None:
    world = CapturedWorld((IndexGroup((0,)), IndexGroup((1,))), queries=1)
    batch = world.selection._batch
    read = batch.seat
    batch.seat = read.clone()
    world.capture()
    batch.seat = read
    with pytest.raises((AssertionError, IndexError)):  # rows of the spare seat lie outside the arena
        world.run(20)
