# SPDX-License-Identifier: Apache-2.0
"""What holds when the target dies, stops, restarts or falls silent, over real TCP."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.transfer.mooncake_bench import Source, Target, source, target
from tidal_connector.config import TransferConfig
from tidal_connector.transfer.plane import Receipt, Ticket

pytestmark = [pytest.mark.mooncake, pytest.mark.faults]

SIZE = 128 << 20
NEW = 0x77


def wait_for_bytes(there: Target) -> None:
    end = time.monotonic() + 20
    while not there.memory[0]:
        assert time.monotonic() < end, "the transfer did not start"
        time.sleep(0.0005)


def landed_new_bytes(there: Target) -> int:
    return int((there.memory == NEW).sum())


def settle(there: Target) -> None:
    """Wait until no connection is left or nothing has changed for a second."""
    before, same = -1, 0
    while same < 10:
        now = int((there.memory != 0).sum())
        same = same + 1 if now == before else 0
        before = now
        time.sleep(0.1)


def test_kill_minus_9_of_the_target_ends_every_ticket(tmp_path: Path) -> None:
    with target(tmp_path, SIZE) as there, source(SIZE) as here:
        tickets = [here.send(there), here.send(there)]
        wait_for_bytes(there)
        there.process.kill()
        for ticket in tickets:
            receipt = here.receipt(ticket)
            assert not receipt.ok
            assert receipt.bytes < SIZE
        late = here.receipt(here.send(there))
        assert "did not describe itself" in late.reason


def test_a_restarted_target_is_reached_under_its_new_name(tmp_path: Path) -> None:
    with source(1 << 20) as here:
        for life in ("first", "second"):
            (tmp_path / life).mkdir()
            with target(tmp_path / life, 1 << 20) as there:
                assert here.receipt(here.send(there)).ok
                assert (there.memory == here.memory).all()
            here.plane.forget_peer(there.endpoint)


def test_a_stopped_target_ends_the_ticket_and_the_source_may_then_be_reused(tmp_path: Path) -> None:
    """After the receipt the source is refilled and the target resumes: old bytes may land, new ones never."""
    with target(tmp_path, SIZE) as there, source(SIZE) as here:
        ticket = here.send(there)
        wait_for_bytes(there)
        os.kill(there.process.pid, signal.SIGSTOP)
        receipt = here.receipt(ticket)
        assert not receipt.ok
        here.memory[:] = NEW
        os.kill(there.process.pid, signal.SIGCONT)
        settle(there)
        assert landed_new_bytes(there) == 0


def test_a_cancelled_ticket_leaves_its_source_alone_after_the_receipt(tmp_path: Path) -> None:
    with target(tmp_path, SIZE) as there, source(SIZE) as here:
        ticket = here.send(there)
        wait_for_bytes(there)
        here.plane.cancel(ticket)
        receipt = here.receipt(ticket)
        here.memory[:] = NEW
        settle(there)
        assert landed_new_bytes(there) == 0
        assert receipt.ok == (receipt.bytes == SIZE)


def test_a_stopped_target_delays_no_other(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with target(tmp_path / "a", SIZE) as stopped, target(tmp_path / "b", SIZE) as good, source(SIZE) as here:
        stuck = here.send(stopped)
        wait_for_bytes(stopped)
        os.kill(stopped.process.pid, signal.SIGSTOP)
        for _ in range(3):
            assert here.receipt(here.send(good, 4096)).ok
        assert stuck not in here.receipts
        assert not here.receipt(stuck).ok
        assert here.order[-1] == stuck


def test_a_target_that_resumes_is_usable_again(tmp_path: Path) -> None:
    with target(tmp_path, SIZE) as there, source(SIZE) as here:
        ticket = here.send(there)
        wait_for_bytes(there)
        os.kill(there.process.pid, signal.SIGSTOP)
        assert not here.receipt(ticket).ok
        os.kill(there.process.pid, signal.SIGCONT)
        settle(there)
        attempts: list[Receipt] = []
        while not attempts or (not attempts[-1].ok and len(attempts) < 5):
            attempts.append(here.receipt(here.send(there)))
        assert attempts[-1].ok, attempts
        assert (there.memory == here.memory).all()


@pytest.mark.parametrize("gap_s", [2, 6])
def test_fr_21_first_transfer_after_idle(tmp_path: Path, gap_s: int) -> None:
    with target(tmp_path, 8 << 20) as there, source(8 << 20) as here:
        assert here.receipt(here.send(there)).ok
        time.sleep(gap_s)
        there.memory[:] = 0
        assert here.receipt(here.send(there)).ok
        assert (there.memory == here.memory).all()


def test_closing_with_writes_to_a_stopped_target_returns_and_reads_no_source_afterwards(
    tmp_path: Path,
) -> None:
    with target(tmp_path, SIZE) as there:
        with source(SIZE, TransferConfig(window=32)) as here:
            here.send(there)
            wait_for_bytes(there)
            os.kill(there.process.pid, signal.SIGSTOP)
        here.memory[:] = NEW
        os.kill(there.process.pid, signal.SIGCONT)
        settle(there)
        assert landed_new_bytes(there) == 0
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tidal-carry")]


def test_destroying_the_engine_as_the_last_resort_lets_the_source_go(tmp_path: Path) -> None:
    """The target stops, and the engine is destroyed before Mooncake itself gives up: nothing new may be read."""
    with target(tmp_path, SIZE) as there, source(SIZE, abandon_s=0.3) as here:
        ticket = here.send(there)
        wait_for_bytes(there)
        os.kill(there.process.pid, signal.SIGSTOP)
        receipt = here.receipt(ticket)
        assert "its engine was destroyed" in receipt.reason
        assert not receipt.drained
        here.memory[:] = NEW
        os.kill(there.process.pid, signal.SIGCONT)
        settle(there)
        assert landed_new_bytes(there) == 0
        # a busy machine may exceed so short a limit again
        assert any(here.receipt(here.send(there, 4096)).ok for _ in range(10))


def test_the_target_sees_when_no_connection_of_a_peer_is_left(tmp_path: Path) -> None:
    with target(tmp_path, 1 << 20) as there:
        with source(1 << 20) as here:
            assert here.receipt(here.send(there)).ok
            assert there.connections()
        end = time.monotonic() + 20
        while there.connections():
            assert time.monotonic() < end, "connections were left"
            time.sleep(0.05)


def test_no_thread_survives_a_plane(tmp_path: Path) -> None:
    with target(tmp_path, 1 << 20) as there:
        with source(1 << 20) as here:
            sent: Ticket = here.send(there)
            assert here.receipt(sent).ok
        assert isinstance(here, Source)
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tidal-carry")]
