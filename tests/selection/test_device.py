# SPDX-License-Identifier: Apache-2.0
"""DeviceSelection over whole passes: every layer reads the rows of its selection, whatever happened before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402 - after torch is known to be there

from tests.selection.device_world import PAGE, World  # noqa: E402
from tidal_connector.errors import PoolExhausted  # noqa: E402
from tidal_connector.ops.npu.library import gather_miss_rows  # noqa: E402
from tidal_connector.selection import device  # noqa: E402
from tidal_connector.selection.device import DeviceSelection, DeviceSizes  # noqa: E402
from tidal_connector.selection.groups import IndexGroup  # noqa: E402

ALONE = (IndexGroup((0,)), IndexGroup((1,)), IndexGroup((2,)))  # DeepSeek-V3.2
SHARED = (IndexGroup((0, 1, 2, 3)), IndexGroup((4,)), IndexGroup((5, 6)))  # GLM-5.2
EVENTS = {"join", "leave", "elsewhere", "rejected"}


@pytest.mark.parametrize("groups", [ALONE, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("queries", [1, 2, 3])
def test_every_layer_reads_the_rows_that_were_selected(groups: tuple[IndexGroup, ...], queries: int) -> None:
    world = World(groups, seed=queries, queries=queries, slots=128)
    world.run(120)
    assert world.seen >= EVENTS - ({"rejected"} if queries == 1 else set())
    hits, misses, evictions = world.totals.tolist()
    assert hits > misses > 0
    assert evictions > 0


def lose_a_row(rope: Any, nope: Any, pool_rope: Any, pool_nope: Any, rows: Any, slots: Any, count: Any) -> None:
    gather_miss_rows(rope, nope, pool_rope, pool_nope, rows, slots, (count - 1).clamp(min=0))


def fetch_a_neighbour(rope: Any, nope: Any, pool_rope: Any, pool_nope: Any, rows: Any, slots: Any, count: Any) -> None:
    gather_miss_rows(rope, nope, pool_rope, pool_nope, (rows - 1).clamp(min=0), slots, count)


@pytest.mark.parametrize("fault", [lose_a_row, fetch_a_neighbour])
def test_a_copy_that_goes_wrong_is_noticed(fault: Callable[..., None]) -> None:
    world = World(SHARED, gather=fault)
    with pytest.raises(AssertionError, match="holds another row"):
        world.run(20)


def test_rows_written_past_a_seat_without_a_word_are_noticed() -> None:
    """What ``elsewhere`` is for: the bed would not see its absence otherwise."""
    world = World(ALONE, seed=5, queries=3)
    world.selection.elsewhere = lambda *_: None  # type: ignore[method-assign]

    def rewrite_drafts() -> None:
        for _ in range(400):
            world.step()
            for tenant in world.tenants:
                if tenant.drafts and tenant.length + 8 < world.context:
                    tenant.length -= tenant.drafts
                    world.stock_step(tenant, tenant.drafts + 1)

    with pytest.raises(AssertionError, match="holds another row"):
        rewrite_drafts()


def test_what_was_said_of_rows_past_a_seat_holds_although_the_pass_it_was_said_to_never_ran() -> None:
    world = World(ALONE, queries=3)
    world.join()
    (tenant,) = world.tenants
    tenant.length = 100
    world.stamps(tenant, 0, 100)
    for layer in range(world.layers):
        world.write(tenant, layer, 0, 100)
    world.select = lambda _, count: np.array([[99, *[-1] * 8]] * count, np.int32)  # type: ignore[method-assign]
    world.run_pass([tenant], [3], 1)
    tenant.length -= 2  # two drafts are rejected, and a step on the pool alone writes their positions anew
    world.stock_step(tenant, 3)
    world.selection.begin([tenant.name], [1], padded_requests=1, most_queries=3)
    world.select = lambda *_: np.array([[99, 100, 101, 102, *[-1] * 5]], np.int32)  # type: ignore[method-assign]
    world.run_pass([tenant], [1], 1)
    assert world.selection.counts.tolist() == [[2, 2, 0]] * 3  # 99 and 100 are as they were


def test_a_request_that_comes_back_after_another_had_its_seat_finds_it_empty() -> None:
    world = World(ALONE, seats=1)
    for _ in range(3):
        world.join()
        (tenant,) = world.tenants
        world.run_pass([tenant], [1], 1)
        assert (world.selection.counts[:, 0] <= 1).all()  # at most the new row itself
        world.leave(tenant)


def test_61_layers_that_each_select_for_themselves() -> None:
    world = World(tuple(IndexGroup((layer,)) for layer in range(61)), queries=1)
    world.run(4)


class TestFixedShapes:
    """What a captured graph and vllm-ascend's dummy batches demand."""

    def selection(self, seats: int = 16, queries: int = 1) -> DeviceSelection:
        pools = [(torch.zeros(8, PAGE, 1, 3, dtype=torch.int16), torch.zeros(8, PAGE, 1, 2, dtype=torch.int16))]
        sizes = DeviceSizes(seats=seats, slots=128, top_k=5, queries=queries, tokens=32, context=100, page_tokens=PAGE)
        return DeviceSelection(pools=pools, groups=[IndexGroup((0,))], sizes=sizes, device=torch.device("cpu"))

    def plan(self, selection: DeviceSelection, rows: int, table_rows: int) -> Any:
        selection.plan(
            0,
            torch.full((rows, 1, 5), 3, dtype=torch.int32),
            torch.full((table_rows,), 9, dtype=torch.int32),
            torch.zeros((table_rows, 8), dtype=torch.int32),
        )
        return selection.arrive(0)

    def test_a_warm_up_batch_of_32_meets_a_block_table_of_16_rows(self) -> None:
        selection = self.selection()
        selection.begin([], [], padded_requests=32, most_queries=1)
        view = self.plan(selection, rows=32, table_rows=16)
        assert view.slots.shape == (32, 1, 5)
        assert view.block_table.shape == (32, 1)
        assert view.lengths.shape == (32,)
        assert (view.slots == -1).all()
        assert selection.counts.tolist() == [[0, 0, 0]]

    def test_a_warm_up_batch_has_two_queries_for_each_request_of_an_engine_that_serves_one(self) -> None:
        selection = self.selection()
        selection.begin([], [], padded_requests=16, most_queries=2)
        assert (self.plan(selection, rows=32, table_rows=16).slots == -1).all()

    def test_a_warm_up_batch_leaves_the_seats_alone(self) -> None:
        selection = self.selection()
        selection.begin(["a"], [1], padded_requests=1, most_queries=1)
        self.plan(selection, rows=1, table_rows=1)
        (state,) = selection._states
        before = state.slots[:16].clone(), state.positions[:16].clone()
        selection.begin([], [], padded_requests=32, most_queries=2)
        self.plan(selection, rows=32, table_rows=16)
        assert torch.equal(state.slots[:16], before[0])
        assert torch.equal(state.positions[:16], before[1])
        selection.begin(["a"], [1], padded_requests=1, most_queries=1)
        self.plan(selection, rows=1, table_rows=1)
        assert selection.counts.tolist() == [[1, 0, 0]]

    def test_a_graph_for_more_requests_than_there_are_seats_serves_those_that_have_one(self) -> None:
        selection = self.selection(seats=2)
        for names in (["a"], ["a", "b"], []):
            selection.begin(names, [1] * len(names), padded_requests=24, most_queries=1)
            view = self.plan(selection, rows=24, table_rows=24)
            assert view.block_table.shape == (24, 1)
            assert (view.slots[: len(names)] >= 0).all()
            assert (view.slots[len(names) :] == -1).all()

    def test_a_real_request_without_a_row_of_the_table_is_refused(self) -> None:
        selection = self.selection()
        selection.begin(["a", "b"], [1, 1], padded_requests=2, most_queries=1)
        with pytest.raises(ValueError, match="expected 2 rows and 2 requests by begin"):
            self.plan(selection, rows=2, table_rows=1)

    def test_results_stay_where_they_are(self) -> None:
        selection = self.selection(queries=2)
        places = set()
        for names, counts, padded in ((["a"], [2], 4), (["a", "b"], [1, 2], 4), ([], [], 4)):
            selection.begin(names, counts, padded_requests=padded, most_queries=2)
            view = self.plan(selection, rows=8, table_rows=4)
            places.add(tuple((part.data_ptr(), tuple(part.shape), part.stride()) for part in view))
        assert len(places) == 1

    def test_a_pass_that_failed_between_two_layers_leaves_nothing_that_counts(self) -> None:
        world = World(ALONE, queries=1)
        world.join()
        (tenant,) = world.tenants
        world.run_pass([tenant], [1], 1)
        assert (world.selection.counts[:, 1] > 0).all()
        world.run_pass([tenant], [1], 1)
        kept = world.selection.counts[:, 0].tolist()
        world.selection.begin([tenant.name], [1], padded_requests=1, most_queries=1)
        table = torch.from_numpy(tenant.pages).unsqueeze(0)
        world.selection.plan(0, torch.zeros((1, 9), dtype=torch.int32), torch.tensor([9], dtype=torch.int32), table)
        world.run_pass([tenant], [1], 1)
        assert (world.selection.counts[:, 0] <= 1).all()
        assert max(kept) > 1

    @pytest.mark.parametrize("broken", ["prepare", "resolve"])
    def test_a_first_plan_that_failed_leaves_no_rows_of_who_had_the_seat_before(
        self, monkeypatch: pytest.MonkeyPatch, broken: str
    ) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("out of memory")

        world = World(ALONE, seats=1, queries=1)
        world.select = lambda *_: np.array([[0, 1, 2, 3, *[-1] * 5]], np.int32)  # type: ignore[method-assign]
        world.join()
        (before,) = world.tenants
        world.run_pass([before], [1], 1)
        world.leave(before)
        world.join()
        (tenant,) = world.tenants
        with monkeypatch.context() as patch:
            patch.setattr(device, broken, fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                world.run_pass([tenant], [1], 1)
        world.run_pass([tenant], [1], 1)

    def test_groups_out_of_order_are_refused(self) -> None:
        with pytest.raises(ValueError, match="expected the 3 pools in order"):
            World((IndexGroup((0, 2)), IndexGroup((1,))))

    def test_a_request_beyond_the_seats_is_refused(self) -> None:
        selection = self.selection(seats=1)
        selection.begin(["a"], [1], padded_requests=1, most_queries=1)
        with pytest.raises(PoolExhausted, match="request b: all 1 seats of 128 slots are taken"):
            selection.begin(["a", "b"], [1, 1], padded_requests=2, most_queries=1)
        selection.release("a")
        selection.begin(["b"], [1], padded_requests=1, most_queries=1)

    def test_more_queries_than_the_sizes_say_are_refused(self) -> None:
        selection = self.selection()
        with pytest.raises(ValueError, match="expected at most 16 requests, 1 queries, 32 tokens"):
            selection.begin(["a"], [2], padded_requests=1, most_queries=2)

    def test_layers_come_in_order(self) -> None:
        world = World(SHARED)
        selection = world.selection
        with pytest.raises(ValueError, match="leader 0 has not planned in this pass"):
            selection.arrive(1)
        selection.begin([], [], padded_requests=1, most_queries=1)
        chosen = torch.full((1, 9), -1, dtype=torch.int32)
        tables = torch.zeros(1, dtype=torch.int32), torch.zeros((1, 4), dtype=torch.int32)
        with pytest.raises(ValueError, match="follows layer 0, which plans for it"):
            selection.plan(1, chosen, *tables)
        selection.plan(0, chosen, *tables)
        selection.arrive(0)
        with pytest.raises(ValueError, match=r"layer 4: plans before layers \[1, 2, 3\]"):
            selection.plan(4, chosen, *tables)
        selection.begin([], [], padded_requests=1, most_queries=1)  # a pass that failed is over
        selection.plan(4, chosen, *tables)


def test_what_was_made_in_inference_mode_serves_outside_of_it() -> None:
    world = World(SHARED, queries=2)
    with torch.inference_mode():
        world.build()
    world.run(3)
    with torch.inference_mode():
        world.run(3)
    world.run(3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"slots": 200}, "expected a multiple of 128 of at least 8196"),
        ({"slots": 8192}, "raise selection.slots to 8320"),
        ({"context": 1 << 24}, "expected less than 16777216 tokens"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changed: dict[str, int], message: str) -> None:
    sizes = {"seats": 4, "slots": 8320, "top_k": 2048, "queries": 4, "tokens": 16, "context": 1 << 20}
    sizes["page_tokens"] = 128
    assert DeviceSizes(**sizes).arena_bytes(61, 1152) == 61 * 4 * 8320 * 1152
    with pytest.raises(ValueError, match=message):
        DeviceSizes(**{**sizes, **changed})
