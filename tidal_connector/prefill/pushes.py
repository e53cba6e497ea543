# SPDX-License-Identifier: Apache-2.0
"""From rows of a layer to byte runs on the plane, and the checks that a reservation has to pass before.

Takes parts and reservations; hands on tickets. The only place in this room that combines page ids with regions: host
page ids address regions whose home is the host, device page ids those on the device, and nothing else. Control thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidal_connector.control.handshake import Peer
from tidal_connector.control.messages import Reserve
from tidal_connector.control.shares import Ranks, share
from tidal_connector.errors import LayoutMismatch, ProtocolError
from tidal_connector.ids import DevicePageId
from tidal_connector.layout import Home, KVLayout, Placement, Region
from tidal_connector.metrics import Counters
from tidal_connector.prefill.sends import Part
from tidal_connector.transfer.plane import Ticket, TransferPlane
from tidal_connector.transfer.runs import Run, plan_runs


class Target(msgspec.Struct, frozen=True):
    """A rank of D, and what this rank of P writes there.

    Attributes:
        rank, size: which rank of the decode engine, of how many.
        endpoint: its transfer plane.
        placement: where its KV is.
        writes: for each region, whether it is this rank's to write.
        row_bytes: bytes of one token that are written in each layer, in layer order.
    """

    rank: int
    size: int
    endpoint: str
    placement: Placement
    writes: tuple[bool, ...]
    row_bytes: tuple[int, ...]


class Pusher:
    """Knows where each layer's rows are, here and there.

    Args:
        layout: what our KV is.
        placement: where it is.
        plane: carries the bytes.
        counters: what is counted.
        descriptor_bytes: the plane's largest descriptor.
        rank: which rank of this engine pushes.
        size: of how many, all of which hold the same rows.

    Attributes:
        row_bytes: bytes of one token in each layer, all its regions together, in layer order.
    """

    def __init__(
        self,
        layout: KVLayout,
        placement: Placement,
        plane: TransferPlane,
        counters: Counters,
        descriptor_bytes: int,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        placement.check(layout)
        self._rank = rank
        self._size = size
        self._plane = plane
        self._counters = counters
        self._descriptor_bytes = descriptor_bytes
        self._placement = placement
        layers = sorted({region.layer for region in placement.regions})
        self._position = {layer: position for position, layer in enumerate(layers)}
        self._indices = [
            [index for index, region in enumerate(placement.regions) if region.layer == layer] for layer in layers
        ]
        self.row_bytes = self._row_bytes((True,) * len(placement.regions))

    def _row_bytes(self, writes: Sequence[bool]) -> tuple[int, ...]:
        regions = self._placement.regions
        return tuple(sum(regions[index].row_bytes for index in indices if writes[index]) for indices in self._indices)

    def target(self, peer: Peer) -> Target | None:
        """Work out what is ours to write for a rank of D; None for a peer that did not say where its KV is."""
        who, placement = peer.identity, peer.placement
        if placement is None:
            return None
        writes = share(placement.regions, Ranks(self._rank, self._size, who.rank, who.size))
        return Target(who.rank, who.size, peer.endpoint, placement, writes, self._row_bytes(writes))

    def positions(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Turn decoder layers into positions in ``row_bytes``.

        Raises:
            LayoutMismatch: a layer has no region.
        """
        unknown = [layer for layer in layers if layer not in self._position]
        if unknown:
            raise LayoutMismatch(f"layers {unknown} have no region; known: {sorted(self._position)}")
        return tuple(self._position[layer] for layer in layers)

    def check(self, reserve: Reserve, there: Placement) -> None:
        """Verify that a reservation's pages cover its range and lie inside the peer's regions.

        Raises:
            ProtocolError: the range is backwards, a page list is too short or has doubles, or a page is outside.
        """
        if reserve.first > reserve.end:
            raise ProtocolError(f"tokens [{reserve.first}, {reserve.end}): expected first <= end")
        for region in there.regions:
            pages = _pages_of(reserve, region)
            needed = -(-reserve.end // region.page_tokens) - reserve.first // region.page_tokens
            needed = needed if reserve.end > reserve.first else 0
            if len(pages) < needed:
                raise ProtocolError(
                    f"{region.home}_pages: {len(pages)} pages, tokens [{reserve.first}, {reserve.end}) need {needed} "
                    f"pages of {region.page_tokens} tokens"
                )
            if pages and not (min(pages) >= 0 and max(pages) < region.pages):
                raise ProtocolError(
                    f"{region.home}_pages: pages {min(pages)} to {max(pages)} given, "
                    f"{region.kind} layer {region.layer} has {region.pages}"
                )
        for name, pages in (("host_pages", reserve.host_pages), ("device_pages", reserve.device_pages)):
            if len(set(pages)) != len(pages):
                raise ProtocolError(f"{name}: a page is named twice")

    def push(self, target: Target, reserve: Reserve, pages: Sequence[DevicePageId], part: Part) -> Ticket:
        """Hand those rows of a part that are ours to write to the plane.

        Raises:
            LayoutMismatch: pages do not cover the part.
            TransferFailed: the plane refuses.
        """
        runs: list[Run] = []
        for index in self._indices[part.layer]:
            if not target.writes[index]:
                continue
            here, there = self._placement.regions[index], target.placement.regions[index]
            start = reserve.first // there.page_tokens * there.page_tokens
            runs += plan_runs(here, there, pages, _pages_of(reserve, there), part.first, part.end, start)
        ticket = self._plane.submit(target.endpoint, runs)
        self._counters.add("descriptors_submitted", sum(-(-run.length // self._descriptor_bytes) for run in runs))
        return ticket


def _pages_of(reserve: Reserve, region: Region) -> Sequence[int]:
    return reserve.host_pages if region.home is Home.HOST else reserve.device_pages
