# SPDX-License-Identifier: Apache-2.0
"""Transfers that this engine was offered and will not take: every rank of P is told, so that it frees the pages now.

Takes refusals from the receiving party; hands on ``Abort`` words, repeated until they are answered or nobody can be
expected to wait for them any more. Control thread only.
"""

from __future__ import annotations

from collections.abc import Callable

from tidal_connector.control.handshake import Peer
from tidal_connector.control.messages import NO_RESERVATION, Abort, Notice
from tidal_connector.control.party import NEVER, SessionKey
from tidal_connector.errors import TidalError
from tidal_connector.ids import EngineId, TransferId
from tidal_connector.log import get_logger

logger = get_logger(__name__)

Call = Callable[[EngineId, str, float], SessionKey]


class Declined:
    """A transfer that a rank of P has to be told of, though it was never reserved."""

    __slots__ = ("reason", "retry_at", "until")

    def __init__(self, reason: str, now: float, until: float) -> None:
        self.reason = reason
        self.retry_at = now
        self.until = until


class Declines:
    """The refusals that are still to be heard.

    Args:
        retry_s: seconds between two words about one of them.
        patience_s: seconds after which it is dropped; P then frees the pages by its own timers.
        call: returns the session with an engine at an address.
        tell: sends a word.
    """

    def __init__(
        self, retry_s: float, patience_s: float, call: Call, tell: Callable[[SessionKey, Notice], None]
    ) -> None:
        self._retry_s = retry_s
        self._patience_s = patience_s
        self._call = call
        self._tell = tell
        self._waiting: dict[tuple[TransferId, SessionKey], Declined] = {}

    def add(
        self,
        transfer: TransferId,
        engine: EngineId,
        address: str,
        reason: str,
        peer_of: dict[SessionKey, Peer],
        now: float,
    ) -> None:
        """Tell an engine, of which rank 0 is at an address; its other ranks are told once that one has answered."""
        try:
            session = self._call(engine, address, now)
        except TidalError as error:
            logger.warning("transfer %s: prefill cannot be told that it was declined: %s", transfer, error)
            return
        self._waiting[transfer, session] = Declined(reason, now, now + self._patience_s)
        if session in peer_of:
            self.up(session, peer_of[session], now)

    def owe(self, transfer: TransferId, session: SessionKey, reason: str, now: float) -> None:
        """Tell one rank, once its session is up."""
        self._waiting.setdefault((transfer, session), Declined(reason, now, now + self._patience_s))

    def up(self, key: SessionKey, peer: Peer, now: float) -> None:
        """A rank answered: tell it now, and the others if it is rank 0 of several."""
        for (transfer, session), declined in list(self._waiting.items()):
            if session != key:
                continue
            declined.retry_at = now
            for sibling in peer.siblings[1:] if peer.identity.rank == 0 else ():
                try:
                    other = self._call(peer.identity.engine, sibling, now)
                except TidalError as error:
                    logger.warning("transfer %s: a rank cannot be told that it was declined: %s", transfer, error)
                    continue
                self.owe(transfer, other, declined.reason, now)

    def lost(self, key: SessionKey) -> None:
        """A rank is gone: its pages are freed by its lease on us, or by its own timers."""
        for transfer, session in list(self._waiting):
            if session == key:
                del self._waiting[transfer, session]

    def heard(self, key: SessionKey, notice: Notice) -> bool:
        """Say whether a word answers a refusal, which is then over."""
        if notice.generation != NO_RESERVATION:
            return False
        return self._waiting.pop((notice.transfer, key), None) is not None

    def waits_for(self, key: SessionKey) -> bool:
        """Say whether a refusal waits for a session."""
        return any(session == key for _, session in self._waiting)

    def turn(self, now: float) -> float:
        """Repeat what is due; return when the next is."""
        due = NEVER
        for (transfer, session), declined in list(self._waiting.items()):
            if now >= declined.until:
                del self._waiting[transfer, session]
                continue
            if now >= declined.retry_at:
                declined.retry_at = now + self._retry_s
                self._tell(session, Abort(transfer, NO_RESERVATION, declined.reason))
            due = min(due, declined.until, declined.retry_at)
        return due
