# SPDX-License-Identifier: Apache-2.0
"""One session as the switchboard keeps it, and what it needs of whatever carries frames. Control thread only."""

from __future__ import annotations

from typing import Protocol

from tidal_connector.control.channel import Route
from tidal_connector.control.handshake import Peer
from tidal_connector.control.party import SessionKey
from tidal_connector.ids import EngineId


class Wire(Protocol):
    """What carries frames: the channel, or a simulated network."""

    def dial(self, address: str, line: str) -> Route:
        """Start connecting."""

    def hang_up(self, route: Route) -> None:
        """Close a dialled connection."""

    def send(self, route: Route, frame: bytes) -> bool:
        """Hand a frame on; False where it was dropped."""


class Session:
    """One call of D, seen from either side: up once ``peer`` is known."""

    __slots__ = ("called", "door", "expects", "heard", "key", "number", "peer", "route", "speak_at")

    def __init__(self, key: SessionKey, number: int, route: Route, called: bool, expects: EngineId, now: float) -> None:
        self.key = key
        self.number = number  # of D's calls
        self.route = route
        self.called = called  # by us
        self.expects = expects
        self.door = ""  # endpoint that the peer alone is told; empty: everybody's
        self.peer: Peer | None = None
        self.heard = now
        self.speak_at = now
