# SPDX-License-Identifier: Apache-2.0
"""What resolve refuses, with which words, and that nothing was changed then."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.resolve_cases import Bench, every
from tidal_connector.errors import NativeOpMissing, PoolExhausted
from tidal_connector.ops import Implementation, native, resolve


@every
def test_a_listed_seat_that_is_too_small_changes_nothing_for_anybody(implementation: Implementation) -> None:
    bench = Bench(implementation, 16, 8)
    bench.step(3, [1, 2])
    before = bench.state.held.copy()
    with pytest.raises(PoolExhausted, match="seat 1: 3 queries that select 2 rows each need 9 slots, it has 8"):
        bench.resolve(bench.batch((0, 4, [[1, 0]]), (1, 20, [[1, 2], [1, 2], [1, 2]])))
    assert (bench.state.held == before).all()
    assert bench.state.length.tolist() == [4, 0]
    bench.resolve(bench.batch((0, 4, [[1, 0]]), (1, 20, [[1, 2], [1, 2]])))


@every
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"selected": [[1]]}, TypeError, "selected: expected a numpy array of int32, got list"),
        ({"selected": np.zeros((2, 3), np.int64)}, TypeError, "selected: expected .* int32, got int64"),
        ({"seat": np.zeros(2, np.int64)}, TypeError, "seat: expected .* int32, got int64"),
        ({"selected": np.zeros(6, np.int32)}, ValueError, r"selected \(6,\): expected 2 dimensions"),
        ({"selected": np.zeros((2, 6), np.int32)[:, ::2]}, ValueError, "selected .* the last one contiguous"),
        ({"pages": np.zeros((2, 8), np.int32)[:, ::2]}, ValueError, "pages .* the last one contiguous"),
        ({"start": np.zeros(1, np.int32)}, ValueError, r"start \(1,\).*: expected 3, 2 and 2"),
        ({"query_start": np.array([0, 2], np.int32)}, ValueError, r"query_start \(2,\).*: expected 3, 2 and 2"),
        ({"pages": np.zeros((1, 4), np.int32)}, ValueError, r"pages \(1, 4\): expected 3, 2 and 2"),
        ({"query_start": np.array([0, 2, 1], np.int32)}, ValueError, "query_start .* expected to rise from 0 to 2"),
        ({"query_start": np.array([0, 3, 2], np.int32)}, ValueError, "query_start .* expected to rise from 0 to 2"),
        ({"query_start": np.array([1, 1, 2], np.int32)}, ValueError, "query_start .* expected to rise from 0 to 2"),
        ({"query_start": np.array([0, 1, 1], np.int32)}, ValueError, "query_start .* expected to rise from 0 to 2"),
        ({"seat": np.array([1, 1], np.int32)}, ValueError, r"seat \[1, 1\]: expected each seat once"),
        ({"seat": np.array([0, 2], np.int32)}, ValueError, r"seat\[1\] = 2: expected one in \[0, 2\)"),
        ({"seat": np.array([-1, 0], np.int32)}, ValueError, r"seat\[0\] = -1: expected one in \[0, 2\)"),
        ({"start": np.array([0, -1], np.int32)}, ValueError, r"start\[1\] = -1: expected a position"),
        ({"start": np.array([0, (1 << 31) - 1], np.int32)}, ValueError, r"start\[1\] = 2147483647"),
        ({"page_tokens": 0}, ValueError, "page_tokens = 0"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_by_name(
    implementation: Implementation, change: dict[str, object], error: type[Exception], text: str
) -> None:
    bench = Bench(implementation, 8, 8)
    batch = bench.batch((0, 4, [[1, 2, 3]]), (1, 4, [[1, 2, 3]]))
    for name, value in change.items():
        setattr(batch, name, value)
    with pytest.raises(error, match=text):
        bench.resolve(batch)
    assert (bench.state.held == -1).all()


@every
@pytest.mark.parametrize(
    ("capacity", "extents", "text"),
    [
        (8, [0, -1], "seat 0: capacity 8 is not covered by extents"),
        (8, [0, 4], "seat 0: extents .* reach beyond the arena's 16 rows"),
        (8, [1 << 30, 0], "seat 0: extents .* reach beyond the arena's 16 rows"),
        (9, [0, 1], "seat 0: capacity 9 is not covered by extents"),
        (-1, [0, 1], "seat 0: capacity -1 is not covered by extents"),
    ],
)
def test_seats_outside_the_arena_are_refused(
    implementation: Implementation, capacity: int, extents: list[int], text: str
) -> None:
    bench = Bench(implementation, 8, 8)
    bench.seats.capacity[0] = capacity
    bench.seats.extents[0] = extents
    with pytest.raises(ValueError, match=text):
        resolve(bench.state, bench.seats, bench.batch((0, 4, [[1]])), implementation=implementation)


@every
@pytest.mark.parametrize("row", [-1, 8, 1 << 30])
def test_a_state_that_points_outside_the_arena_is_refused(implementation: Implementation, row: int) -> None:
    bench = Bench(implementation, 8)
    bench.step(20, [1, 2])
    bench.state.order[3] = row
    with pytest.raises(ValueError, match="seat 0: its order is broken"):
        bench.step(21, [1, 2])


@every
def test_threads_are_at_least_one(implementation: Implementation) -> None:
    bench = Bench(implementation, 8)
    with pytest.raises(ValueError, match="threads = 0"):
        resolve(bench.state, bench.seats, bench.batch(), threads=0, implementation=implementation)


@pytest.mark.native
def test_a_state_that_lists_a_row_twice_is_refused_before_it_leads_outside() -> None:
    bench = Bench(Implementation.NATIVE, 8)
    bench.step(20, [1, 2])
    bench.state.order[:] = bench.state.order[bench.seats.rows(0)[7]]  # the row of the newest token, eight times
    with pytest.raises(ValueError, match="contradicts itself"):
        resolve(bench.state, bench.seats, bench.batch((0, 21, [[20, 3]])), implementation=Implementation.NATIVE)


def test_asking_for_the_native_module_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NativeOpMissing("no such module")

    monkeypatch.setattr(native, "load", missing)
    with pytest.raises(NativeOpMissing, match="no such module"):
        Bench(Implementation.NATIVE, 8).step(3, [1])
