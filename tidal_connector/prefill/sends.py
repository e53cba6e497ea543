# SPDX-License-Identifier: Apache-2.0
"""The words of the send machine: its state, its events, and its effects. Pure values."""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from tidal_connector.control.messages import Abort, Notice, Reserve
from tidal_connector.control.party import NEVER, SessionKey
from tidal_connector.ids import TransferId
from tidal_connector.prefill.ranges import EMPTY, Ranges


class Phase(enum.StrEnum):
    """States of a send."""

    NEW = "new"
    PARKED = "parked"
    OPEN = "open"
    SENDING = "sending"
    DRAINING = "draining"
    GONE = "gone"


class Part(msgspec.Struct, frozen=True):
    """Rows of one layer that are being submitted: tokens ``[first, end)``.

    ``void`` is the token from which on the source was taken away while the part was in flight: those rows will be sent
    again once they are written again.
    """

    number: int
    layer: int
    first: int
    end: int
    void: int


class Send(msgspec.Struct, frozen=True):
    """One transfer.

    Attributes:
        transfer: its id.
        row_bytes: bytes of a token in each layer, over all its regions that this rank writes; layers are positions in
            this tuple.
        phase: state.
        known: the request was scheduled here.
        session: D's session, once it reserved or declined.
        reserve: D's reservation.
        ready: per layer, the tokens whose rows are written.
        submitted: per layer, the tokens whose rows were handed on and stay valid.
        parts: what is in flight.
        parts_made: numbers of parts used so far.
        landed: acknowledged bytes of rows that stay valid.
        drained: every part that ended left nothing that could land late.
        asked: D asked for the end, so the answer is Aborted.
        reason: why it does not go well.
        timer: when Parked or Open ends.
        moved_at: last acknowledged byte, or the start of what is in flight.
        told_at: last word to D.
        deliver_by: end of D's patience.
        last_word: what was said to D at the end, to be said again to a late question.
        ok: all of [first, end) landed.
        sealed: the request ended here, so nothing more will be written.
        prompt: digest of its prompt's tokens, once known; empty where it stays unknown.
    """

    transfer: TransferId
    row_bytes: tuple[int, ...]
    phase: Phase = Phase.NEW
    known: bool = False
    session: SessionKey | None = None
    reserve: Reserve | None = None
    ready: tuple[Ranges, ...] = ()
    submitted: tuple[Ranges, ...] = ()
    parts: tuple[Part, ...] = ()
    parts_made: int = 0
    landed: int = 0
    drained: bool = True
    asked: bool = False
    reason: str = ""
    timer: float = NEVER
    moved_at: float = 0.0
    told_at: float = 0.0
    deliver_by: float = NEVER
    last_word: Notice | None = None
    ok: bool = False
    sealed: bool = False
    prompt: str = ""


class Opened(msgspec.Struct, frozen=True):
    """The request was scheduled here; ``prompt`` digests its tokens."""

    prompt: str = ""


class Reserved(msgspec.Struct, frozen=True):
    """D sent a reservation.

    ``row_bytes`` are those that this rank writes for that rank of D, 0 for a layer that others write; None: all.
    """

    session: SessionKey
    reserve: Reserve
    park_s: float
    row_bytes: tuple[int, ...] | None = None


class Wrote(msgspec.Struct, frozen=True):
    """Rows of tokens ``[first, end)`` are written in these layers (positions; None: all)."""

    layers: tuple[int, ...] | None
    first: int
    end: int


class Unwritten(msgspec.Struct, frozen=True):
    """Preempted: the rows from token ``keep`` on are no longer there."""

    keep: int


class PrefillDone(msgspec.Struct, frozen=True):
    """The whole prompt is written; a reservation may take until ``hold_until``."""

    hold_until: float


class Sealed(msgspec.Struct, frozen=True):
    """The request ended well here: no row will be written any more. Implies PrefillDone."""

    hold_until: float


class PartEnded(msgspec.Struct, frozen=True):
    """The plane's receipt for a part. ``drained``: nothing of it can land late."""

    number: int
    ok: bool
    drained: bool
    reason: str


class Withdrawn(msgspec.Struct, frozen=True):
    """The request ended here before its KV was over there, the engine stops, or handling it broke."""

    reason: str


class AbortAsked(msgspec.Struct, frozen=True):
    """D sent an Abort."""

    session: SessionKey
    abort: Abort


class PeerLost(msgspec.Struct, frozen=True):
    """D's session ended: its lease, a new incarnation, or its goodbye."""

    reason: str


class Tick(msgspec.Struct, frozen=True):
    """Time passed.

    ``peer_moved_at`` is when the last bytes of any transfer to this peer were acknowledged: those of this one may have
    to queue behind them, and that is no stall.
    """

    stall_s: float
    peer_moved_at: float = 0.0


Event: TypeAlias = (
    Opened | Reserved | Wrote | Unwritten | PrefillDone | Sealed | PartEnded | Withdrawn | AbortAsked | PeerLost | Tick
)


class Submit(msgspec.Struct, frozen=True):
    """Effect: hand the rows of a part to the plane."""

    part: Part


class Cancel(msgspec.Struct, frozen=True):
    """Effect: hand nothing more of these parts on."""

    parts: tuple[int, ...]


class Tell(msgspec.Struct, frozen=True):
    """Effect: say this to D."""

    session: SessionKey
    notice: Notice


Effect: TypeAlias = Submit | Cancel | Tell
Step: TypeAlias = tuple[Send, list[Effect]]


def new(transfer: TransferId, row_bytes: tuple[int, ...]) -> Send:
    """Return a transfer that nobody has spoken of yet."""
    empty = (EMPTY,) * len(row_bytes)
    return Send(transfer, row_bytes, ready=empty, submitted=empty)


def buried(send: Send) -> Send:
    """Return what has to be remembered of a transfer that is over: enough to answer late questions."""
    return Send(
        send.transfer,
        send.row_bytes,
        phase=Phase.GONE,
        known=send.known,
        session=send.session,
        drained=send.drained,
        reason=send.reason,
        last_word=send.last_word,
        ok=send.ok,
    )
