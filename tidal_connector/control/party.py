# SPDX-License-Identifier: Apache-2.0
"""What a room is to the control thread, and what the control thread is to a room.

A *party* (the sender of the prefill room, the receiver of the decode room) is told what peers said and what time it is,
always on the control thread. The worker's threads only post intents and take outcomes: both are queues, so nothing
that a peer does can hold up a forward pass. What breaks while one transfer is handled fails that transfer and nothing
else.
"""

from __future__ import annotations

import abc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, NewType, Protocol, TypeVar

from tidal_connector.control.handshake import Peer
from tidal_connector.control.messages import Notice, Pair
from tidal_connector.ids import EngineId, TransferId
from tidal_connector.log import get_logger
from tidal_connector.metrics import Counters

logger = get_logger(__name__)

SessionKey = NewType("SessionKey", str)
"""One session with one incarnation of a peer; never used again after it was lost."""

_BUDGET_S = 0.02  # of intents in one turn; a step of a large model posts hundreds

NEVER = float("inf")
"""Due time of something that waits for no clock."""

Outcome = TypeVar("Outcome")


class Link(Protocol):
    """What the sessions offer to a party. Control thread only."""

    def call(self, engine: EngineId, address: str, now: float) -> SessionKey:
        """Return the session with an engine at an address; a new one comes up, or is lost, later."""

    def tell(self, key: SessionKey, notice: Notice) -> bool:
        """Send to a peer; False where the session is not up or the kernel takes nothing now."""

    def peer(self, key: SessionKey) -> Peer | None:
        """Return who is on the other side; None while the session is not up."""


def survive(what: str, act: Callable[[], None]) -> str:
    """Run something that concerns one transfer or one message; return why it broke, or an empty text.

    The only place that catches everything: the control thread must outlive every fault in what it is given, because the
    leases of all other transfers hang on it.
    """
    try:
        act()
    except Exception as error:
        logger.exception("%s broke", what)
        return f"{what} broke: {type(error).__name__}: {error}"
    return ""


class Party(abc.ABC, Generic[Outcome]):
    """Base of both rooms' parties: the queues towards the worker's threads.

    Args:
        counters: what is counted.
    """

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self._posted: deque[tuple[Callable[[float], None], Callable[[str, float], None]]] = deque()
        self._news = threading.Condition()
        self._outcomes: list[Outcome] = []
        self._unpublished: list[Outcome] = []
        self._ring: Callable[[], None] = _silence
        self._link: Link | None = None

    @property
    def link(self) -> Link:
        """The sessions.

        Raises:
            RuntimeError: the party is not attached yet.
        """
        if self._link is None:
            raise RuntimeError("this party belongs to no control loop yet; build the loop with it first")
        return self._link

    def attach(self, link: Link, ring: Callable[[], None]) -> None:
        """Join the sessions; ``ring`` wakes the control thread. Called once, before that thread starts."""
        self._link = link
        self._ring = ring

    # --- any thread

    def outcomes(self) -> list[Outcome]:
        """Take what has ended since the last call, each request once."""
        with self._news:
            found, self._outcomes = self._outcomes, []
            return found

    def wait(self, timeout_s: float) -> bool:
        """Sleep until an outcome is there or the time is over; say whether one is there."""
        with self._news:
            return self._news.wait_for(lambda: bool(self._outcomes), timeout_s)

    def _post(self, intent: Callable[[float], None], blame: Callable[[str, float], None]) -> None:
        """Queue an intent; ``blame`` gets the reason if carrying it out breaks."""
        self._post_many(((intent, blame),))

    def _post_many(self, intents: Iterable[tuple[Callable[[float], None], Callable[[str, float], None]]]) -> None:
        self._posted.extend(intents)
        self._ring()

    # --- control thread

    def _report(self, outcome: Outcome) -> None:
        self._unpublished.append(outcome)

    def publish(self) -> None:
        """Show the worker what ended in this turn. Comes after the gauges: an idle engine reads them no more."""
        if self._unpublished:
            with self._news:
                self._outcomes += self._unpublished
                self._news.notify_all()
            self._unpublished = []

    def take_posted(self, now: float) -> bool:
        """Carry out what was posted, in its order, but only so much that beats are not late; say whether more waits."""
        until = time.perf_counter() + _BUDGET_S
        while self._posted and time.perf_counter() < until:
            intent, blame = self._posted.popleft()
            broken = survive("an intent of the worker", lambda act=intent: act(now))  # type: ignore[misc]
            if broken:
                survive("failing a transfer", lambda act=blame, why=broken: act(why, now))  # type: ignore[misc]
        return bool(self._posted)

    @abc.abstractmethod
    def turn(self, now: float) -> float:
        """Do what is due and return when something will be (monotonic seconds, NEVER for nothing)."""

    def door(self, key: SessionKey) -> str:
        """Return the endpoint that the peer of a new session is told; empty for the one that everybody is told.

        Raises:
            TransferFailed: there can be no further one.
        """
        return ""

    @abc.abstractmethod
    def up(self, key: SessionKey, peer: Peer, now: float) -> None:
        """A session came up."""

    @abc.abstractmethod
    def lost(self, key: SessionKey, reason: str, now: float) -> None:
        """A session ended, or never came up; its key will not be heard of again."""

    @abc.abstractmethod
    def heard(self, key: SessionKey, notice: Notice, now: float) -> None:
        """A peer spoke about a transfer."""

    @abc.abstractmethod
    def beat(self, key: SessionKey, pairs: tuple[Pair, ...], now: float) -> None:
        """A peer named the transfers that it believes live."""

    @abc.abstractmethod
    def live(self, key: SessionKey) -> tuple[Pair, ...]:
        """Name the transfers of a session that live here."""

    @abc.abstractmethod
    def needs(self, key: SessionKey) -> bool:
        """Say whether anything here still waits for this session to come up."""

    @abc.abstractmethod
    def broke(self, transfer: TransferId, reason: str, now: float) -> None:
        """Handling a message broke: fail its transfer."""

    @abc.abstractmethod
    def stopping(self, reason: str, now: float) -> None:
        """The engine stops: begin nothing, end everything."""

    @abc.abstractmethod
    def busy(self) -> bool:
        """Say whether a transfer is still open on this side."""

    @abc.abstractmethod
    def gauges(self) -> Mapping[str, float]:
        """Return this party's share of each gauge that it knows."""


def _silence() -> None:
    """Stand for the bell while there is no control thread to wake."""
