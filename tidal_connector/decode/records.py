# SPDX-License-Identifier: Apache-2.0
"""What the receiving party keeps about each reservation, and what it says at its end. Values, and one pure check."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidal_connector.control.messages import Reserve
from tidal_connector.control.party import NEVER, SessionKey
from tidal_connector.decode.reservations import Phase, Receive, over
from tidal_connector.errors import ProtocolError
from tidal_connector.ids import RequestId, TransferId
from tidal_connector.layout import Home, Placement


class ReceiveOutcome(msgspec.Struct, frozen=True):
    """How a reservation ended. From now on nothing writes into its pages.

    Attributes:
        request, transfer: which.
        ok: the rows of tokens ``[first, end)`` are there, in every region.
        reason: why not; empty when ok.
        bytes: bytes that P reported as landed.
        first, end: the tokens that were asked for.
    """

    request: RequestId
    transfer: TransferId
    ok: bool
    reason: str
    bytes: int
    first: int
    end: int


class Leg:
    """A reservation with one rank of P: its machine, and what the machine need not know."""

    __slots__ = ("door", "host", "look_at", "rank", "receive", "session")

    def __init__(self, receive: Receive, rank: int, session: SessionKey) -> None:
        self.receive = receive
        self.rank = rank
        self.session = session
        self.host = ""  # of P's transfer plane, once known
        self.door = ""  # that P wrote through, once P is lost and it is being shut
        self.look_at = NEVER


class Record:
    """A reservation: a leg to each rank of P. Until the first of them answers, nobody knows how many there are.

    It is whole when every leg is ready. When one leg fails, the others are given up; each ends by its own rules, and
    the pages are free when the last one has ended.
    """

    __slots__ = ("failure", "legs", "request", "reserve")

    def __init__(self, request: RequestId, reserve: Reserve, first: Leg) -> None:
        self.request = request
        self.reserve = reserve
        self.legs = [first]
        self.failure = ""  # why it does not go well, by the first leg that says so

    def leg(self, session: SessionKey, generation: int) -> Leg | None:
        """Return the leg that a session's word of a generation is about."""
        if self.reserve.generation != generation:
            return None
        return next((leg for leg in self.legs if leg.session == session), None)

    @property
    def over(self) -> bool:
        """vLLM may have the pages back."""
        return all(over(leg.receive) for leg in self.legs)

    @property
    def ok(self) -> bool:
        """Every rank has delivered its share."""
        return all(leg.receive.phase is Phase.READY for leg in self.legs)

    @property
    def landed(self) -> int:
        """Bytes that the ranks reported, together."""
        return sum(leg.receive.landed for leg in self.legs)

    def named(self, leg: Leg, reason: str) -> str:
        """Return a reason with the rank of P that it comes from, where there are several."""
        return reason if len(self.legs) == 1 else f"rank {leg.rank} of prefill: {reason}"


def check_pages(
    placement: Placement, first: int, end: int, host_pages: Sequence[int], device_pages: Sequence[int]
) -> None:
    """Verify that page lists cover the tokens ``[first, end)`` and lie inside our own regions.

    Raises:
        ProtocolError: they do not, or the range is backwards.
    """
    if not 0 <= first <= end:
        raise ProtocolError(f"tokens [{first}, {end}): expected 0 <= first <= end")
    for region in placement.regions if end > first else ():
        pages = host_pages if region.home is Home.HOST else device_pages
        needed = -(-end // region.page_tokens) - first // region.page_tokens
        if len(pages) < needed or max(pages) >= region.pages or min(pages) < 0:
            raise ProtocolError(
                f"tokens [{first}, {end}) need {needed} {region.home} pages below {region.pages}; "
                f"got {len(pages)}, the highest {max(pages, default=-1)}"
            )
