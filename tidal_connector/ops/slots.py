# SPDX-License-Identifier: Apache-2.0
"""Which token sits in which row of the selection cache: seats, and the state that ``ops.resolve`` keeps for them.

The rows of the cache (the *arena*) are cut into *extents* of equal size. A running request has a *seat*, a list of
extents, and so a row for each of its *slots*. The layers of an index group move in lockstep and share one
``SlotState``; every group has a state of its own over the same seats. All of it is plain memory of the caller, who
hands out extents and seats. Not thread-safe: one thread resolves, resets and hands out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True, frozen=True, eq=False)
class Seats:
    """Seats of running requests, for all groups.

    Slot ``s`` of a seat is arena row ``extents[seat, s // extent_rows] * extent_rows + s % extent_rows``.

    Attributes:
        capacity: int32 ``[seats]``, slots of each seat; 0: the seat is free. While the seat is in place (see
            ``SlotState``) it may change between two steps: grow, by extents whose rows are empty
            (``SlotState.forget``), or shrink, by the last ones. A listed seat has to be reset for that.
        extents: int32 ``[seats, max_extents]``; the first ``ceil(capacity / extent_rows)`` of each seat count.
        extent_rows: arena rows of an extent.

    Raises:
        TypeError, ValueError: an array is not a contiguous, writable int32 array of that shape.
    """

    capacity: Int32
    extents: Int32
    extent_rows: int
    view: Any = field(default=None, init=False, repr=False)  # what the native operator made of it

    def __post_init__(self) -> None:
        _demand("capacity", self.capacity, np.int32, 1)
        _demand("extents", self.extents, np.int32, 2)
        if self.extents.shape[0] != self.capacity.shape[0] or self.extent_rows < 1:
            raise ValueError(
                f"capacity {self.capacity.shape}, extents {self.extents.shape}, extent_rows {self.extent_rows}: "
                "expected [seats], [seats, max_extents], at least 1"
            )

    def extents_of(self, seat: int) -> npt.NDArray[np.int64]:
        """Return int64 ``[ceil(capacity / extent_rows)]``, the extents of a seat that count.

        Raises:
            ValueError: there are too few for the capacity, or one is negative.
        """
        capacity = int(self.capacity[seat])
        extents = self.extents[seat, : -(-capacity // self.extent_rows)].astype(np.int64)
        if not 0 <= capacity <= len(extents) * self.extent_rows or extents.min(initial=0) < 0:
            raise ValueError(f"seat {seat}: capacity {capacity} is not covered by extents {extents.tolist()}")
        return extents

    def rows(self, seat: int) -> npt.NDArray[np.int64]:
        """Return int64 ``[capacity]``, the arena row of each slot of a seat.

        Raises:
            ValueError: its extents do not cover its capacity.
        """
        slots = np.arange(int(self.capacity[seat]))
        extent: npt.NDArray[np.int64] = self.extents_of(seat)[slots // self.extent_rows]
        return extent * self.extent_rows + slots % self.extent_rows


@dataclass(slots=True, frozen=True, eq=False)
class SlotState:
    """What the slots of one index group hold: 8 B for each slot and 9 B for each seat, whatever the context.

    A seat is *in place* while its request fits: slot ``p`` is for position ``p``. Once the request outgrows the
    capacity the seat is *listed*, until its reset: any slot may hold any position, and the slots are kept in the order
    of their last use.

    Attributes:
        held: int32 ``[arena_rows]``, position (index of the token in its request) whose row is there; -1: none. Of a
            seat in place only the slots below ``length`` count.
        order: int32 ``[arena_rows]``. In the rows of a listed seat: the seat's arena rows, empty ones first, then from
            the longest unused to the last used. Its i-th entry is in the row of slot i.
        listed: uint8 ``[seats]``.
        filled: int32 ``[seats]``; positions below it are all held (0 when listed).
        length: int32 ``[seats]``, positions that the request had after the last step; none beyond is held.

    Raises:
        TypeError, ValueError: an array is not a contiguous, writable array of that dtype and shape.
    """

    held: Int32
    order: Int32
    listed: npt.NDArray[np.uint8]
    filled: Int32
    length: Int32
    view: Any = field(default=None, init=False, repr=False)  # what the native operator made of it

    def __post_init__(self) -> None:
        for name in ("held", "order", "filled", "length"):
            _demand(name, getattr(self, name), np.int32, 1)
        _demand("listed", self.listed, np.uint8, 1)
        if self.held.shape != self.order.shape or not self.listed.shape == self.filled.shape == self.length.shape:
            raise ValueError(
                f"held {self.held.shape}, order {self.order.shape}, listed {self.listed.shape}, filled "
                f"{self.filled.shape}, length {self.length.shape}: expected [arena_rows] twice, then [seats]"
            )

    @classmethod
    def empty(cls, arena_rows: int, seats: int) -> SlotState:
        """Return the state of an arena that holds nothing."""
        return cls(
            held=np.full(arena_rows, -1, np.int32),
            order=np.full(arena_rows, -1, np.int32),
            listed=np.zeros(seats, np.uint8),
            filled=np.zeros(seats, np.int32),
            length=np.zeros(seats, np.int32),
        )

    def reset(self, seats: Seats, seat: int) -> None:
        """Forget everything of a seat: before its extents go to others, or when it gets a new request."""
        self.held[seats.rows(seat)] = -1
        self.listed[seat] = 0
        self.filled[seat] = 0
        self.length[seat] = 0

    def forget(self, rows: npt.NDArray[np.integer[Any]]) -> None:
        """Empty arena rows that are about to join a seat in place."""
        self.held[rows] = -1

    def check(self, seats: Seats) -> None:
        """Verify the invariants of all seats, in time O(slots).

        Raises:
            AssertionError: one is broken; the message names the seat.
        """
        owner: dict[int, int] = {}
        for seat in range(len(seats.capacity)):
            rows = seats.rows(seat)
            for extent in seats.extents_of(seat).tolist():
                _hold(0 <= extent < len(self.held) // seats.extent_rows, seat, f"extent {extent} is outside the arena")
                _hold(extent not in owner, seat, f"extent {extent} is seat {owner.get(extent)}'s too")
                owner[extent] = seat
            if self.listed[seat]:
                _hold(
                    np.array_equal(np.sort(self.order[rows]), np.sort(rows)), seat, "order does not list its rows once"
                )
                held = self.held[rows]
                live = held[held >= 0]
                _hold(len(np.unique(live)) == len(live), seat, "holds a position twice")
                _hold(not (held >= self.length[seat]).any(), seat, "holds a position beyond its length")
                oldest = self.held[self.order[rows]] >= 0
                _hold(not (oldest[:-1] & ~oldest[1:]).any(), seat, "order has an empty row behind one that holds")
            else:
                place = np.arange(min(len(rows), self.length[seat]))
                held = self.held[rows[: len(place)]]
                _hold(bool(((held == -1) | (held == place)).all()), seat, "holds a position out of its place")
                _hold(0 <= self.filled[seat] <= self.length[seat], seat, "filled is beyond its length")
                _hold(not (held[: self.filled[seat]] < 0).any(), seat, "does not hold all that filled says")


def _hold(invariant: bool, seat: int, text: str) -> None:
    if not invariant:
        raise AssertionError(f"seat {seat}: {text}")


def _demand(name: str, array: object, dtype: type[np.generic], ndim: int) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        kind = f"{array.dtype} array" if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name}: expected a numpy array of {np.dtype(dtype)}, got {kind}")
    if array.ndim != ndim or not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError(f"{name} {array.shape}: expected {ndim} dimensions, contiguous and writable")
