# SPDX-License-Identifier: Apache-2.0
"""Seats and the state of their slots: what they take, what reset forgets, and what check finds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.ops.resolve_cases import Bench, every
from tidal_connector.ops import Implementation, Seats, SlotState


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_slots_lie_in_extents() -> None:
    seats = Seats(int32(5, 0), np.array([[3, 1, -1], [-1, -1, -1]], np.int32), 3)
    assert seats.rows(0).tolist() == [9, 10, 11, 3, 4]
    assert seats.rows(1).tolist() == []


def test_the_state_of_a_slot_takes_8_bytes_and_none_of_it_follows_the_context() -> None:
    small, large = SlotState.empty(1000, 1), SlotState.empty(2000, 1)
    arrays = ("held", "order", "listed", "filled", "length")
    sizes = [sum(getattr(state, name).nbytes for name in arrays) for state in (small, large)]
    assert sizes == [8_009, 16_009]


@every
@pytest.mark.parametrize("start", [3, 30])
def test_after_a_reset_nothing_of_a_seat_is_left(implementation: Implementation, start: int) -> None:
    bench = Bench(implementation, 8, 8)
    both = bench.batch((0, start, [[1, 2]]), (1, start, [[1, 2]]))
    bench.resolve(both)
    bench.state.reset(bench.seats, 0)
    assert bench.held(0) == [-1] * 8
    assert [bench.state.listed[0], bench.state.filled[0], bench.state.length[0]] == [0, 0, 0]
    again = bench.resolve(both)
    assert again.miss_start.tolist() == [0, 2, 2]


def test_a_reset_leaves_rows_of_others_alone_where_extents_are_missing() -> None:
    bench = Bench(Implementation.REFERENCE, 8, 8)
    bench.seats.extents[0] = -1
    with pytest.raises(ValueError, match="seat 0: capacity 8 is not covered"):
        bench.state.reset(bench.seats, 0)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Seats([4], np.zeros((1, 1), np.int32), 4), TypeError, "capacity: expected .* int32, got list"),
        (lambda: Seats(int32(4), np.zeros((1, 1)), 4), TypeError, "extents: expected .* int32, got float64"),
        (lambda: Seats(int32(4, 4), np.zeros((1, 1), np.int32), 4), ValueError, "expected .seats."),
        (lambda: Seats(int32(4), np.zeros((1, 1), np.int32), 0), ValueError, "extent_rows 0"),
        (lambda: Seats(int32(4), np.zeros((1, 4), np.int32)[:, ::2], 4), ValueError, "extents .* contiguous"),
        (
            lambda: SlotState(int32(1), int32(1, 2), np.zeros(1, np.uint8), int32(0), int32(0)),
            ValueError,
            r"held \(1,\), order \(2,\)",
        ),
        (lambda: SlotState(int32(1), int32(1), int32(0), int32(0), int32(0)), TypeError, "listed: .* uint8, got int32"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(
    make: Callable[[], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make()


def listed() -> Bench:
    bench = Bench(Implementation.REFERENCE, 8, 8)
    for start in range(20, 30):
        bench.step(start, [start - 3, 1, 2])
    return bench


def in_place() -> Bench:
    bench = Bench(Implementation.REFERENCE, 8, 8)
    bench.step(5, [1, 2], eager_rows=8)
    return bench


def swap(bench: Bench, one: int, other: int) -> None:
    rows = bench.seats.rows(0)
    bench.state.order[rows[[one, other]]] = bench.state.order[rows[[other, one]]]


@pytest.mark.parametrize(
    ("bench", "damage", "text"),
    [
        (listed, lambda b: b.state.held.__setitem__(b.seats.rows(0), 7), "holds a position twice"),
        (listed, lambda b: b.state.held.__setitem__(b.seats.rows(0)[0], 30), "a position beyond its length"),
        (listed, lambda b: b.state.order.__setitem__(b.seats.rows(0)[:2], 3), "order does not list its rows once"),
        (listed, lambda b: b.seats.capacity.__setitem__(0, 7), "order does not list its rows once"),
        (listed, lambda b: b.state.held.__setitem__(b.state.order[b.seats.rows(0)[4]], -1), "an empty row behind"),
        (in_place, lambda b: b.state.held.__setitem__(b.seats.rows(0)[:2], [1, 0]), "out of its place"),
        (in_place, lambda b: b.state.held.__setitem__(b.seats.rows(0)[2], -1), "does not hold all that filled says"),
        (in_place, lambda b: b.state.filled.__setitem__(0, 7), "filled is beyond its length"),
        (in_place, lambda b: b.seats.extents.__setitem__((1, 0), b.seats.extents[0, 0]), "extent 3 is seat 0's too"),
        (in_place, lambda b: b.seats.extents.__setitem__((1, 0), 4), "extent 4 is outside the arena"),
    ],
)
def test_check_finds_what_is_broken(bench: Callable[[], Bench], damage: Callable[[Bench], None], text: str) -> None:
    whole = bench()
    whole.state.check(whole.seats)
    damage(whole)
    with pytest.raises(AssertionError, match=text):
        whole.state.check(whole.seats)


def test_check_lets_an_order_be_an_order() -> None:
    bench = listed()
    swap(bench, 6, 7)
    bench.state.check(bench.seats)
