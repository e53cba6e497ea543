# SPDX-License-Identifier: Apache-2.0
"""A reservation's legs to the ranks of P, by hand: sessions that come up, or not, when the test says so."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.control.pair import FAST, Memory, layout
from tidal_connector.control.handshake import Peer
from tidal_connector.control.messages import NO_RESERVATION, Abort, Accepted, Failed, Identity, Landed, Notice, Reserve
from tidal_connector.control.party import SessionKey
from tidal_connector.decode.receiver import ReceiveOutcome, Receiver
from tidal_connector.ids import DevicePageId, EngineId, Generation, HostPageId, Incarnation, RequestId, TransferId
from tidal_connector.layout import Home
from tidal_connector.metrics import Counters
from tidal_connector.transfer.loopback import LoopbackFabric, LoopbackPlane

P, X, G = EngineId("prefill-0"), TransferId("xfer-1"), Generation(1)
SIZE = 3
ADDRESSES = tuple(f"p:{rank + 1}" for rank in range(SIZE))
KEYS = tuple(SessionKey(address) for address in ADDRESSES)
SHARES = (10 * 52, 10 * 52, 10 * 40)  # ten tokens of latents and index keys; the last layer has no index keys


class Calls:
    """Sessions that are what they call, and words that are written down."""

    def __init__(self) -> None:
        self.said: list[tuple[SessionKey, Notice]] = []

    def call(self, engine: EngineId, address: str, now: float) -> SessionKey:
        return SessionKey(address)

    def tell(self, key: SessionKey, notice: Notice) -> bool:
        self.said.append((key, notice))
        return True

    def peer(self, key: SessionKey) -> Peer | None:
        return None

    def to(self, rank: int) -> list[Notice]:
        return [notice for key, notice in self.said if key == KEYS[rank]]


class Blind(LoopbackPlane):
    """A transport that cannot tell whose connections are left, as RDMA and Ascend cannot."""

    def peer_connections(self, host: str, others: Iterable[str] = ()) -> int | None:
        return None


class Bench:
    """A receiver on the control thread, which is the test's."""

    def __init__(self) -> None:
        self.calls = Calls()
        memory = Memory(layout(), Home.HOST, 16, 8, 0)
        plane = Blind(LoopbackFabric(), lambda: None)
        self.party = Receiver(layout(), memory.placement, plane, Counters(), FAST, 0.4)
        self.party.attach(self.calls, lambda: None)
        self.now = 0.0
        pages = [HostPageId(3)], [DevicePageId(5)]
        self.party.reserve(RequestId("d"), X, P, ADDRESSES[0], 0, 10, *pages)
        self.turn()

    def turn(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.party.take_posted(self.now)
        self.party.turn(self.now)
        self.party.publish()

    def up(self, rank: int, *, said: int | None = None) -> None:
        who = Identity(P, Incarnation(f"p{rank}"), rank if said is None else said, SIZE)
        self.party.up(KEYS[rank], Peer(who, f"h{rank}:1", 9.0, siblings=ADDRESSES), self.now)

    def hear(self, rank: int, notice: Notice) -> None:
        self.party.heard(KEYS[rank], notice, self.now)

    def outcomes(self) -> list[ReceiveOutcome]:
        self.turn()
        return self.party.outcomes()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_first_rank_names_the_others_and_each_is_asked_for_the_same_pages(bench: Bench) -> None:
    assert bench.calls.said == []
    bench.up(0)
    assert [type(notice) for notice in bench.calls.to(0)] == [Reserve]
    assert all(bench.party.needs(key) for key in KEYS)
    for rank in (2, 1):
        bench.up(rank)
    assert bench.calls.to(0) == bench.calls.to(1) == bench.calls.to(2)


def test_it_is_ready_with_the_last_share_and_not_before(bench: Bench) -> None:
    for rank in range(SIZE):
        bench.up(rank)
        bench.hear(rank, Accepted(X, G, SHARES[rank]))
    for rank in (2, 0):
        bench.hear(rank, Landed(X, G, SHARES[rank]))
        bench.hear(rank, Landed(X, G, SHARES[rank]))  # says it twice: it counts once
        assert bench.outcomes() == []
    bench.hear(1, Landed(X, G, SHARES[1]))
    (outcome,) = bench.outcomes()
    assert (outcome.ok, outcome.bytes) == (True, sum(SHARES))


def test_a_share_of_other_bytes_than_our_own_rule_says_is_no_share(bench: Bench) -> None:
    for rank in range(SIZE):
        bench.up(rank)
    bench.hear(2, Accepted(X, G, SHARES[0]))
    assert all(isinstance(bench.calls.to(rank)[-1], Abort) for rank in range(SIZE))
    for rank in range(SIZE):
        bench.hear(rank, Failed(X, G, "as you wish", True))
    (outcome,) = bench.outcomes()
    assert outcome.reason == "rank 2 of prefill: prefill will send 520 bytes, 400 are needed"


def test_pages_wait_for_the_rank_that_may_still_write(bench: Bench) -> None:
    for rank in range(SIZE):
        bench.up(rank)
        bench.hear(rank, Accepted(X, G, SHARES[rank]))
    bench.hear(0, Landed(X, G, SHARES[0]))
    bench.hear(1, Failed(X, G, "a write failed", False))  # not drained: in quarantine
    bench.hear(2, Failed(X, G, "given up", True))
    assert bench.outcomes() == []
    assert bench.party.gauges()["pages_quarantined"] == 1
    bench.turn(0.3)
    assert bench.outcomes() == []
    bench.turn(0.2)
    (outcome,) = bench.outcomes()
    assert (outcome.ok, outcome.reason) == (False, "rank 1 of prefill: a write failed")


def test_a_rank_that_was_still_called_when_it_ended_hears_of_it_later(bench: Bench) -> None:
    bench.up(0)
    bench.party.abort(RequestId("d"), "its client left")
    bench.turn()
    assert [type(notice) for notice in bench.calls.to(0)] == [Reserve, Abort]
    bench.hear(0, Failed(X, G, "its client left", True))
    (outcome,) = bench.outcomes()
    assert outcome.reason == "its client left"
    assert bench.party.needs(KEYS[1])
    bench.up(1)
    bench.turn()
    assert Abort(X, NO_RESERVATION, "its client left") in bench.calls.to(1)
    bench.hear(1, Failed(X, NO_RESERVATION, "I see", True))
    assert not bench.party.needs(KEYS[1])


def test_another_rank_at_the_address_fails_it(bench: Bench) -> None:
    bench.up(0)
    bench.up(1, said=2)
    bench.hear(0, Failed(X, G, "over", True))
    (outcome,) = bench.outcomes()
    assert outcome.reason == "rank 1 of 3 was looked for, rank 2 of 3 answered"
