# SPDX-License-Identifier: Apache-2.0
"""The send machine, row by row of its table, and what a table cannot say."""

from __future__ import annotations

import msgspec
import pytest

from tests.control.tables import table_rows
from tidal_connector.control.messages import Abort, Aborted, Accepted, Failed, Landed, Notice, Parked, Progress, Reserve
from tidal_connector.control.party import SessionKey
from tidal_connector.ids import Generation, TransferId
from tidal_connector.prefill import requests as machine
from tidal_connector.prefill import sends
from tidal_connector.prefill.sends import (
    AbortAsked,
    Cancel,
    Effect,
    Event,
    Opened,
    PartEnded,
    PeerLost,
    Phase,
    PrefillDone,
    Reserved,
    Sealed,
    Send,
    Submit,
    Tell,
    Tick,
    Unwritten,
    Withdrawn,
    Wrote,
)

X = TransferId("xfer-1")
S = SessionKey("1:decode-0")
ROWS = (10, 7)


def reserve(generation: int = 1, first: int = 0, end: int = 8) -> Reserve:
    return Reserve(X, Generation(generation), first, end, (), (), 100.0, 9.0)


def run(*events: Event | tuple[float, Event]) -> tuple[Send, list[Effect]]:
    """Feed events (at second 0 unless given) and return the last state with the effects of the last event."""
    send, effects = sends.new(X, ROWS), []
    for item in events:
        at, event = item if isinstance(item, tuple) else (0.0, item)
        send, effects = machine.step(send, event, at)
    return send, effects


def words(effects: list[Effect]) -> list[Notice]:
    return [effect.notice for effect in effects if isinstance(effect, Tell)]


def parts(effects: list[Effect]) -> list[tuple[int, int, int]]:
    return [(e.part.layer, e.part.first, e.part.end) for e in effects if isinstance(e, Submit)]


RESERVED = Reserved(S, reserve(), 30.0)
SENDING = (Opened(), RESERVED)
FLYING = (*SENDING, Wrote((0,), 0, 8))
ABORT = AbortAsked(S, Abort(X, Generation(1), "left"))
FOREIGN = Reserved(S, msgspec.structs.replace(reserve(), prompt="b"), 30.0)
DECLINE = AbortAsked(S, Abort(X, Generation(0), "refused"))
GOOD, BAD = PartEnded(1, True, True, ""), PartEnded(1, False, False, "reset")
STALL = 10.0

# state, event, next state: (what leads to the state), the event, words to D
EXAMPLES: dict[tuple[str, str, str], tuple[tuple[Event, ...], Event | tuple[float, Event], list[type[Notice]]]] = {
    ("new", "Reserve", "parked"): ((), RESERVED, [Parked]),
    ("new", "request scheduled", "open"): ((), Opened(), []),
    ("new", "Abort", "gone"): ((), DECLINE, [Aborted]),
    ("new", "request ended badly", "gone"): ((), Withdrawn("full"), []),
    ("parked", "Reserve again", "parked"): ((RESERVED,), RESERVED, [Parked]),
    ("parked", "request scheduled", "sending"): ((RESERVED,), Opened(), [Accepted]),
    ("parked", "request scheduled, of another prompt", "gone"): ((FOREIGN,), Opened("a"), [Failed]),
    ("parked", "park_s is over", "gone"): ((RESERVED,), (30.0, Tick(STALL)), [Failed]),
    ("parked", "Abort", "gone"): ((RESERVED,), ABORT, [Aborted]),
    ("parked", "D lost", "gone"): ((RESERVED,), PeerLost("lease"), [Failed]),
    ("open", "Reserve", "sending"): ((Opened(),), RESERVED, [Accepted]),
    ("open", "Reserve of another prompt", "gone"): ((Opened("a"),), FOREIGN, [Failed]),
    ("open", "Abort", "gone"): ((Opened(),), DECLINE, [Aborted]),
    ("open", "hold_s after the prefill", "gone"): ((Opened(), PrefillDone(60.0)), (60.0, Tick(STALL)), []),
    ("open", "request ended badly", "gone"): ((Opened(),), Withdrawn("aborted"), []),
    ("sending", "Reserve again", "sending"): (SENDING, RESERVED, [Accepted]),
    ("sending", "layer written", "sending"): (SENDING, Wrote((0,), 0, 8), []),
    ("sending", "a third of D's stall_s", "sending"): (SENDING, (3.0, Tick(STALL)), [Progress]),
    ("sending", "a part ended well", "sending"): ((*FLYING, Wrote((1,), 0, 4)), GOOD, []),
    ("sending", "the last part ended well", "gone"): (
        (*FLYING, Wrote((1,), 0, 8), PartEnded(2, True, True, "")),
        GOOD,
        [Landed],
    ),
    ("sending", "a part failed, none in flight", "gone"): (FLYING, BAD, [Failed]),
    ("sending", "a part failed, others in flight", "draining"): ((*FLYING, Wrote((1,), 0, 8)), BAD, [Abort]),
    ("sending", "nothing acknowledged for stall_s", "draining"): (FLYING, (10.0, Tick(STALL)), [Abort]),
    ("sending", "D's deliver_s is over", "draining"): (FLYING, (100.0, Tick(1000.0)), [Abort]),
    ("sending", "request ended badly", "draining"): (FLYING, Withdrawn("aborted"), [Abort]),
    ("sending", "request ended well, rows missing", "draining"): (FLYING, Sealed(60.0), [Abort]),
    ("sending", "Abort", "draining"): (FLYING, ABORT, []),
    ("sending", "Abort of another generation", "sending"): (FLYING, DECLINE, []),
    ("sending", "Reserve of another generation", "sending"): (FLYING, Reserved(S, reserve(2), 30.0), [Failed]),
    ("sending", "D lost", "draining"): (FLYING, PeerLost("lease"), []),
    ("draining", "the last part ended, D had asked", "gone"): ((*FLYING, ABORT), GOOD, [Aborted]),
    ("draining", "the last part ended", "gone"): ((*FLYING, Withdrawn("aborted")), GOOD, [Failed]),
    ("gone", "Reserve or Abort, late", "gone"): ((RESERVED, ABORT), RESERVED, [Aborted]),
}


@pytest.mark.parametrize("row", EXAMPLES, ids=" / ".join)
def test_row_of_the_table(row: tuple[str, str, str]) -> None:
    before, event, expected = EXAMPLES[row]
    send, _ = run(*before)
    assert send.phase == row[0]
    send, effects = run(*before, event)
    assert send.phase == row[2]
    assert [type(word) for word in words(effects)] == expected


def test_the_documented_table_is_this_one() -> None:
    assert table_rows("Send machine") == list(EXAMPLES)


def test_late_reservation_catches_up_layer_by_layer() -> None:
    _, effects = run(Opened(), Wrote(None, 0, 8), RESERVED)
    assert parts(effects) == [(0, 0, 8), (1, 0, 8)]


def test_only_what_is_ready_and_reserved_and_not_submitted_goes() -> None:
    want = Reserved(S, reserve(first=3, end=7), 30.0)
    _, effects = run(Opened(), want, Wrote((0,), 0, 5))
    assert parts(effects) == [(0, 3, 5)]
    _, effects = run(Opened(), want, Wrote((0,), 0, 5), Wrote((0,), 0, 8))
    assert parts(effects) == [(0, 5, 7)]


def test_long_ranges_are_cut_so_that_progress_shows() -> None:
    end = 2 * machine.PART_TOKENS + 1
    _, effects = run(Opened(), Wrote((0,), 0, end), Reserved(S, reserve(end=end), 30.0))
    assert [stop - start for _, start, stop in parts(effects)] == [machine.PART_TOKENS, machine.PART_TOKENS, 1]


def test_landed_counts_the_bytes_of_the_range() -> None:
    events = (*FLYING, Wrote((1,), 0, 8), GOOD, PartEnded(2, True, True, ""))
    send, effects = run(*events)
    assert words(effects) == [Landed(X, Generation(1), 8 * sum(ROWS))]
    assert send.ok


def test_an_empty_range_lands_at_once() -> None:
    _, effects = run(Opened(), Reserved(S, reserve(first=8, end=8), 30.0))
    assert [type(word) for word in words(effects)] == [Accepted, Landed]


def test_drained_is_false_once_a_write_failed() -> None:
    _, effects = run(*FLYING, BAD)
    (word,) = words(effects)
    assert isinstance(word, Failed)
    assert not word.drained
    _, effects = run(*FLYING, ABORT, PartEnded(1, False, True, "cancelled"))
    (word,) = words(effects)
    assert isinstance(word, Aborted)
    assert word.drained


def test_draining_feeds_nothing_and_cancels_what_waits() -> None:
    send, effects = run(*FLYING, ABORT)
    assert Cancel((1,)) in effects
    send, effects = machine.step(send, Wrote((1,), 0, 8), 0.0)
    assert effects == []


def test_rows_in_flight_at_a_preemption_go_again_after_they_ended() -> None:
    events: tuple[Event, ...] = (*FLYING, Unwritten(4), Wrote((0,), 0, 8))
    send, effects = run(*events)
    assert parts(effects) == []  # two writes of one row must not race
    send, effects = machine.step(send, GOOD, 0.0)
    assert parts(effects) == [(0, 4, 8)]
    assert send.landed == 4 * ROWS[0]


def test_rows_that_landed_before_a_preemption_do_not_go_again() -> None:
    _, effects = run(*FLYING, GOOD, Unwritten(0), Wrote((0,), 0, 8))
    assert parts(effects) == []


def test_bytes_for_the_same_peer_are_progress_for_those_that_queue_behind() -> None:
    send, _ = run(*FLYING, (10.0, Tick(STALL, peer_moved_at=5.0)))
    assert send.phase is Phase.SENDING
    assert machine.due(send, STALL, 5.0) <= 15.0


def test_the_patience_that_decode_names_does_not_make_prefill_spin() -> None:
    hasty = Reserved(S, msgspec.structs.replace(reserve(), stall_s=1e-6), 30.0)
    send, _ = run(Opened(), hasty)
    assert machine.due(send, STALL) >= 0.1
    send, effects = machine.step(send, Tick(STALL), 0.1)
    assert [type(word) for word in words(effects)] == [Progress]
    assert machine.due(send, STALL) >= 0.2


def test_a_late_question_gets_the_last_word_and_other_generations_a_clean_no() -> None:
    send, _ = run(*FLYING, BAD)
    over = sends.buried(send)
    assert machine.repeat(over, S, Generation(1)) == send.last_word
    for other in (
        machine.repeat(over, S, Generation(2)),
        machine.repeat(over, SessionKey("2:decode-1"), Generation(1)),
    ):
        assert isinstance(other, Failed)
        assert other.drained
        assert "reset" in other.reason


def test_a_second_decode_engine_is_never_told_that_the_first_ones_rows_landed() -> None:
    events: tuple[Event, ...] = (*SENDING, Wrote((0,), 0, 8), Wrote((1,), 0, 8), GOOD, PartEnded(2, True, True, ""))
    send, effects = run(*events)
    assert [type(word) for word in words(effects)] == [Landed]
    _, effects = machine.step(sends.buried(send), Reserved(SessionKey("2:decode-1"), reserve(), 30.0), 1.0)
    assert [type(word) for word in words(effects)] == [Failed]


@pytest.mark.parametrize("event", [Wrote(None, 0, 4), Unwritten(0), PrefillDone(1.0), Sealed(1.0), Tick(1.0), GOOD])
def test_nothing_moves_a_transfer_that_is_over(event: Event) -> None:
    over = sends.buried(run(DECLINE)[0])
    assert machine.step(over, event, 99.0) == (over, [])


def test_every_pair_of_state_and_event_is_answered() -> None:
    """No combination raises, and none leads out of Gone."""
    states: list[tuple[Event, ...]] = [(), (RESERVED,), (Opened(),), SENDING, FLYING, (*FLYING, ABORT), (DECLINE,)]
    events: list[Event] = [
        Opened(), RESERVED, Wrote(None, 0, 8), Unwritten(0), PrefillDone(9.0), Sealed(9.0), GOOD, BAD,
        Withdrawn("x"), ABORT, DECLINE, PeerLost("x"), Tick(STALL),
    ]  # fmt: skip
    seen: set[str] = set()
    for before in states:
        for event in events:
            start, _ = run(*before)
            after, _ = machine.step(start, event, 1.0)
            assert start.phase is not Phase.GONE or after.phase is Phase.GONE
            seen.add(after.phase)
    assert seen == {"open", "parked", "sending", "draining", "gone", "new"}
