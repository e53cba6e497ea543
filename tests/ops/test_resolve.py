# SPDX-License-Identifier: Apache-2.0
"""What resolve decides, case by case, by the definition and by the native implementation."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.resolve_cases import Bench, every
from tidal_connector.ops import Implementation, ResolveBuffers, resolve


@every
def test_a_request_in_place_fetches_what_it_selects_once(implementation: Implementation) -> None:
    bench = Bench(implementation, 16)
    first = bench.step(9, [3, 9, 0])
    assert bench.missed(first) == [3, 0]
    assert (first.hits, first.misses, first.loads, first.evictions, first.invalid) == (1, 2, 0, 0, 0)
    rows = bench.seats.rows(0)
    assert first.slots.tolist() == [[rows[3], rows[9], rows[0]]]
    assert first.written.tolist() == [rows[9]]
    assert first.miss_slots.tolist() == [rows[3], rows[0]]
    second = bench.step(10, [0, 9, 10])
    assert (second.hits, second.misses, len(second.miss_rows)) == (3, 0, 0)


@every
def test_a_short_request_touches_the_pool_in_its_first_step_only(implementation: Implementation) -> None:
    bench = Bench(implementation, 16)
    first = bench.step(8, [7, 2, 7], eager_rows=8)
    assert bench.missed(first) == list(range(8))
    assert (first.hits, first.misses, first.loads) == (0, 2, 6)
    for start in range(9, 15):  # beyond eager_rows, too
        later = bench.step(start, [start, 0, start - 1], eager_rows=8)
        assert (later.hits, later.misses, later.loads) == (3, 0, 0)
    assert bench.state.filled[0] == 15


@every
def test_a_row_selected_before_is_not_loaded_again(implementation: Implementation) -> None:
    bench = Bench(implementation, 16)
    bench.step(8, [5, 1, 8])
    assert bench.missed(bench.step(9, [1, 2, -1], eager_rows=9)) == [0, 2, 3, 4, 6, 7]


@every
def test_eager_loading_ends_with_the_pages(implementation: Implementation) -> None:
    bench = Bench(implementation, 16)
    assert bench.missed(bench.step(9, [0], eager_rows=9, pages=3)) == [0, 1, 2, 3, 4, 5]
    assert bench.missed(bench.step(10, [0], eager_rows=10, pages=4)) == [6, 7]


@every
def test_a_request_that_outgrows_its_seat_is_listed_and_takes_empty_slots_first(
    implementation: Implementation,
) -> None:
    bench = Bench(implementation, 8)
    bench.step(6, [4, 1])
    bench.step(7, [4, 5])
    assert bench.held() == [-1, 1, -1, -1, 4, 5, 6, 7]
    result = bench.step(8, [4, 2])
    assert bench.state.listed[0] == 1
    rows = bench.seats.rows(0)
    assert result.written.tolist() == [rows[0]]
    assert result.miss_slots.tolist() == [rows[2]]
    assert bench.order() == [-1, 1, 5, 6, 7, 4, 2, 8]
    assert result.evictions == 0


@every
def test_rows_that_were_taken_back_are_not_listed(implementation: Implementation) -> None:
    bench = Bench(implementation, 8)
    bench.step(6, [1], [1])
    bench.step(4, [1])
    assert bench.missed(bench.step(20, [4, 6, 7, 1])) == [6, 7]
    assert bench.order()[:2] == [-1, -1]


@every
def test_the_longest_unused_rows_make_room(implementation: Implementation) -> None:
    bench = Bench(implementation, 8)
    for start in range(8):
        bench.step(start, [0, 1])
    assert bench.step(8, [0, 1]).evictions == 1
    assert bench.order() == [3, 4, 5, 6, 7, 0, 1, 8]
    result = bench.step(9, [5, 2])
    assert (result.hits, result.misses, result.evictions) == (1, 1, 2)
    # Position 3 made room for the new row, 4 for the miss; hits keep their old order, misses follow, then the new row.
    assert bench.order() == [6, 7, 0, 1, 8, 5, 2, 9]


@every
def test_a_step_never_evicts_what_it_selects(implementation: Implementation) -> None:
    bench = Bench(implementation, 8)
    for start in range(8):
        bench.step(start, [0, 1, 2, 3, 4, 5, 6])
    result = bench.step(8, [0, 1, 2, 3, 4, 5, 6])
    assert (result.hits, result.misses, result.evictions) == (7, 0, 1)
    assert sorted(bench.held()) == [0, 1, 2, 3, 4, 5, 6, 8]


@every
@pytest.mark.parametrize("capacity", [16, 8])
def test_rows_written_in_a_step_are_hits_of_the_step(implementation: Implementation, capacity: int) -> None:
    bench = Bench(implementation, capacity)
    result = bench.step(10, [10, 0, -1], [11, 10, 0])
    assert (result.hits, result.misses) == (2, 1)
    assert result.slots[0, 0] == result.slots[1, 1] == result.written[0]
    assert result.slots[1, 0] == result.written[1]
    assert result.slots[0, 1] == result.slots[1, 2] == result.miss_slots[0]


@every
@pytest.mark.parametrize("capacity", [16, 8])
def test_what_is_no_position_is_masked_and_counted(implementation: Implementation, capacity: int) -> None:
    bench = Bench(implementation, capacity)
    wild = [-1, -2, 11, 12, 1 << 30, (1 << 31) - 1, -(1 << 31)]
    for width in range(1, len(wild) + 1):
        result = bench.step(10, wild[:width])
        assert (result.slots == -1).all()
        assert result.invalid == width - 1
        assert result.hits == result.misses == 0


@every
@pytest.mark.parametrize("capacity", [16, 8])
def test_a_query_does_not_see_those_after_it(implementation: Implementation, capacity: int) -> None:
    result = Bench(implementation, capacity).step(10, [11, 10, 9], [11, 10, 9])
    assert (result.slots >= 0).tolist() == [[False, True, True], [True, True, True]]
    assert result.invalid == 1


@every
@pytest.mark.parametrize("capacity", [16, 8])
def test_positions_beyond_the_pages_are_invalid(implementation: Implementation, capacity: int) -> None:
    result = Bench(implementation, capacity).step(10, [5, 6, 10, 9, 0], pages=3)
    assert (result.slots[0] >= 0).tolist() == [True, False, False, False, True]
    assert (result.invalid, result.misses) == (3, 2)


@every
@pytest.mark.parametrize("capacity", [16, 8])
def test_duplicates_count_once(implementation: Implementation, capacity: int) -> None:
    result = Bench(implementation, capacity).step(10, [4, 10, 4, 10, 4, 4, 10])
    assert (result.hits, result.misses, len(result.miss_rows)) == (1, 1, 1)
    assert len(set(result.slots[0].tolist())) == 2


@every
@pytest.mark.parametrize("capacity", [16, 8])
def test_tokens_that_were_taken_back_are_stale(implementation: Implementation, capacity: int) -> None:
    bench = Bench(implementation, capacity)
    bench.step(9, [7, -1], [8, -1])
    again = bench.step(8, [8, 7])  # position 8 comes anew
    assert (again.hits, again.misses) == (2, 0)
    assert again.slots[0, 0] == again.written[0]
    far = bench.step(12, [9, 8])  # position 9 was of the step that was taken back
    assert bench.missed(far) == [9]


@every
@pytest.mark.parametrize("capacity", [16, 8])
def test_a_request_without_queries_forgets_what_was_taken_back(implementation: Implementation, capacity: int) -> None:
    bench = Bench(implementation, capacity)
    bench.step(9, [7, 8])
    result = bench.resolve(bench.batch((0, 8, [])))
    assert result.slots.shape == (0, 3)
    assert bench.missed(bench.step(10, [7, 8])) == [8]


@every
def test_a_seat_that_lost_slots_keeps_the_rows_in_the_others(implementation: Implementation) -> None:
    bench = Bench(implementation, 16)
    bench.step(11, [2, 9], eager_rows=0)
    bench.seats.capacity[0] = 8
    result = bench.step(12, [2, 9])
    assert bench.state.listed[0] == 1
    assert (result.hits, bench.missed(result)) == (1, [9])


@every
def test_a_seat_in_place_grows(implementation: Implementation) -> None:
    bench = Bench(implementation, 16)
    bench.state.held[:] = 9  # of requests that are gone
    bench.seats.capacity[0] = 8
    bench.state.reset(bench.seats, 0)
    bench.step(7, [3])
    bench.state.forget(bench.seats.extents[0, 2:3, None] * 4 + np.arange(4))
    bench.seats.capacity[0] = 12
    bench.step(8, [3])
    assert bench.state.listed[0] == 0
    assert bench.missed(bench.step(11, [9, 3])) == [9]


@every
def test_each_request_has_its_part_of_the_misses(implementation: Implementation) -> None:
    bench = Bench(implementation, 8, 16, 16)
    result = bench.resolve(bench.batch((1, 3, [[1, 0]]), (0, 20, [[5, 6]]), (2, 9, [[9, -1]])))
    assert result.miss_start.tolist() == [0, 2, 4, 4]
    assert result.miss_rows.tolist() == [201, 200, 328 + 5, 328 + 6]
    for index, seat in enumerate((1, 0, 2)):
        own = set(bench.seats.rows(seat).tolist())
        mine = slice(result.miss_start[index], result.miss_start[index + 1])
        assert own.issuperset([*result.miss_slots[mine].tolist(), int(result.written[index])])


@every
def test_nothing_to_do(implementation: Implementation) -> None:
    bench = Bench(implementation, 8)
    empty = bench.resolve(bench.batch())
    assert (empty.slots.shape, empty.miss_start.tolist(), len(empty.miss_rows)) == ((0, 3), [0], 0)
    narrow = bench.step(20, [])
    assert narrow.slots.shape == (1, 0)
    assert len(narrow.written) == 1


@every
def test_buffers_are_used_again_and_grow(implementation: Implementation) -> None:
    bench, buffers = Bench(implementation, 64, 64), ResolveBuffers()

    def run(*requests: tuple[int, int, list[list[int]]]) -> np.ndarray:
        batch = bench.batch(*requests)
        return resolve(
            bench.state, bench.seats, batch, eager_rows=60, buffers=buffers, implementation=implementation
        ).miss_rows

    assert run((0, 5, [[1, 2]])).tolist() == [200, 201, 202, 203, 204]
    assert len(run((0, 6, [[1, 2]]), (1, 60, [[4, 5]]))) == 60
    kept = buffers.slots
    assert len(run((1, 61, [[4, 5]]))) == 0
    assert buffers.slots is kept
