# SPDX-License-Identifier: Apache-2.0
"""resolve over long histories: two implementations in lockstep, rows that are really moved, and faults that show."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.ops import resolve_world
from tests.ops.resolve_cases import Bench, every
from tests.ops.resolve_world import Shape, World, assert_same_results, assert_same_states
from tidal_connector.ops import Implementation, ResolveBuffers, Resolved, Seats, SelectionBatch, SlotState, resolve

EVENTS = {"join", "leave", "spill", "grow", "roll back", "skip", "listed", "hits", "misses", "loads", "evictions"}

shapes = st.builds(
    Shape,
    extent_rows=st.sampled_from([1, 3, 4, 8]),
    extents=st.integers(40, 100),
    width=st.integers(1, 9),
    queries=st.integers(1, 3),
    page_tokens=st.sampled_from([1, 3, 4, 16]),
    eager_rows=st.sampled_from([0, 20, 200]),
)


@pytest.mark.native
@pytest.mark.timeout(400)
@settings(max_examples=25, deadline=None, phases=[Phase.generate])  # a failure names its seed; shrinking takes hours
@given(shape=shapes, seed=st.integers(0, 1 << 32))
def test_both_implementations_agree_bit_for_bit_over_100_000_request_steps(shape: Shape, seed: int) -> None:
    world = World(shape, seed, [(Implementation.REFERENCE, 1), (Implementation.NATIVE, 2)])
    world.run(request_steps=4_000)


@every
def test_every_slot_holds_the_row_that_was_selected(implementation: Implementation) -> None:
    world = World(Shape(), 7, [(implementation, 1)])
    world.run(request_steps=3_000)
    assert world.seen >= EVENTS | {"invalid"}


def swap_two_slots(result: Resolved) -> Resolved:
    slots = result.slots.copy()
    for row in slots:
        some = np.flatnonzero(row >= 0)
        row[some] = np.roll(row[some], 1)
    return result._replace(slots=slots)


def skip_a_miss(result: Resolved) -> Resolved:
    if not len(result.miss_rows):
        return result
    rows, slots = result.miss_rows.copy(), result.miss_slots.copy()
    rows[-1], slots[-1] = rows[0], slots[0]
    return result._replace(
        miss_rows=rows[:-1], miss_slots=slots[:-1], miss_start=np.minimum(result.miss_start, len(rows) - 1)
    )


def fetch_a_neighbour(result: Resolved) -> Resolved:
    return result._replace(miss_rows=np.maximum(result.miss_rows - 1, 0))


def write_elsewhere(result: Resolved) -> Resolved:
    return result._replace(written=np.roll(result.written, 1))


@every
@pytest.mark.parametrize("fault", [swap_two_slots, skip_a_miss, fetch_a_neighbour, write_elsewhere])
def test_a_wrong_plan_is_noticed(
    implementation: Implementation, fault: Callable[[Resolved], Resolved], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(Shape(), 7, [(implementation, 1)])
    world.run(request_steps=200)
    monkeypatch.setattr(resolve_world, "resolve", lambda *args, **kwargs: fault(resolve(*args, **kwargs)))
    with pytest.raises(AssertionError):
        world.run(steps=20)


@every
def test_a_stale_row_is_noticed(implementation: Implementation) -> None:
    """Rows written anew behind the back of the state, which is what the contract of ``start`` is for."""
    world = World(Shape(), 7, [(implementation, 1)])
    world.run(request_steps=200)
    for tenant in world.tenants:
        world.write(tenant, 0, tenant.length)
    with pytest.raises(AssertionError, match="a slot holds another row"):
        world.run(steps=20)


@every
def test_the_order_is_that_of_an_lru_list(implementation: Implementation) -> None:
    """One request against a Python list, which is moved as the textbook says."""
    bench, rng, capacity = Bench(implementation, 16), np.random.default_rng(11), 16
    lru: list[int] = []  # the longest unused first
    for start in range(100, 600):
        selected = [int(p) for p in rng.choice([*rng.integers(0, start, 4), *lru, start], 6)]
        distinct = list(dict.fromkeys(p for p in selected if p < start))
        hits = [p for p in lru if p in distinct]
        misses = [p for p in distinct if p not in lru]
        others = [p for p in lru if p not in distinct]
        room = capacity - len(lru)
        evicted = max(0, 1 + len(misses) - room)
        lru = [*others[evicted:], *hits, *misses, start]
        result = bench.step(start, selected, pages=400)
        assert bench.missed(result) == misses
        assert (result.evictions, result.hits) == (evicted, len(hits) + (start in selected))
        assert [p for p in bench.order() if p >= 0] == lru


def wide(
    requests: int, capacity: int, width: int, context: int, seed: int
) -> tuple[Seats, Callable[[int], SelectionBatch]]:
    """Return seats of ``capacity`` slots, and a function from step to batch with about 90 % hits."""
    rng = np.random.default_rng(seed)
    extents = -(-capacity // 64)
    seats = Seats(
        np.full(requests, capacity, np.int32),
        rng.permutation(extents * requests).astype(np.int32).reshape(requests, extents),
        64,
    )
    pages = rng.permutation(requests * (context // 64 + 1)).astype(np.int32).reshape(requests, -1)
    favourites = np.stack([rng.choice(context - 100, width, replace=False) for _ in range(requests)])

    def batch(step: int) -> SelectionBatch:
        fresh = rng.random(favourites.shape) < 0.1
        favourites[fresh] = rng.integers(0, context - 100, int(fresh.sum()))
        return SelectionBatch(
            rng.permuted(favourites, axis=1).astype(np.int32),
            np.arange(requests + 1, dtype=np.int32),
            np.arange(requests, dtype=np.int32),
            np.full(requests, context - 100 + step, np.int32),
            pages,
            64,
        )

    return seats, batch


@pytest.mark.native
@pytest.mark.parametrize("context", [8 << 10, 1 << 20])
def test_the_sizes_of_a_real_model_by_any_number_of_threads(context: int) -> None:
    """8 requests that select 2,048 of 4,097 slots are work for three threads."""
    seats, batch_of = wide(8, 4097, 2048, context, 3)
    ways = [(Implementation.REFERENCE, 1)] + [(Implementation.NATIVE, threads) for threads in (1, 2, 4)]
    states = [SlotState.empty(8 * 65 * 64, 8) for _ in ways]
    buffers = [ResolveBuffers() for _ in ways]
    hits = misses = 0
    for step in range(6):
        batch = batch_of(step)
        results = [
            resolve(state, seats, batch, threads=threads, buffers=memory, implementation=implementation)
            for state, memory, (implementation, threads) in zip(states, buffers, ways, strict=True)
        ]
        for state, result in zip(states[1:], results[1:], strict=True):
            assert_same_results(results[0], result)
            assert_same_states(states[0], state)
        states[0].check(seats)
        if step:
            hits, misses = hits + results[0].hits, misses + results[0].misses
    assert 0.85 < hits / (hits + misses) < 0.95


@pytest.mark.native
def test_several_threads_may_resolve_states_of_their_own() -> None:
    outcomes: list[list[int]] = [[] for _ in range(4)]

    def run(outcome: list[int]) -> None:
        seats, batch_of = wide(4, 1025, 512, 1 << 16, 5)
        state = SlotState.empty(4 * 17 * 64, 4)
        for step in range(40):
            result = resolve(state, seats, batch_of(step), threads=2, implementation=Implementation.NATIVE)
            outcome += [result.hits, result.misses, result.evictions, int(result.slots.sum())]

    workers = [threading.Thread(target=run, args=(outcome,)) for outcome in outcomes]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert outcomes[1:] == outcomes[:1] * 3
    assert len(outcomes[0]) == 160
