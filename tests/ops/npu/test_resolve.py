# SPDX-License-Identifier: Apache-2.0
"""resolve on the device against the definition: every plan, every slot, over long histories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402 - after torch is known to be there
from hypothesis import Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.ops.npu import device_world  # noqa: E402
from tests.ops.npu.device_world import DeviceWorld, equal_seats  # noqa: E402
from tests.ops.resolve_world import Shape  # noqa: E402
from tidal_connector.ops import Implementation, SelectionBatch, SlotState  # noqa: E402
from tidal_connector.ops import resolve as define  # noqa: E402
from tidal_connector.ops.npu.resolve import prepare, resolve  # noqa: E402
from tidal_connector.ops.npu.staging import BatchStaging, StagedRequest  # noqa: E402
from tidal_connector.ops.npu.state import FOREVER, POSITIONS, DeviceBatch, DeviceResolved, DeviceSlotState  # noqa: E402
from tidal_connector.ops.slots import Seats  # noqa: E402

shapes = st.builds(
    equal_seats,
    seats=st.integers(1, 6),
    slots=st.integers(4, 40),
    width=st.integers(1, 9),
    queries=st.integers(1, 3),
    page_tokens=st.sampled_from([1, 3, 4, 16]),
    context=st.integers(40, 200),
)


@pytest.mark.timeout(400)
@settings(max_examples=12, deadline=None, phases=[Phase.generate])  # a failure names its seed; shrinking takes hours
@given(shape=shapes, seed=st.integers(0, 1 << 32))
def test_plans_and_slots_are_those_of_the_definition_over_long_histories(shape: Shape, seed: int) -> None:
    world = DeviceWorld(shape, seed)
    world.run(request_steps=300)


def test_the_world_has_all_that_can_happen_to_a_seat() -> None:
    world = DeviceWorld(equal_seats(seats=4, slots=20, width=5, queries=3, page_tokens=4, context=120), 7)
    world.run(request_steps=600)
    assert world.seen >= {"join", "leave", "roll back", "skip", "listed", "hits", "misses", "evictions", "invalid"}


def forget_evictions(world: DeviceWorld) -> None:
    world.state.positions.fill_(POSITIONS)


def forget_an_order(world: DeviceWorld) -> None:
    world.state.slots[:] = world.state.slots.flip(1)
    world.state.positions[:] = world.state.positions.flip(1)


def trust_another_generation(world: DeviceWorld) -> None:
    for tenant in world.tenants:
        world.generations[tenant.seat] += 1


@pytest.mark.parametrize("fault", [forget_evictions, forget_an_order, trust_another_generation])
def test_a_state_that_was_tampered_with_is_noticed(fault: Callable[[DeviceWorld], None]) -> None:
    world = DeviceWorld(equal_seats(seats=3, slots=20, width=5, queries=2, page_tokens=4, context=120), 3)
    world.run(request_steps=100)
    fault(world)
    with pytest.raises(AssertionError):
        world.run(steps=20)


def test_rejected_rows_that_are_not_forgotten_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(state: DeviceSlotState, *rest: Any) -> Any:
        held = state.positions.clone()
        slots = resolve(state, *rest)
        state.positions.copy_(torch.where(state.positions == POSITIONS, held, state.positions))
        return slots

    monkeypatch.setattr(device_world, "resolve", forgetful)
    world = DeviceWorld(equal_seats(seats=3, slots=30, width=5, queries=3, page_tokens=4, context=120), 3)
    with pytest.raises(AssertionError):
        world.run(request_steps=400)


class Bench:
    """One request in one seat."""

    def __init__(self, slots: int = 16, width: int = 4, queries: int = 2) -> None:
        self.state = DeviceSlotState(2, slots, "cpu")
        self.batch = DeviceBatch(2, 3, queries, 8, "cpu")
        self.out = DeviceResolved(self.batch, width, slots, 1, "cpu")
        self.table = torch.arange(40, dtype=torch.int32).repeat(3, 1)
        self.slots = torch.empty(0)

    def step(self, length: int, *selected: list[int], stable: int = FOREVER, generation: int = 1) -> list[int]:
        """Resolve, and return hits, misses, evictions."""
        request = StagedRequest(1, generation, stable, len(selected))
        BatchStaging(self.batch).fill([request], 1, self.batch.most_queries)
        lengths = torch.tensor([length], dtype=torch.int32)
        shared = prepare(self.batch, lengths, self.table, 4, self.out)
        self.slots = resolve(self.state, self.batch, shared, torch.tensor(selected, dtype=torch.int32), self.out)
        self.state.check()
        hits, total, displaced = self.out.statistics[0, 0].tolist()
        return [hits, total - hits, max(displaced, 0)]


def test_rows_from_the_stable_position_on_are_fetched_again() -> None:
    bench = Bench()
    assert bench.step(20, [3, 5, 9, 12]) == [0, 4, 0]
    assert bench.step(21, [3, 5, 9, 12]) == [4, 0, 0]
    assert bench.step(30, [3, 5, 9, 12], stable=9) == [2, 2, 0]
    assert bench.step(31, [3, 5, 9, 12]) == [4, 0, 0]


def test_another_generation_finds_the_seat_empty() -> None:
    bench = Bench()
    assert bench.step(20, [3, 5, 9, 12]) == [0, 4, 0]
    assert bench.step(21, [3, 5, 9, 12], generation=2) == [0, 4, 0]
    assert bench.step(22, [3, 5, 9, 12], generation=2) == [4, 0, 0]


def test_a_new_row_beyond_the_pages_is_not_fetched() -> None:
    bench = Bench()
    bench.step(162, [3, 5, 9, 12], [3, 5, 161, 160])
    rows, _ = bench.out.fetch(1, 2)
    assert rows[0, :2].tolist() == [-1, -1]
    assert bench.slots[1].tolist()[2:] == [-1, -1]


def test_a_million_tokens_of_context_cost_no_more_than_a_thousand() -> None:
    """Positions near the limit of float32, pages that a table of a million tokens has."""
    bench = Bench()
    bench.table = torch.arange(1 << 22, dtype=torch.int32).unsqueeze(0)
    last = POSITIONS - 1
    assert bench.step(last + 1, [last - 1, last - 2, last, 5]) == [1, 3, 0]
    assert bench.step(last + 1, [last - 1, last - 2, last - 3, last]) == [3, 1, 0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"selected": torch.zeros(2, 4, dtype=torch.int64)}, "selected: dtype torch.int64: expected int32"),
        ({"selected": torch.zeros(2, 5, dtype=torch.int32)}, r"selected: shape \(2, 5\): expected up to 8 rows of 4"),
        ({"selected": torch.zeros(9, 4, dtype=torch.int32)}, r"selected: shape \(9, 4\)"),
        ({"lengths": torch.zeros(1, dtype=torch.int32)}, "lengths: 1 rows: expected 2"),
        ({"table": torch.zeros(1, 3, dtype=torch.int32)}, "block_table: 1 rows: expected 2"),
        ({"table": torch.zeros(6, dtype=torch.int32)}, r"block_table: shape .*: expected 2 dimensions"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    bench = Bench()
    BatchStaging(bench.batch).fill([], 2, 2)
    given = {
        "selected": torch.zeros(2, 4, dtype=torch.int32),
        "lengths": torch.zeros(2, dtype=torch.int32),
        "table": bench.table,
        **changed,
    }

    def call() -> None:
        shared = prepare(bench.batch, given["lengths"], given["table"], 4, bench.out)
        resolve(bench.state, bench.batch, shared, given["selected"], bench.out)

    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_seats_that_a_step_could_overflow_are_refused() -> None:
    with pytest.raises(ValueError, match="2 queries that select 4 rows each need 10 slots"):
        Bench(slots=9)


@pytest.mark.parametrize("queries", [0, 3])
def test_a_request_without_queries_or_with_too_many_is_refused(queries: int) -> None:
    bench = Bench()
    with pytest.raises(ValueError, match=rf"queries\[0\] = {queries}: expected 1 to 2"):
        BatchStaging(bench.batch).fill([StagedRequest(1, 1, FOREVER, queries)], 1, 2)


def test_the_sizes_of_a_real_model() -> None:
    """4 requests that select 2,048 of 4,224 slots, 90 % of them again."""
    requests, slots, width, context = 4, 4224, 2048, 1 << 17
    rng = np.random.default_rng(3)
    seats = Seats(np.full(requests, slots, np.int32), np.arange(requests, dtype=np.int32)[:, None].copy(), slots)
    definition = SlotState.empty(requests * slots, requests)
    definition.listed[:] = 1
    definition.order[:] = np.arange(requests * slots)
    state = DeviceSlotState(requests, slots, "cpu")
    batch = DeviceBatch(requests, requests, 1, requests, "cpu")
    out = DeviceResolved(batch, width, slots, 1, "cpu")
    pages = rng.permutation(requests * (context // 128)).astype(np.int32).reshape(requests, -1)
    favourites = np.stack([rng.choice(context - 100, width, replace=False) for _ in range(requests)]).astype(np.int32)
    for step in range(4):
        fresh = rng.random(favourites.shape) < 0.1
        favourites[fresh] = rng.integers(0, context - 100, int(fresh.sum()))
        start = np.full(requests, context - 100 + step, np.int32)
        wanted = define(
            definition,
            seats,
            SelectionBatch(
                favourites,
                np.arange(requests + 1, dtype=np.int32),
                np.arange(requests, dtype=np.int32),
                start,
                pages,
                128,
            ),
            implementation=Implementation.REFERENCE,
        )
        BatchStaging(batch).fill([StagedRequest(seat, 1, FOREVER, 1) for seat in range(requests)], requests, 1)
        shared = prepare(batch, torch.from_numpy(start + 1), torch.from_numpy(pages), 128, out)
        found = resolve(state, batch, shared, torch.from_numpy(favourites), out)
        hits, total, displaced = out.statistics[0].clamp(min=0).sum(0).tolist()
        assert [hits, total - hits, displaced] == [wanted.hits, wanted.misses, wanted.evictions]
        assert found.tolist() == (wanted.slots % slots).tolist()
        assert state.held().flatten().tolist() == definition.held.tolist()
        assert out.count.tolist() == (np.diff(wanted.miss_start) + 1).tolist()


# What CANN's operator library runs on the AI cores of A2 and A3, of the operators whose dtypes are few there; any other
# dtype goes to the AI CPU, which takes some hundred microseconds for each call.
ON_THE_AI_CORES = {
    "sort": {torch.float32},
    "cumsum": {torch.int32},
    "scatter_": {torch.int32, torch.float32},
    "gather": {torch.int32, torch.float32},
    "masked_fill": {torch.int32, torch.float32},
    "masked_fill_": {torch.int32, torch.float32},
    "index_copy_": {torch.int32, torch.float32},
    "index_select": {torch.int32, torch.float32},
    "div": {torch.int32},
    "neg": {torch.int32},
}
NEVER = {"nonzero", "masked_select", "_unique2", "searchsorted", "cummax", "_local_scalar_dense", "index", "index_put_"}


def test_only_operators_that_run_on_the_ai_cores_are_used() -> None:
    bench = Bench()
    with Trace() as trace:
        bench.step(20, [3, 5, 9, 12], [4, 4, 2, -1])
    # Not what only the bench does, to look at the state and the counts.
    called = [(name, dtype) for name, dtype in trace.calls if dtype is not None]
    assert not {name for name, _ in called} & NEVER
    assert {"sort", "cumsum", "scatter_", "gather", "index_copy_"} <= {name for name, _ in called}, "the trace is empty"
    assert [call for call in called if call[1] not in ON_THE_AI_CORES.get(call[0], {call[1]})] == []


class Trace(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes each operator with the dtype of its first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, object]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        first = next((value for value in args if isinstance(value, torch.Tensor)), None)
        self.calls.append((func.overloadpacket.__name__, None if first is None else first.dtype))
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_by_the_host_and_no_shape_depends_on_data() -> None:
    """Tensors on ``meta`` have no values: whatever asks for one, or makes a shape of one, raises."""
    state, batch = DeviceSlotState(2, 16, "meta"), DeviceBatch(2, 3, 2, 8, "meta")
    out = DeviceResolved(batch, 4, 16, 1, "meta")
    selected, lengths, table = (torch.zeros(s, dtype=torch.int32, device="meta") for s in ((6, 4), (3,), (3, 40)))
    shared = prepare(batch, lengths, table, 4, out)
    assert resolve(state, batch, shared, selected, out).shape == (6, 4)
