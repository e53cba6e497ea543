# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from tidal_connector.errors import PeerLost, TransferFailed
from tidal_connector.transfer.carrier import Carrier, CarrierSettings
from tidal_connector.transfer.plane import Receipt, Ticket
from tidal_connector.transfer.runs import Run
from tidal_connector.transfer.segment import Buffer, Segment

SETTINGS = CarrierSettings(protocol="tcp", window=3, descriptor_bytes=10, ask_s=5.0, abandon_s=60.0)
SEGMENT = Segment("tcp", (Buffer(1000, 500),), 7)
FORTY = [Run(1, 1000, 40)]


class FakeEngine:
    """Writes end as ``outcomes`` says, in the order of submission; None leaves them running."""

    def __init__(self) -> None:
        self.outcomes: dict[int, int] = {}
        self.default: int | None = 1
        self.submitted: list[tuple[str, int, int, int]] = []
        self.checked_after_end = False
        self.closed = False
        self.opening = threading.Event()
        self.opening.set()
        self._over: set[int] = set()

    def submit_write(self, peer: str, source: int, destination: int, length: int) -> int:
        assert self.opening.wait(20)
        self.submitted.append((peer, source, destination, length))
        number = len(self.submitted)
        return 0 if self.outcomes.get(number) == 0 else number

    def check(self, write: int) -> int:
        if self.closed:
            raise TransferFailed("closed")
        self.checked_after_end |= write in self._over
        state = self.outcomes.get(write, self.default) or 0
        if state:
            self._over.add(write)
        return state

    def close(self) -> None:
        self.closed = True


class FakeEngines:
    def __init__(self) -> None:
        self.made: list[FakeEngine] = []
        self.given: list[FakeEngine] = []
        self.next = FakeEngine()
        self.shared = False

    def take(self, peer: str) -> FakeEngine:
        self.made.append(self.next)
        self.next = FakeEngine()
        return self.made[-1]

    def give(self, engine: FakeEngine) -> None:
        self.given.append(engine)

    def drop(self, engine: FakeEngine) -> bool:
        if self.shared:
            return False
        engine.close()
        return True


class Bench:
    """A carrier on fake engines, with its receipts."""

    def __init__(self, settings: CarrierSettings = SETTINGS) -> None:
        self.engines = FakeEngines()
        self.segment: Segment | PeerLost = SEGMENT
        self.asked = 0
        self.receipts: list[Receipt] = []
        self.news = threading.Semaphore(0)
        self.tickets = itertools.count(1)
        self.carrier = Carrier("peer:1", settings, self.engines, self._ask, self._deliver)

    def submit(self, runs: list[Run] = FORTY) -> Ticket:
        ticket = Ticket(next(self.tickets))
        self.carrier.submit(ticket, runs)
        return ticket

    def receipt(self, ticket: Ticket) -> Receipt:
        while True:
            found = [receipt for receipt in self.receipts if receipt.ticket == ticket]
            if found:
                assert len(found) == 1
                return found[0]
            assert self.news.acquire(timeout=10), "no receipt came"

    @property
    def engine(self) -> FakeEngine:
        return self.engines.made[-1]

    def until(self, submitted: int) -> None:
        end = time.monotonic() + 10
        while not self.engines.made or len(self.engine.submitted) < submitted:
            assert time.monotonic() < end, "it was not submitted"
            time.sleep(0.001)

    def _ask(self, peer: str, deadline_s: float) -> Segment:
        self.asked += 1
        assert deadline_s == SETTINGS.ask_s
        if isinstance(self.segment, PeerLost):
            raise self.segment
        return self.segment

    def _deliver(self, receipts: list[Receipt]) -> None:
        self.receipts.extend(receipts)
        self.news.release()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    bench.carrier.start()
    yield bench
    for engine in bench.engines.made:
        engine.default = engine.default or -1
    bench.carrier.retire("the test is over")
    assert bench.carrier.join(10)
    assert not any(engine.checked_after_end for engine in bench.engines.made), "an id was asked after its end"


def test_a_ticket_goes_out_in_descriptors_of_bounded_size(bench: Bench) -> None:
    receipt = bench.receipt(bench.submit())
    assert (receipt.ok, receipt.bytes) == (True, 40)
    assert bench.engine.submitted == [("peer:1", 1 + n, 1000 + n, 10) for n in (0, 10, 20, 30)]


def test_the_window_is_kept(bench: Bench) -> None:
    bench.engines.next.default = None
    ticket = bench.submit([Run(1, 1000, 100)])
    bench.until(3)
    time.sleep(0.01)
    assert len(bench.engine.submitted) == SETTINGS.window
    bench.engine.default = 1
    assert bench.receipt(ticket).ok


def test_the_first_failure_stops_feeding_and_the_receipt_waits_for_the_last_id(bench: Bench) -> None:
    bench.engines.next.default = None
    bench.engines.next.outcomes = {1: -1}
    ticket = bench.submit([Run(1, 1000, 100)])
    bench.until(3)
    time.sleep(0.02)
    assert bench.receipts == []
    assert len(bench.engine.submitted) == 3
    bench.engine.outcomes.update({2: 1, 3: 1})
    receipt = bench.receipt(ticket)
    assert (receipt.ok, receipt.bytes, receipt.drained) == (False, 20, False)
    assert "failed" in receipt.reason


def test_a_refused_write_fails_its_ticket_only(bench: Bench) -> None:
    bench.engines.next.outcomes = {1: 0}
    first = bench.submit()
    assert not bench.receipt(first).ok
    assert bench.receipt(bench.submit()).ok
    assert bench.asked == 2  # it was asked again after the failure


def test_a_peer_that_does_not_describe_itself_costs_no_write(bench: Bench) -> None:
    bench.segment = PeerLost("peer peer:1 did not describe itself")
    receipt = bench.receipt(bench.submit())
    assert (receipt.ok, receipt.bytes) == (False, 0)
    assert "describe itself" in receipt.reason
    assert bench.engines.made == []
    bench.segment = SEGMENT
    assert bench.receipt(bench.submit()).ok


def test_a_peer_on_another_transport_is_refused(bench: Bench) -> None:
    bench.segment = Segment("rdma", SEGMENT.buffers)
    receipt = bench.receipt(bench.submit())
    assert not receipt.ok
    assert "runs transport 'rdma', expected 'tcp'" in receipt.reason


@pytest.mark.parametrize("destination", [999, 1461])
def test_a_destination_outside_the_peers_ranges_is_never_submitted(bench: Bench, destination: int) -> None:
    receipt = bench.receipt(bench.submit([Run(1, destination, 40)]))
    assert not receipt.ok
    assert "no single registered range" in receipt.reason
    assert receipt.drained
    assert all(to >= 1000 and to + length <= 1500 for _, _, to, length in bench.engine.submitted)


def test_a_peer_that_restarted_under_its_name_gets_a_fresh_engine(bench: Bench) -> None:
    assert bench.receipt(bench.submit()).ok
    old = bench.engine
    old.default = -1
    assert not bench.receipt(bench.submit()).ok
    bench.segment = Segment("tcp", (Buffer(1000, 500),), 8)
    assert bench.receipt(bench.submit()).ok
    assert bench.engine is not old
    assert bench.engines.given == [old]


def test_cancelling_ends_after_what_is_in_flight(bench: Bench) -> None:
    bench.engines.next.default = None
    ticket = bench.submit([Run(1, 1000, 100)])
    bench.until(3)
    bench.carrier.cancel(ticket)
    time.sleep(0.01)
    assert bench.receipts == []
    bench.engine.default = 1
    receipt = bench.receipt(ticket)
    assert (receipt.ok, receipt.bytes, receipt.reason) == (False, 30, "cancelled")


def test_a_stuck_engine_is_destroyed_before_its_sources_are_let_go() -> None:
    bench = Bench(CarrierSettings(protocol="tcp", window=3, descriptor_bytes=10, ask_s=5.0, abandon_s=0.05))
    bench.carrier.start()
    bench.engines.next.default = None
    bench.engines.next.outcomes = {1: 1}
    receipt = bench.receipt(bench.submit())
    stuck = bench.engines.made[0]
    assert stuck.closed
    assert (receipt.ok, receipt.bytes) == (False, 10)
    assert "destroyed" in receipt.reason
    assert bench.receipt(bench.submit()).ok
    assert bench.engine is not stuck
    bench.carrier.retire("over")
    assert bench.carrier.join(10)


def test_an_engine_that_serves_others_is_never_destroyed() -> None:
    bench = Bench(CarrierSettings(protocol="tcp", window=3, descriptor_bytes=10, ask_s=5.0, abandon_s=0.01))
    bench.engines.shared = True
    bench.carrier.start()
    bench.engines.next.default = None
    ticket = bench.submit()
    bench.until(3)
    time.sleep(0.05)
    assert bench.receipts == []
    bench.engine.default = 1
    assert bench.receipt(ticket).ok
    bench.carrier.retire("over")
    assert bench.carrier.join(10)


def test_retiring_drains_and_gives_the_engine_back(bench: Bench) -> None:
    bench.engines.next.default = None
    ticket = bench.submit([Run(1, 1000, 100)])
    bench.until(3)
    bench.carrier.retire("peer peer:1 was forgotten")
    time.sleep(0.01)
    assert bench.engines.given == []
    bench.engine.default = 1
    assert bench.receipt(ticket).reason == "peer peer:1 was forgotten"
    assert bench.carrier.join(10)
    assert bench.engines.given == [bench.engine]


def test_a_peer_stuck_in_its_opening_delays_no_other(bench: Bench) -> None:
    stuck = bench.engines.next
    stuck.opening.clear()
    blocked = bench.submit()
    other = Bench()
    other.carrier.start()
    assert other.receipt(other.submit()).ok
    assert bench.receipts == []
    stuck.opening.set()
    assert bench.receipt(blocked).ok
    other.carrier.retire("over")
    assert other.carrier.join(10)


def test_closing_the_engine_under_a_carrier_ends_its_thread() -> None:
    bench = Bench()
    bench.carrier.start()
    bench.engines.next.default = None
    bench.submit()
    bench.until(3)
    bench.carrier.retire("closing")
    bench.engine.close()
    assert bench.carrier.join(10)
