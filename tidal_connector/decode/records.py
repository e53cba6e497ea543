# SPDX-License-Identifier: Apache-2.0
"""What the receiving party keeps about each reservation, and what it says at its end. Values, and one pure check."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidal_connector.control.messages import Reserve
from tidal_connector.control.party import NEVER, SessionKey
from tidal_connector.decode.reservations import Receive
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


class Record:
    """A reservation with what the machine need not know of it."""

    __slots__ = ("door", "host", "look_at", "receive", "request", "reserve", "session")

    def __init__(self, receive: Receive, request: RequestId, reserve: Reserve, session: SessionKey) -> None:
        self.receive = receive
        self.request = request
        self.reserve = reserve
        self.session = session
        self.host = ""  # of P's transfer plane, once known
        self.door = ""  # that P wrote through, once P is lost and it is being shut
        self.look_at = NEVER


class Declined:
    """A transfer that P has to be told of, though it was never reserved."""

    __slots__ = ("reason", "retry_at", "session", "until")

    def __init__(self, session: SessionKey, reason: str, now: float, until: float) -> None:
        self.session = session
        self.reason = reason
        self.retry_at = now
        self.until = until


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
