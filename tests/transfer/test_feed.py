# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidal_connector.transfer.feed import Feed
from tidal_connector.transfer.plane import Receipt, Ticket
from tidal_connector.transfer.runs import Run

A, B = Ticket(1), Ticket(2)


def bytes_of(count: int) -> list[Run]:
    return [Run(100, 900, count)]


def test_the_window_bounds_what_is_in_flight() -> None:
    feed = Feed(window=2, largest=10)
    feed.add(A, bytes_of(35), 0.0)
    first, second = feed.next(1.0), feed.next(1.0)
    assert first is not None
    assert second is not None
    assert feed.next(1.0) is None
    feed.ended(first.key, "", 2.0)
    third = feed.next(2.0)
    assert third is not None
    assert (third.run.source, third.run.length) == (120, 10)


@pytest.mark.parametrize(("row", "in_flight"), [(4, 8), (10, 4), (16, 3), (100, 2)])
def test_more_of_very_small_descriptors_are_in_flight(row: int, in_flight: int) -> None:
    feed = Feed(window=2, largest=640)
    feed.add(A, [Run(1000 * n, 1000 * n, row) for n in range(1, 50)], 0.0)
    while feed.next(1.0) is not None:
        pass
    assert feed.in_flight == in_flight


def test_a_ticket_ends_with_its_last_descriptor() -> None:
    feed = Feed(window=4, largest=10)
    feed.add(A, bytes_of(15), 0.0)
    first, second = feed.next(1.0), feed.next(1.5)
    assert first is not None
    assert second is not None
    feed.ended(second.key, "", 2.0)
    assert feed.take_finished() == []
    feed.ended(first.key, "", 3.0)
    assert feed.take_finished() == [Receipt(A, True, 15, 1.0, 3.0, drained=True)]
    assert feed.idle


def test_a_failure_stops_feeding_and_ends_only_when_drained() -> None:
    feed = Feed(window=2, largest=10)
    feed.add(A, bytes_of(100), 0.0)
    first, second = feed.next(1.0), feed.next(1.0)
    assert first is not None
    assert second is not None
    feed.ended(first.key, "lost", 2.0)
    assert feed.next(2.0) is None
    assert feed.take_finished() == []  # the second may still read the source
    feed.ended(second.key, "", 3.0)
    assert feed.take_finished() == [Receipt(A, False, 10, 1.0, 3.0, "lost")]


def test_stopping_a_ticket_leaves_the_others() -> None:
    feed = Feed(window=1, largest=10)
    feed.add(A, bytes_of(20), 0.0)
    feed.add(B, bytes_of(10), 0.0)
    flying = feed.next(1.0)
    assert flying is not None
    feed.stop(A, "cancelled", 1.5)
    assert feed.take_finished() == []
    feed.ended(flying.key, "", 2.0)
    following = feed.next(2.0)
    assert following is not None
    feed.ended(following.key, "", 3.0)
    assert feed.take_finished() == [
        Receipt(A, False, 10, 1.0, 2.0, "cancelled", drained=True),
        Receipt(B, True, 10, 2.0, 3.0, drained=True),
    ]


def test_stopping_what_was_handed_on_completely_changes_nothing() -> None:
    feed = Feed(window=1, largest=10)
    feed.add(A, bytes_of(10), 0.0)
    flying = feed.next(1.0)
    assert flying is not None
    feed.stop(A, "cancelled", 1.0)
    feed.ended(flying.key, "", 2.0)
    feed.stop(A, "cancelled", 3.0)
    assert feed.take_finished() == [Receipt(A, True, 10, 1.0, 2.0, drained=True)]


def test_nothing_to_move_is_done_at_once() -> None:
    feed = Feed(window=1, largest=10)
    feed.add(A, [], 5.0)
    feed.add(B, bytes_of(0), 6.0)
    assert feed.take_finished() == [
        Receipt(A, True, 0, 5.0, 5.0, drained=True),
        Receipt(B, True, 0, 6.0, 6.0, drained=True),
    ]


def test_when_the_transport_is_gone_everything_ends_as_failed() -> None:
    feed = Feed(window=1, largest=10)
    feed.add(A, bytes_of(20), 0.0)
    feed.add(B, bytes_of(20), 0.0)
    assert feed.next(1.0) is not None
    feed.end_all("gone", 2.0)
    assert {(receipt.ticket, receipt.ok, receipt.reason) for receipt in feed.take_finished()} == {
        (A, False, "gone"),
        (B, False, "gone"),
    }
    assert feed.idle


@given(st.data())
def test_each_ticket_ends_once_with_the_bytes_that_were_acknowledged(data: st.DataObject) -> None:
    feed = Feed(window=data.draw(st.integers(1, 4)), largest=data.draw(st.integers(1, 7)))
    sizes = data.draw(st.lists(st.lists(st.integers(0, 20), max_size=3), min_size=1, max_size=4))
    for number, lengths in enumerate(sizes, 1):
        feed.add(Ticket(number), [Run(1, 1, length) for length in lengths], 0.0)
    flying: dict[int, int] = {}
    acknowledged = failed = stopped = 0
    while not feed.idle or flying:
        action = data.draw(st.sampled_from(["next", "end", "fail", "stop"]))
        if action == "next":
            sent = feed.next(1.0)
            if sent is not None:
                flying[sent.key] = sent.run.length
        elif action == "stop":
            feed.stop(Ticket(data.draw(st.integers(1, len(sizes)))), "stop", 1.0)
            stopped += 1
        elif flying:
            key = data.draw(st.sampled_from(sorted(flying)))
            length = flying.pop(key)
            feed.ended(key, "" if action == "end" else "fail", 1.0)
            acknowledged += length if action == "end" else 0
            failed += action == "fail"
        if not flying and not feed.may_feed:
            break
    receipts = feed.take_finished()
    assert sorted(receipt.ticket for receipt in receipts) == list(range(1, len(sizes) + 1))
    assert sum(receipt.bytes for receipt in receipts) == acknowledged
    if not failed and not stopped:
        assert all(receipt.ok for receipt in receipts)
    for receipt in receipts:
        assert receipt.ok == (receipt.bytes == sum(sizes[receipt.ticket - 1]) and not receipt.reason)
