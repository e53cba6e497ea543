# SPDX-License-Identifier: Apache-2.0
"""A bounded number of requests at engines, a bounded number waiting for their turn, and a word to the others when to
come again.

A request gets in when a slot is free and whatever it needs (a pair of engines) can be had at that moment; otherwise it
waits in line. Those behind it may overtake one whose needs cannot be met. One that is in already and needs another pair
waits in front, and keeps its slot. No I/O; event loop's thread only.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Granted = TypeVar("Granted")

_LONGEST_RETRY_S = 60
_WEIGHT = 0.1  # of the newest request in the mean duration


class QueueFull(Exception):
    """As many wait as may."""


class WaitedInVain(Exception):
    """The time to wait is over."""


class _Waiter(Generic[Granted]):
    """Somebody in line.

    Attributes:
        take: gets what the request needs, if that can be had now.
        inside: whether it has its slot already.
        granted: what it has got.
    """

    __slots__ = ("granted", "inside", "take")

    def __init__(self, take: Callable[[], Granted | None], inside: bool) -> None:
        self.take = take
        self.inside = inside
        self.granted: asyncio.Future[Granted] = asyncio.get_running_loop().create_future()


class Gate(Generic[Granted]):
    """The slots and the line.

    Args:
        slots: requests inside at once.
        places: requests in line at once; those inside that wait again do not count.
        undo: gives back what was granted to somebody who is gone.
    """

    def __init__(self, slots: int, places: int, undo: Callable[[Granted], None]) -> None:
        self._slots = slots
        self._places = places
        self._undo = undo
        self._again: deque[_Waiter[Granted]] = deque()
        self._line: deque[_Waiter[Granted]] = deque()
        self._mean_s = 1.0
        self.inside = 0

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    async def enter(self, take: Callable[[], Granted | None], wait_s: float) -> Granted:
        """Wait for a slot and for what the request needs; afterwards :meth:`leave` must be called.

        Args:
            take: gets what the request needs, or returns None where that cannot be had now.
            wait_s: longest wait.

        Raises:
            QueueFull: at once.
            WaitedInVain: neither in time.
        """
        if self.inside < self._slots and (granted := take()) is not None:
            self.inside += 1
            return granted
        if len(self._line) >= self._places:
            raise QueueFull
        return await self._wait(_Waiter(take, inside=False), self._line, wait_s)

    async def again(self, take: Callable[[], Granted | None], wait_s: float) -> Granted:
        """Wait, inside, for what the request needs for another attempt.

        Raises:
            WaitedInVain: it could not be had in time.
        """
        granted = take()
        if granted is not None:
            return granted
        return await self._wait(_Waiter(take, inside=True), self._again, wait_s)

    def leave(self, seconds: float | None = None) -> None:
        """Give the slot back.

        Args:
            seconds: that the request had it, for the estimate; None where that says nothing about others.
        """
        self.inside -= 1
        if seconds is not None:
            self._mean_s += _WEIGHT * (seconds - self._mean_s)
        self.wake()

    def wake(self) -> None:
        """Look again who can go on: a slot is free, or what requests need may be there now."""
        for waiter in self._turn():
            if not waiter.granted.done() and (granted := waiter.take()) is not None:
                self.inside += not waiter.inside
                waiter.granted.set_result(granted)

    def _turn(self) -> Iterator[_Waiter[Granted]]:
        yield from list(self._again)
        for waiter in list(self._line):
            if self.inside >= self._slots:
                return
            yield waiter

    async def _wait(self, waiter: _Waiter[Granted], line: deque[_Waiter[Granted]], wait_s: float) -> Granted:
        line.append(waiter)
        try:
            async with asyncio.timeout(wait_s):
                return await waiter.granted
        except BaseException as error:
            if waiter.granted.done() and not waiter.granted.cancelled():  # too late: granted, and its taker is gone
                self._undo(waiter.granted.result())
                if not waiter.inside:
                    self.leave()
            if isinstance(error, TimeoutError):
                raise WaitedInVain from None
            raise
        finally:
            line.remove(waiter)

    def retry_after_s(self) -> int:
        """Estimate after how many seconds there is room again."""
        return retry_after(self.waiting, self._slots, self._mean_s)


def retry_after(waiting: int, slots: int, mean_s: float) -> int:
    """Return the seconds until those in line and one more have had their turn, between 1 and 60.

    Args:
        waiting: requests in line.
        slots: requests that are served at once.
        mean_s: that a request takes.
    """
    return min(_LONGEST_RETRY_S, max(1, math.ceil((waiting + 1) * mean_s / slots)))
