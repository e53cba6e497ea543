# SPDX-License-Identifier: Apache-2.0
"""Seats on an accelerator: which request has which, decided once per step on the host. Forward thread.

Every seat has the same, fixed number of slots, so a :class:`~tidal_connector.selection.seats.SeatBook` whose extents
are whole seats keeps them. What a seat holds is known on the device alone; the host says two things about it with each
step. The *generation* is new whenever a request gets a seat, and a seat that was another generation's is empty. The
*stable* position is where rows begin that were written past the seat since the request was last served from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidal_connector.errors import PoolExhausted
from tidal_connector.selection.seats import NO_SEAT, SeatBook

FOREVER = (1 << 31) - 1
"""A stable position that lies behind every context."""


@dataclass(frozen=True, slots=True)
class Sitting:
    """What the device is told of a request in one step.

    Attributes:
        seat: its seat.
        generation: of its residency, 1 to 2**31 - 1.
        stable: positions from here on count as not held, besides those of the step.
    """

    seat: int
    generation: int
    stable: int


@dataclass(slots=True)
class _Request:
    generation: int
    stable: int = FOREVER


class DeviceSeats:
    """Hands equal seats to requests.

    Args:
        seats: seats, one for each request that may run at once.
        slots: rows of each.
        top_k: positions that a query selects at most.
    """

    def __init__(self, *, seats: int, slots: int, top_k: int) -> None:
        self._book = SeatBook(
            extents=seats,
            extent_rows=slots,
            requests=seats,
            top_k=top_k,
            base_rows=slots,
            most_rows=slots,
            forget_rows=lambda _rows: None,  # a generation does it, on the device
            forget_seat=lambda _seat: None,
        )
        self._slots = slots
        self._seats = seats
        self._requests: dict[str, _Request] = {}
        self._generation = 0

    def sit(self, request: str, queries: int) -> Sitting:
        """Return where a request sits in this step, with a seat of its own from its first step on.

        Raises:
            PoolExhausted: all seats are taken: a request that ended was not released, or more run than there are seats.
        """
        seat = self._book.hold(request, self._slots, queries)
        if seat == NO_SEAT:
            raise PoolExhausted(
                f"request {request}: all {self._seats} seats of {self._slots} slots are taken; expected as many as "
                "requests run at once (max_num_seqs)"
            )
        known = self._requests.get(request)
        if known is None:
            known = self._requests[request] = _Request(self._next_generation())
        return Sitting(int(self._book.seats.extents[seat, 0]), known.generation, known.stable)

    def served(self, request: str) -> None:
        """Note that the step for which a request sat down is on its way to the device: its seat knows of all rows."""
        self._requests[request].stable = FOREVER

    def void(self, request: str) -> None:
        """Give up all that a request's seat holds. Unknown requests hold nothing."""
        known = self._requests.get(request)
        if known is not None:
            known.generation = self._next_generation()

    def _next_generation(self) -> int:
        self._generation = self._generation % FOREVER + 1
        return self._generation

    def elsewhere(self, request: str, start: int) -> None:
        """Note that a step wrote rows of a request from ``start`` on past its seat. Unknown requests have none."""
        known = self._requests.get(request)
        if known is not None:
            known.stable = min(known.stable, start)

    def release(self, request: str) -> None:
        """Take a request's seat back. Unknown requests are none."""
        self._book.release(request)
        self._requests.pop(request, None)

    def seated(self) -> list[str]:
        """Return the requests that have seats."""
        return list(self._requests)

    def check(self) -> None:
        """Verify that every seat is free or one request's.

        Raises:
            AssertionError: it is not so.
        """
        self._book.check()
        assert sorted(self._book.seated()) == sorted(self._requests)
