# SPDX-License-Identifier: Apache-2.0
"""What a reservation has to satisfy before a byte moves, and which ids address which memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.control.pair import LAYERS, Memory, layout
from tidal_connector.control.handshake import Peer
from tidal_connector.control.messages import Identity, Reserve
from tidal_connector.errors import LayoutMismatch, ProtocolError
from tidal_connector.ids import DevicePageId, EngineId, Generation, HostPageId, Incarnation, TransferId
from tidal_connector.layout import Home
from tidal_connector.metrics import Counters
from tidal_connector.prefill.pushes import Pusher
from tidal_connector.prefill.sends import Part
from tidal_connector.transfer.loopback import LoopbackFabric, LoopbackPlane

HERE, THERE = Memory(layout(), Home.DEVICE, 16, 8, 0x11), Memory(layout(), Home.HOST, 16, 8, 0x7E)


def reserve(host: tuple[int, ...], device: tuple[int, ...], first: int = 0, end: int = 40) -> Reserve:
    hosts, devices = tuple(map(HostPageId, host)), tuple(map(DevicePageId, device))
    return Reserve(TransferId("x"), Generation(1), first, end, hosts, devices, 1.0, 1.0)


@pytest.fixture
def pusher() -> Pusher:
    plane = LoopbackPlane(LoopbackFabric(), lambda: None)
    return Pusher(layout(), HERE.placement, plane, Counters(), 4096)


GOOD = reserve((1, 2, 3), (4, 5, 6))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda: reserve((1, 2), (4, 5, 6)), "host_pages: 2 pages, tokens [0, 40) need 3"),
        (lambda: reserve((1, 2, 3), ()), "device_pages: 0 pages"),
        (lambda: reserve((1, 2, 8), (4, 5, 6)), "host_pages: pages 1 to 8 given, latent layer 0 has 8"),
        (lambda: reserve((1, 2, 3), (4, -5, 6)), "device_pages: pages -5 to 6 given"),
        (lambda: reserve((1, 2, 2), (4, 5, 6)), "host_pages: a page is named twice"),
        (lambda: reserve((1, 2, 3), (4, 4, 6)), "device_pages: a page is named twice"),
        (lambda: reserve((), (), 5, 4), "expected first <= end"),
    ],
    ids=["short", "none", "outside", "negative", "host twice", "device twice", "backwards"],
)
def test_a_bad_reservation_is_named(pusher: Pusher, bad: Callable[[], Reserve], words: str) -> None:
    pusher.check(GOOD, THERE.placement)
    with pytest.raises(ProtocolError) as caught:
        pusher.check(bad(), THERE.placement)
    assert words in str(caught.value)


def test_an_empty_range_needs_no_page_and_a_prefix_only_the_rest(pusher: Pusher) -> None:
    pusher.check(reserve((), (), 40, 40), THERE.placement)
    pusher.check(reserve((1, 2), (4, 5), 17, 40), THERE.placement)


def test_layers_without_index_keys_have_shorter_rows(pusher: Pusher) -> None:
    assert pusher.row_bytes == (52, 52, 40)
    assert pusher.positions((0, LAYERS - 1)) == (0, LAYERS - 1)
    with pytest.raises(LayoutMismatch, match=r"layers \[7\] have no region; known: \[0, 1, 2\]"):
        pusher.positions((7,))


def test_fr_30_host_ids_address_the_host_and_device_ids_the_device() -> None:
    fabric = LoopbackFabric()
    here, there = Memory(layout(), Home.DEVICE, 16, 8, 0x11), Memory(layout(), Home.HOST, 16, 8, 0x7E)
    with LoopbackPlane(fabric, lambda: None) as plane, LoopbackPlane(fabric, lambda: None) as target:
        here.register(plane)
        there.register(target)
        pusher = Pusher(layout(), here.placement, plane, Counters(), 4096)
        identity = Identity(EngineId("decode-0"), Incarnation("d"))
        peer = Peer(identity, target.endpoint(), 1.0, there.placement)
        target_rank = pusher.target(peer)
        assert target_rank is not None
        pusher.push(target_rank, reserve((1,), (6,), 0, 16), [DevicePageId(0)], Part(1, 0, 0, 16, 16))
        while not plane.poll():
            pass
    latents, index = there.arrays[0], there.arrays[1]
    assert (latents[1] == 0x11).all()
    assert (index[6] == 0x11).all()
    assert (latents[6] == 0x7E).all()
    assert (index[1] == 0x7E).all()


def test_pages_that_do_not_cover_the_rows_are_an_error(pusher: Pusher) -> None:
    peer = Peer(Identity(EngineId("d"), Incarnation("d")), "loopback:9", 1.0, THERE.placement)
    target = pusher.target(peer)
    assert target is not None
    with pytest.raises(LayoutMismatch, match="beyond the pages"):
        pusher.push(target, GOOD, [DevicePageId(0)], Part(1, 0, 0, 40, 40))
