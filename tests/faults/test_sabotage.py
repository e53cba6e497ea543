# SPDX-License-Identifier: Apache-2.0
"""The checker is worth something: with any one mechanism taken out, it names the invariant that breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.faults.scenarios import scenario
from tests.faults.world import Violation
from tidal_connector.control import party, shares, switchboard
from tidal_connector.control.messages import Abort, Landed
from tidal_connector.decode import receiver, records, reservations
from tidal_connector.layout import Home
from tidal_connector.prefill import ledger, pushes, requests, sends
from tidal_connector.prefill.ranges import clip, unite

WORLDS = 1500
Patch = pytest.MonkeyPatch


def source_pages_without_draining(patch: Patch) -> None:
    """P gives its pages back while they are still being read."""

    def settle(send: sends.Send) -> sends.Step:
        return whole(msgspec.structs.replace(send, parts=()))

    whole = requests._settle
    patch.setattr(requests, "_settle", settle)


def preemption_without_waiting(patch: Patch) -> None:
    """P's pages are taken by a preemption that does not wait until they are read."""
    patch.setattr(ledger.Ledger, "reading", lambda self, requests: False)


def no_quarantine(patch: Patch) -> None:
    """D gives its pages back as soon as something went wrong."""
    patch.setattr(
        reservations, "_quarantine", lambda receive, reason, now, abort: reservations._release(receive, reason)
    )


def abort_without_an_answer(patch: Patch) -> None:
    """D gives its pages back as soon as its request is aborted."""
    patch.setattr(reservations, "_abort", lambda receive, reason, now: reservations._release(receive, reason))


def quarantine_ends_with_the_lease(patch: Patch) -> None:
    """D takes the end of P's lease for the end of P's writes."""

    def in_quarantine(receive: reservations.Receive, connections: int | None, now: float) -> reservations.Step:
        return reservations._release(receive, receive.reason)

    patch.setattr(reservations, "_in_quarantine", in_quarantine)


def everything_is_drained(patch: Patch) -> None:
    """P says that nothing can land late although a write failed."""
    whole = requests.step

    def step(send: sends.Send, event: sends.Event, now: float) -> sends.Step:
        if isinstance(event, sends.PartEnded):
            event = msgspec.structs.replace(event, drained=True)
        return whole(send, event, now)

    patch.setattr(requests, "step", step)


def no_timers_at_decode(patch: Patch) -> None:
    """D waits for ever."""
    patch.setattr(reservations, "due", lambda receive: party.NEVER)


def no_timers_at_prefill(patch: Patch) -> None:
    """P waits for ever."""
    patch.setattr(requests, "due", lambda send, stall_s, moved_at: party.NEVER)


def outcomes_twice(patch: Patch) -> None:
    """vLLM hears of a request twice."""
    whole = receiver.Receiver._report

    def report(self: receiver.Receiver, outcome: receiver.ReceiveOutcome) -> None:
        whole(self, outcome)
        whole(self, outcome)

    patch.setattr(receiver.Receiver, "_report", report)


def outcomes_before_vllm_ends(patch: Patch) -> None:
    """vLLM hears that a request was sent while it still computes it."""
    whole = ledger.Ledger._gone

    def gone(self: ledger.Ledger, record: ledger.Record, now: float) -> None:
        record.ended = True
        whole(self, record, now)

    patch.setattr(ledger.Ledger, "_gone", gone)


def landed_before_the_last_part(patch: Patch) -> None:
    """P says that all has landed when all was submitted."""
    whole = requests._feed

    def feed(send: sends.Send, now: float) -> sends.Step:
        fed, effects = whole(send, now)
        done = fed.reserve is not None and all(
            ranges == unite((), fed.reserve.first, fed.reserve.end) for ranges in fed.submitted
        )
        if fed.phase is sends.Phase.SENDING and done and fed.session is not None and fed.reserve is not None:
            word = Landed(fed.transfer, fed.reserve.generation, requests._wanted_bytes(fed))
            return fed, [*effects, sends.Tell(fed.session, word)]
        return fed, effects

    patch.setattr(requests, "_feed", feed)


def preempted_rows_count_as_sent(patch: Patch) -> None:
    """Rows that were being read when their pages were taken are not sent again."""

    def unwritten(send: sends.Send, keep: int) -> sends.Send:
        ready = tuple(clip(ranges, 0, keep) for ranges in send.ready)
        return msgspec.structs.replace(send, ready=ready)

    patch.setattr(requests, "_unwritten", unwritten)
    patch.setattr(ledger.Ledger, "reading", lambda self, requests: False)
    # Without the wait the source rule breaks first; what is asked here is what then arrives.
    patch.setattr("tests.faults.world.World.reads", lambda self, worker, descriptor: None)


def host_ids_on_the_device(patch: Patch) -> None:
    """Host page ids address device regions."""
    patch.setattr(pushes, "_pages_of", lambda reserve, region: reserve.host_pages)


def a_broken_message_takes_the_thread_down(patch: Patch) -> None:
    """What breaks while a message is handled is not caught, and what is malformed breaks."""

    def survive(what: str, act: Callable[[], None]) -> str:
        act()
        return ""

    def read(envelope: object) -> object:
        raise Violation(6, "a malformed message got through")

    whole = switchboard.open_envelope

    def opened(frame: bytes) -> object:
        try:
            return whole(frame)
        except switchboard.ProtocolError:
            read(frame)
        return None

    patch.setattr(switchboard, "survive", survive)
    patch.setattr(switchboard, "open_envelope", opened)


def any_generation_will_do(patch: Patch) -> None:
    """P takes an Abort of somebody else's generation for its own."""
    whole = requests._abort_asked

    def asked(send: sends.Send, event: sends.AbortAsked, now: float) -> sends.Step:
        if send.reserve is None or send.session is None:
            return whole(send, event, now)
        abort = Abort(send.transfer, send.reserve.generation, event.abort.reason)
        return whole(send, sends.AbortAsked(send.session, abort), now)

    def beat(self: receiver.Receiver, key: party.SessionKey, pairs: object, now: float) -> None:
        for transfer in list(self._records):
            self._tell(key, Abort(transfer, receiver.NO_RESERVATION, "a stray word"))

    patch.setattr(requests, "_abort_asked", asked)
    patch.setattr(receiver.Receiver, "beat", beat)


def one_landed_counts_for_every_rank(patch: Patch) -> None:
    """D takes what one rank of P says of its share for the word of all ranks."""
    whole = receiver.Receiver.heard

    def heard(self: receiver.Receiver, key: party.SessionKey, notice: Any, now: float) -> None:
        record = self._records.get(notice.transfer)
        whole(self, key, notice, now)
        if isinstance(notice, Landed) and record is not None:
            for leg in record.legs:
                word = Landed(notice.transfer, notice.generation, leg.receive.wanted)
                self._step(record, leg, reservations.Heard(word), now)

    patch.setattr(receiver.Receiver, "heard", heard)


def the_first_rank_of_prefill_ends_it(patch: Patch) -> None:
    """D gives its pages back when one rank of P has ended, though others may still write."""
    ended = property(lambda self: any(reservations.over(leg.receive) for leg in self.legs))
    patch.setattr(records.Record, "over", ended)


def the_first_rank_of_decode_ends_it(patch: Patch) -> None:
    """P gives its pages back when one rank of D has its rows, though those of others are still being read."""
    patch.setattr(ledger.Record, "over", property(lambda self: any(s.phase is sends.Phase.GONE for s in self.sends)))


def every_rank_writes_the_pool(patch: Patch) -> None:
    """Both sides believe that each rank of P writes all latents."""
    whole = shares._writer

    def writer(place: int, home: Home, ranks: shares.Ranks) -> bool:
        return place % ranks.d_size == ranks.d_rank if home is Home.HOST else whole(place, home, ranks)

    patch.setattr(shares, "_writer", writer)


def index_keys_go_to_one_rank(patch: Patch) -> None:
    """Both sides believe that D's devices share their memory as they share the pool."""
    whole = shares._writer
    patch.setattr(shares, "_writer", lambda place, home, ranks: whole(place, Home.HOST, ranks))


SABOTAGES: list[tuple[Callable[[Patch], None], set[int], tuple[str, ...] | None]] = [
    (no_quarantine, {1}, None),
    (abort_without_an_answer, {1}, None),
    (quarantine_ends_with_the_lease, {1}, None),
    (everything_is_drained, {1}, None),
    (source_pages_without_draining, {2}, None),
    (preemption_without_waiting, {2}, ("preempt",)),
    (no_timers_at_decode, {3}, None),
    (no_timers_at_prefill, {3}, None),
    (outcomes_twice, {4}, None),
    (outcomes_before_vllm_ends, {4}, None),
    (landed_before_the_last_part, {1, 5}, None),
    (preempted_rows_count_as_sent, {5}, ("preempt",)),
    (a_broken_message_takes_the_thread_down, {6}, None),
    (any_generation_will_do, {6}, ()),
    (host_ids_on_the_device, {1, 6}, None),
]


@pytest.mark.parametrize(("sabotage", "numbers", "trouble"), SABOTAGES, ids=[item[0].__name__ for item in SABOTAGES])
def test_without_its_mechanism_the_invariant_breaks(
    sabotage: Callable[[Patch], None],
    numbers: set[int],
    trouble: tuple[str, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sabotage(monkeypatch)
    seen: list[str] = []
    for seed in range(WORLDS):
        try:
            scenario(seed, trouble).run()
        except Violation as violation:
            if violation.number in numbers:
                return
            seen.append(str(violation))
    pytest.fail(f"{sabotage.__name__} went unseen in {WORLDS} worlds; other breaches: {seen[:3]}")


RANKED: list[tuple[Callable[[Patch], None], set[int], tuple[int, int]]] = [
    (one_landed_counts_for_every_rank, {1, 5}, (2, 1)),
    (one_landed_counts_for_every_rank, {1, 5}, (4, 2)),
    (the_first_rank_of_prefill_ends_it, {1}, (2, 1)),
    (the_first_rank_of_decode_ends_it, {2}, (1, 2)),
    (every_rank_writes_the_pool, {5}, (2, 1)),
    (index_keys_go_to_one_rank, {5}, (1, 2)),
    (no_quarantine, {1}, (2, 2)),
    (everything_is_drained, {1}, (2, 2)),
    (source_pages_without_draining, {2}, (2, 2)),
    (outcomes_twice, {4}, (2, 2)),
]


@pytest.mark.parametrize(
    ("sabotage", "numbers", "ranks"), RANKED, ids=[f"{item[0].__name__}-{item[2][0]}x{item[2][1]}" for item in RANKED]
)
def test_without_its_mechanism_the_invariant_breaks_between_several_ranks(
    sabotage: Callable[[Patch], None], numbers: set[int], ranks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    seen: list[str] = []
    for seed in range(WORLDS):
        try:
            scenario(seed, ranks=ranks).run()
        except Violation as violation:
            if violation.number in numbers:
                return
            seen.append(str(violation))
    pytest.fail(f"{sabotage.__name__} went unseen in {WORLDS} worlds; other breaches: {seen[:3]}")


def test_the_same_worlds_hold_with_every_mechanism_in_place() -> None:
    for seed in range(300):
        scenario(seed).run()


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 2), (4, 2)], ids="{0[0]}x{0[1]}".format)
def test_the_same_worlds_hold_between_several_ranks(ranks: tuple[int, int]) -> None:
    for seed in range(60):
        scenario(seed, ranks=ranks).run()
