# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidal_connector.selection.seats import NO_SEAT, SeatBook

TOP_K, ROWS = 8, 4


class Forgotten:
    def __init__(self) -> None:
        self.rows: set[int] = set()
        self.seats: list[int] = []

    def forget_rows(self, rows: np.ndarray[Any, Any]) -> None:
        self.rows.update(rows.tolist())

    def forget_seat(self, seat: int) -> None:
        self.seats.append(seat)


def book(extents: int, requests: int = 4, base: int = 16, most: int = 16) -> tuple[SeatBook, Forgotten]:
    forgotten = Forgotten()
    made = SeatBook(
        extents=extents,
        extent_rows=ROWS,
        requests=requests,
        top_k=TOP_K,
        base_rows=base,
        most_rows=most,
        forget_rows=forgotten.forget_rows,
        forget_seat=forgotten.forget_seat,
    )
    return made, forgotten


def test_a_short_request_holds_what_its_context_needs_and_grows() -> None:
    made, forgotten = book(extents=8)
    seat = made.hold("a", 5, 1)
    assert made.seats.capacity[seat] == 8
    assert made.hold("a", 8, 1) == seat
    assert made.rows_used == 8
    before = set(forgotten.rows)
    assert made.hold("a", 9, 1) == seat
    assert made.seats.capacity[seat] == 12
    assert len(forgotten.rows - before) == ROWS  # what the new extent held belongs to nobody now
    assert made.hold("a", 1000, 1) == seat
    assert made.seats.capacity[seat] == 16
    made.check()


def test_without_room_there_is_no_seat_and_nothing_is_held() -> None:
    made, _ = book(extents=4)
    assert made.hold("a", 100, 1) != NO_SEAT
    assert made.hold("b", 100, 1) == NO_SEAT
    assert list(made.seated()) == ["a"]
    made.release("a")
    assert made.hold("b", 100, 1) != NO_SEAT
    made.check()


def test_less_than_the_slots_is_better_than_none() -> None:
    made, _ = book(extents=7)
    assert made.hold("a", 100, 1) != NO_SEAT
    seat = made.hold("b", 100, 1)
    assert made.seats.capacity[seat] == 12  # enough for a selection of 8 and the row of the step


def test_a_request_that_computes_more_tokens_than_its_seat_can_serve_gives_it_up() -> None:
    made, forgotten = book(extents=8)
    seat = made.hold("a", 100, 1)
    assert made.hold("a", 103, 3) == NO_SEAT
    assert forgotten.seats == [seat]
    assert made.rows_used == 0


def test_adaptive_seats_hold_the_context_until_others_need_the_room() -> None:
    made, forgotten = book(extents=12, most=400)
    first = made.hold("a", 40, 1)
    assert made.seats.capacity[first] == 40
    second = made.hold("b", 40, 1)
    assert made.seats.capacity.tolist()[second] == 32  # all that is free once the first is down to its share
    assert made.seats.capacity[first] == 16
    assert made.spills == 1
    assert forgotten.seats == []  # a seat in place keeps what its remaining slots hold
    third = made.hold("c", 4, 1)
    assert made.seats.capacity[third] == 4
    assert made.seats.capacity[second] == 16
    assert made.spills == 2
    assert forgotten.seats == [second]  # it did not hold its whole context any more, so its order is void
    made.check()


class Book(RuleBasedStateMachine):
    """Requests come, grow, shrink and go; every extent has one owner, and whoever gets a seat can be served from it."""

    def __init__(self) -> None:
        super().__init__()
        self.book, self.forgotten = book(extents=20, requests=5, base=24, most=96)
        self.length: dict[str, int] = {}
        self.next = 0

    @rule(length=st.integers(1, 150))
    def join(self, length: int) -> None:
        self.next += 1
        self.length[f"r{self.next}"] = length

    @precondition(lambda self: self.length)
    @rule(grow=st.integers(1, 3), queries=st.integers(1, 3))
    def step(self, grow: int, queries: int) -> None:
        seated = {}
        for request in self.length:
            self.length[request] += grow
            seat = self.book.hold(request, self.length[request], queries)
            if seat != NO_SEAT:
                seated[request] = seat
        assert len(set(seated.values())) == len(seated)
        for request, seat in seated.items():
            capacity = int(self.book.seats.capacity[seat])
            assert capacity >= min(self.length[request], queries * (TOP_K + 1))

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.length)))
        del self.length[request]
        self.book.release(request)

    @invariant()
    def consistent(self) -> None:
        self.book.check()
        assert set(self.book.seated()) <= set(self.length)


Book.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBook = Book.TestCase
