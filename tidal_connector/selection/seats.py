# SPDX-License-Identifier: Apache-2.0
"""Seats of the selection cache: which request holds which extents of the arena. Pure bookkeeping; forward thread.

The arena is cut into extents of a few rows. A request's seat is a list of them, so a short request holds no more than
its context, and a seat grows while its request does, up to the configured slots. With ``most_rows`` above ``base_rows``
(adaptive) a seat may grow to hold the whole context; those that hold the most give it back when another request finds
no room. A seat that lost room loses nothing but time: every row is in the host pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from tidal_connector.ops import Seats

Int32 = npt.NDArray[np.int32]

NO_SEAT = -1


class SeatBook:
    """Hands seats and extents to requests.

    Args:
        extents: extents of the arena.
        extent_rows: rows of an extent.
        requests: requests that may hold a seat at once.
        top_k: positions that a query selects at most.
        base_rows: rows of a seat, rounded up to whole extents.
        most_rows: rows up to which a seat may grow while there is room; ``base_rows`` unless adaptive.
        forget_rows: called with arena rows whose content no longer counts, before anybody gets them.
        forget_seat: called with a seat whose residency is void.
    """

    def __init__(
        self,
        *,
        extents: int,
        extent_rows: int,
        requests: int,
        top_k: int,
        base_rows: int,
        most_rows: int,
        forget_rows: Callable[[Int32], None],
        forget_seat: Callable[[int], None],
    ) -> None:
        self._extent_rows = extent_rows
        self._top_k = top_k
        self._base = -(-base_rows // extent_rows)
        self._most = max(self._base, -(-most_rows // extent_rows))
        self._forget_rows = forget_rows
        self._forget_seat = forget_seat
        self._free = list(range(extents - 1, -1, -1))
        self._free_seats = list(range(requests - 1, -1, -1))
        self._extents = extents
        self._held: list[list[int]] = [[] for _ in range(requests)]
        self._needed = [0] * requests  # extents without which the seat cannot serve what its request asks per step
        self._listed = [False] * requests
        self._seat_of: dict[str, int] = {}
        self.seats = Seats(
            capacity=np.zeros(requests, np.int32),
            extents=np.full((requests, min(self._most, max(1, extents))), -1, np.int32),
            extent_rows=extent_rows,
        )
        self.spills = 0

    def hold(self, request: str, length: int, queries: int) -> int:
        """Return the seat with which a request can be served in this step; :data:`NO_SEAT` where there is no room.

        Args:
            request: the request.
            length: tokens of its context at the end of the step.
            queries: how many of them this step computes.

        A request that is not served by its seat in a step has to give it up (:meth:`release`): the seat would not learn
        which rows were written. Where this method finds no room it has done so.
        """
        needed = -(-queries * (self._top_k + 1) // self._extent_rows)
        whole = -(-length // self._extent_rows)
        seat = self._seat_of.get(request)
        if seat is None:
            if not self._free_seats:
                return NO_SEAT
            seat = self._free_seats.pop()
            self._seat_of[request] = seat
        self._needed[seat] = min(needed, whole)
        if not self._listed[seat] and len(self._held[seat]) < min(whole, self._most):
            self._grow(seat, min(whole, self._most))
        if len(self._held[seat]) < whole:
            self._listed[seat] = True
        if len(self._held[seat]) < (needed if self._listed[seat] else whole):
            self.release(request)
            return NO_SEAT
        return seat

    def _grow(self, seat: int, extents: int) -> None:
        """Give a seat up to so many extents; one that cannot hold its whole context gets its share of the cache."""
        missing = extents - len(self._held[seat])
        if missing > len(self._free):
            wanted = min(extents, self._base) - len(self._held[seat])
            self._make_room(wanted, seat)
            missing = max(min(missing, len(self._free)), 0)
        if missing == 0:
            return
        taken = [self._free.pop() for _ in range(missing)]
        rows = np.asarray(taken, np.int32)[:, None] * self._extent_rows + np.arange(self._extent_rows, dtype=np.int32)
        self._forget_rows(rows.reshape(-1))
        self._assign(seat, self._held[seat] + taken)

    def _make_room(self, extents: int, but: int) -> None:
        """Take from the largest seats what they hold beyond their share, until so many extents are free."""
        while len(self._free) < extents:
            largest = max(
                (seat for seat in self._seat_of.values() if seat != but and self._surplus(seat) > 0),
                key=lambda seat: len(self._held[seat]),
                default=None,
            )
            if largest is None:
                return
            self._spill(largest)

    def _surplus(self, seat: int) -> int:
        return len(self._held[seat]) - max(self._base, self._needed[seat])

    def _spill(self, seat: int) -> None:
        kept = len(self._held[seat]) - self._surplus(seat)
        if self._listed[seat]:
            # Its order names slots that are about to go.
            self._forget_seat(seat)
        self._free.extend(self._held[seat][kept:])
        self._assign(seat, self._held[seat][:kept])
        self._listed[seat] = True
        self.spills += 1

    def _assign(self, seat: int, extents: list[int]) -> None:
        self._held[seat] = extents
        self.seats.extents[seat, : len(extents)] = extents
        self.seats.extents[seat, len(extents) :] = -1
        self.seats.capacity[seat] = len(extents) * self._extent_rows

    def release(self, request: str) -> None:
        """Take a request's seat back: it ended, was preempted, or was served without it. Unknown requests are none."""
        seat = self._seat_of.pop(request, None)
        if seat is None:
            return
        self._forget_seat(seat)
        self._free.extend(self._held[seat])
        self._assign(seat, [])
        self._listed[seat] = False
        self._needed[seat] = 0
        self._free_seats.append(seat)

    def seated(self) -> Iterable[str]:
        """Return the requests that hold seats."""
        return list(self._seat_of)

    @property
    def rows_used(self) -> int:
        """Arena rows in seats."""
        return (self._extents - len(self._free)) * self._extent_rows

    def check(self) -> None:
        """Verify that every extent is free or in one seat, and that the operator's tables say the same.

        Raises:
            AssertionError: they do not.
        """
        held = [extent for seat in self._seat_of.values() for extent in self._held[seat]]
        assert sorted(held + self._free) == list(range(self._extents))
        assert sorted([*self._seat_of.values(), *self._free_seats]) == list(range(len(self._held)))
        for seat, extents in enumerate(self._held):
            assert self.seats.extents[seat, : len(extents)].tolist() == extents
            assert (self.seats.extents[seat, len(extents) :] == -1).all()
            assert self.seats.capacity[seat] == len(extents) * self._extent_rows
