# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tidal_connector.config import load_config
from tidal_connector.errors import ConfigError, TransferFailed
from tidal_connector.layout import Home
from tidal_connector.transfer.loopback import LoopbackFabric, LoopbackPlane
from tidal_connector.transfer.plane import Receipt, Ticket, open_plane
from tidal_connector.transfer.runs import Run

SIZE = 4096


class Side:
    """One plane, its memory, and a way to wait for receipts."""

    def __init__(self, fabric: LoopbackFabric, fill: int) -> None:
        self.news = threading.Semaphore(0)
        self.memory = (ctypes.c_ubyte * SIZE)(*([fill] * SIZE))
        self.plane = LoopbackPlane(fabric, self.news.release, window=2, descriptor_bytes=256)
        self.receipts: dict[Ticket, Receipt] = {}

    @property
    def address(self) -> int:
        return ctypes.addressof(self.memory)

    def receipt(self, ticket: Ticket) -> Receipt:
        while ticket not in self.receipts:
            assert self.news.acquire(timeout=10), "no receipt came"
            for receipt in self.plane.poll():
                assert receipt.ticket not in self.receipts, "a second receipt for one ticket"
                self.receipts[receipt.ticket] = receipt
        return self.receipts[ticket]


@pytest.fixture
def fabric() -> LoopbackFabric:
    return LoopbackFabric()


@pytest.fixture
def sides(fabric: LoopbackFabric) -> Iterator[tuple[Side, Side]]:
    with ExitStack() as stack:
        pair = Side(fabric, 7), Side(fabric, 0)
        for side in pair:
            stack.enter_context(side.plane)
            side.plane.register(side.address, SIZE, Home.HOST)
        yield pair


def run(here: Side, there: Side, length: int = SIZE, at: int = 0) -> list[Run]:
    return [Run(here.address + at, there.address + at, length)]


def test_bytes_arrive_and_the_receipt_says_so(sides: tuple[Side, Side]) -> None:
    here, there = sides
    receipt = here.receipt(here.plane.submit(there.plane.endpoint(), run(here, there)))
    assert (receipt.ok, receipt.bytes, receipt.reason) == (True, SIZE, "")
    assert receipt.started <= receipt.finished
    assert bytes(there.memory) == bytes(here.memory) == b"\x07" * SIZE


def test_an_empty_batch_ends_well(sides: tuple[Side, Side]) -> None:
    here, there = sides
    receipt = here.receipt(here.plane.submit(there.plane.endpoint(), []))
    assert (receipt.ok, receipt.bytes) == (True, 0)


def test_a_source_outside_every_registered_range_is_refused(sides: tuple[Side, Side]) -> None:
    here, there = sides
    with pytest.raises(TransferFailed, match="no single registered range"):
        here.plane.submit(there.plane.endpoint(), [Run(here.address + 1, there.address, SIZE)])


def test_a_destination_outside_every_registered_range_fails(sides: tuple[Side, Side]) -> None:
    here, there = sides
    ticket = here.plane.submit(there.plane.endpoint(), [Run(here.address, there.address + 1, SIZE)])
    receipt = here.receipt(ticket)
    assert (receipt.ok, receipt.bytes) == (False, SIZE - 256)
    assert "no single registered range" in receipt.reason


def test_a_range_is_registered_once(sides: tuple[Side, Side]) -> None:
    here, _ = sides
    with pytest.raises(TransferFailed, match="overlap"):
        here.plane.register(here.address + 8, 8, Home.HOST)


def test_cancelling_waits_for_what_is_in_flight(sides: tuple[Side, Side], fabric: LoopbackFabric) -> None:
    here, there = sides
    fabric.hold()
    ticket = here.plane.submit(there.plane.endpoint(), run(here, there))
    while not fabric_is_busy(here):
        pass
    here.plane.cancel(ticket)
    assert not here.news.acquire(timeout=0.05)
    fabric.release()
    receipt = here.receipt(ticket)
    assert (receipt.ok, receipt.bytes, receipt.reason) == (False, 2 * 256, "cancelled")


def fabric_is_busy(side: Side) -> bool:
    return any(feed.in_flight == 2 for feed in side.plane._feeds.values())


def test_a_dropped_peer_fails_and_others_go_on(fabric: LoopbackFabric, sides: tuple[Side, Side]) -> None:
    here, there = sides
    third = Side(fabric, 0)
    with third.plane:
        third.plane.register(third.address, SIZE, Home.HOST)
        fabric.drop(there.plane.endpoint())
        lost = here.plane.submit(there.plane.endpoint(), run(here, there))
        good = here.plane.submit(third.plane.endpoint(), run(here, third))
        assert not here.receipt(lost).ok
        assert here.receipt(good).ok
        assert bytes(there.memory) == b"\x00" * SIZE


def test_a_failing_transport_reports_what_it_acknowledged(fabric: LoopbackFabric, sides: tuple[Side, Side]) -> None:
    here, there = sides
    fabric.fail_after = 3
    receipt = here.receipt(here.plane.submit(there.plane.endpoint(), run(here, there)))
    assert (receipt.ok, receipt.bytes) == (False, 3 * 256)


def test_old_bytes_may_land_after_a_failure_but_never_new_ones(
    fabric: LoopbackFabric, sides: tuple[Side, Side]
) -> None:
    here, there = sides
    fabric.fail_after, fabric.late = 0, True
    assert not here.receipt(here.plane.submit(there.plane.endpoint(), run(here, there))).ok
    ctypes.memset(here.address, 9, SIZE)  # the receipt is there: the source may be used again
    assert fabric.land_late() > 0
    assert set(bytes(there.memory)) == {0, 7}


def test_forgetting_a_peer_ends_its_tickets(fabric: LoopbackFabric, sides: tuple[Side, Side]) -> None:
    here, there = sides
    fabric.hold()
    ticket = here.plane.submit(there.plane.endpoint(), run(here, there))
    here.plane.forget_peer(there.plane.endpoint())
    fabric.release()
    assert not here.receipt(ticket).ok


def test_a_closed_plane_takes_nothing(fabric: LoopbackFabric) -> None:
    side = Side(fabric, 0)
    with side.plane:
        side.plane.register(side.address, SIZE, Home.HOST)
    with pytest.raises(TransferFailed, match="not open"):
        side.plane.submit("loopback:1", [Run(side.address, side.address, 1)])
    side.plane.close()


def test_the_loopback_plane_is_no_choice_for_an_engine() -> None:
    with pytest.raises(ConfigError, match="inside one process"):
        open_plane(load_config({"transfer": {"plane": "loopback"}}), "127.0.0.1", lambda: None)
