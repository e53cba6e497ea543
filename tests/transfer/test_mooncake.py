# SPDX-License-Identifier: Apache-2.0
"""The Mooncake plane between two real processes over TCP: bytes, limits, refusals."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest

from tests.transfer.mooncake_bench import HOST, STALL_S, Source, Target, source, target
from tidal_connector.config import PoolConfig, Protocol, TransferConfig, load_config
from tidal_connector.errors import TransferFailed
from tidal_connector.layout import Home
from tidal_connector.memory import open_region
from tidal_connector.transfer.mooncake import MooncakePlane
from tidal_connector.transfer.plane import open_plane
from tidal_connector.transfer.runs import Run
from tidal_connector.transfer.segment import ask_segment

pytestmark = pytest.mark.mooncake

SIZE = 32 << 20
ROW = 1152


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Source, Target]]:
    with target(tmp_path_factory.mktemp("pool"), SIZE) as there, source(SIZE) as here:
        yield here, there


def test_every_byte_arrives(ends: tuple[Source, Target]) -> None:
    here, there = ends
    receipt = here.receipt(here.send(there))
    assert (receipt.ok, receipt.bytes, receipt.reason) == (True, SIZE, "")
    assert (there.memory == here.memory).all()


@pytest.mark.parametrize("count", [1000, 1024, 1025, 2048, 2049, 4000, 10000])
def test_fr_21_large_batches_land_complete(ends: tuple[Source, Target], count: int) -> None:
    here, there = ends
    rows = SIZE // ROW
    order = random.Random(count)
    runs = [
        Run(here.address + a * ROW, there.address + b * ROW, ROW)
        for a, b in zip(order.sample(range(rows), count), order.sample(range(rows), count), strict=True)
    ]
    there.memory[:] = 0
    receipt = here.receipt(here.plane.submit(there.endpoint, runs))
    assert (receipt.ok, receipt.bytes) == (True, count * ROW)
    for run in runs:
        a, b = run.source - here.address, run.destination - there.address
        assert (there.memory[b : b + ROW] == here.memory[a : a + ROW]).all()
    assert int((there.memory != 0).sum()) == count * ROW


def test_many_tickets_at_once_each_get_one_receipt(ends: tuple[Source, Target]) -> None:
    here, there = ends
    there.memory[:] = 0
    part = SIZE // 64
    tickets = [
        here.plane.submit(there.endpoint, [Run(here.address + n * part, there.address + n * part, part)])
        for n in range(64)
    ]
    assert all(here.receipt(ticket).bytes == part for ticket in tickets)
    assert (there.memory == here.memory).all()


def test_a_source_that_is_not_registered_is_refused_here(ends: tuple[Source, Target]) -> None:
    here, there = ends
    with pytest.raises(TransferFailed, match="source: 2 bytes"):
        here.plane.submit(there.endpoint, [Run(here.address + SIZE - 1, there.address, 2)])


def test_a_destination_that_is_not_registered_fails_and_costs_no_other_ticket(
    ends: tuple[Source, Target],
) -> None:
    here, there = ends
    there.memory[:] = 0
    bad = here.plane.submit(there.endpoint, [Run(here.address, there.address + SIZE - 1, 2)])
    good = here.send(there, 4096)
    assert "no single registered range" in here.receipt(bad).reason
    assert here.receipt(good).ok
    assert int((there.memory != 0).sum()) == 4096


def test_a_source_only_range_cannot_be_written_by_peers(ends: tuple[Source, Target]) -> None:
    here, _ = ends
    assert ask_segment(here.plane.endpoint(), STALL_S).buffers == ()


def test_overlapping_registrations_are_refused(ends: tuple[Source, Target]) -> None:
    here, _ = ends
    with pytest.raises(TransferFailed, match="overlap"):
        here.plane.register(here.address + 100, 100, Home.DEVICE)


def test_the_target_counts_our_connections(ends: tuple[Source, Target]) -> None:
    here, there = ends
    assert here.receipt(here.send(there)).ok
    assert there.connections()
    assert here.plane.peer_connections(HOST) == 0  # nobody writes to us


def test_a_forgotten_peer_can_be_reached_again(ends: tuple[Source, Target]) -> None:
    here, there = ends
    assert here.receipt(here.send(there, 4096)).ok
    here.plane.forget_peer(there.endpoint)
    assert here.receipt(here.send(there, 4096)).ok


def test_a_peer_that_refuses_fails_at_once(ends: tuple[Source, Target]) -> None:
    here, _ = ends
    with socket.create_server((HOST, 0)) as closed:
        port = closed.getsockname()[1]
    receipt = here.receipt(here.plane.submit(f"{HOST}:{port}", [Run(here.address, 4096, 8)]))
    assert "did not describe itself" in receipt.reason


def test_a_silent_peer_fails_by_our_deadline(ends: tuple[Source, Target]) -> None:
    here, _ = ends
    with socket.create_server((HOST, 0)) as silent:  # the kernel accepts, nobody answers
        endpoint = f"{HOST}:{silent.getsockname()[1]}"
        receipt = here.receipt(here.plane.submit(endpoint, [Run(here.address, 4096, 8)]), timeout_s=50)
    assert "did not describe itself within 3 s" in receipt.reason
    assert (receipt.bytes, receipt.drained) == (0, True)


def test_a_silent_peer_delays_no_other(ends: tuple[Source, Target]) -> None:
    _, there = ends
    with source(SIZE, stall_s=60) as here, socket.create_server((HOST, 0)) as silent:
        endpoint = f"{HOST}:{silent.getsockname()[1]}"
        stuck = here.plane.submit(endpoint, [Run(here.address, 4096, 8)])
        good = here.send(there)
        assert here.receipt(good).ok
        assert stuck not in here.receipts
        silent.accept()[0].close()
        assert not here.receipt(stuck).ok


def test_a_pool_of_mixed_pages_is_one_target(ends: tuple[Source, Target]) -> None:
    """One registration and one descriptor may span pieces of different page kinds."""
    here, _ = ends
    length = 24 << 20
    with (
        open_region(length, PoolConfig()) as pool,
        MooncakePlane(TransferConfig(), HOST, print, stall_s=STALL_S) as there,
    ):
        there.register(pool.address, pool.length, Home.HOST)
        ticket = here.plane.submit(there.endpoint(), [Run(here.address, pool.address, length)])
        assert here.receipt(ticket).ok
        assert pool.buffer[:length] == here.memory[:length].data
        here.plane.forget_peer(there.endpoint())


def test_nothing_works_before_open_and_after_close() -> None:
    plane = MooncakePlane(TransferConfig(), HOST, lambda: None, stall_s=STALL_S)
    with pytest.raises(TransferFailed, match="not open"):
        plane.endpoint()
    with plane:
        assert plane.endpoint().startswith(HOST)
    with pytest.raises(TransferFailed, match="not open"):
        plane.register(4096, 4096, Home.HOST)
    plane.close()


def test_a_protocol_that_does_not_run_is_refused_at_start() -> None:
    config = TransferConfig(protocol=Protocol.RDMA, device="mlx5_0")
    with (
        pytest.raises(TransferFailed, match=r"transfer.protocol = 'rdma'|failed on"),
        MooncakePlane(config, HOST, lambda: None, stall_s=STALL_S),
    ):
        pass


def test_the_configuration_names_this_plane() -> None:
    assert isinstance(open_plane(load_config({}), HOST, lambda: None), MooncakePlane)
