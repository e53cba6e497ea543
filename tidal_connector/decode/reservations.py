# SPDX-License-Identifier: Apache-2.0
"""The receive machine: one reservation as the decode worker sees it. Pure: ``step(state, event, now) -> (state,
effects)``.

Its one promise: a page is given back only when no write into it can still arrive. The table of states is in
``control/README.md``; a test holds it to this file.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from tidal_connector.control.messages import Aborted, Accepted, Failed, Landed, Parked, Progress
from tidal_connector.control.party import NEVER
from tidal_connector.ids import Generation, TransferId


class Phase(enum.StrEnum):
    """States of a receive."""

    CALLING = "calling"
    RESERVED = "reserved"
    RECEIVING = "receiving"
    ABORTING = "aborting"
    QUARANTINE = "quarantine"
    READY = "ready"
    RELEASED = "released"


class Timers(msgspec.Struct, frozen=True):
    """Seconds; see the control settings. ``retry_s`` is how often an unanswered word is said again."""

    accept_s: float
    park_s: float
    stall_s: float
    quarantine_s: float
    deliver_s: float
    lease_s: float
    retry_s: float


class Receive(msgspec.Struct, frozen=True):
    """One reservation.

    Attributes:
        transfer, generation: which.
        wanted: bytes that this rank of P must deliver, by our own layout.
        timers: bounds.
        deliver_by: end of all patience.
        phase: state.
        timer: when the present phase ends by itself.
        retry_at: when an unanswered word is said again.
        parked: P knows the reservation and waits for the request.
        landed: bytes that P last reported.
        settled_at: since when P is known to submit nothing more; NEVER while it may.
        patience: end of quarantine, whatever P says.
        reason: why it does not go well.
    """

    transfer: TransferId
    generation: Generation
    wanted: int
    timers: Timers
    deliver_by: float
    phase: Phase = Phase.CALLING
    timer: float = NEVER
    retry_at: float = NEVER
    parked: bool = False
    landed: int = 0
    settled_at: float = NEVER
    patience: float = NEVER
    reason: str = ""


class SessionUp(msgspec.Struct, frozen=True):
    """P can be spoken to; ``wanted`` are the bytes that are its rank's to deliver, None where it delivers all."""

    wanted: int | None = None


class SessionLost(msgspec.Struct, frozen=True):
    """P refused us, its lease ended, it left, or it came back as another incarnation."""

    reason: str


class Heard(msgspec.Struct, frozen=True):
    """P said something about this generation."""

    notice: Parked | Accepted | Progress | Landed | Failed | Aborted


class GivenUp(msgspec.Struct, frozen=True):
    """P gives the transfer up, but has not said yet that it is drained."""

    reason: str


class Withdrawn(msgspec.Struct, frozen=True):
    """The request ended here, the engine stops, or handling it broke."""

    reason: str


class Tick(msgspec.Struct, frozen=True):
    """Time passed.

    Attributes:
        connections: P's connections to our data ports, None where unknown.
        fenced: nothing that P still sends can reach our memory any more.
    """

    connections: int | None = None
    fenced: bool = False


Event: TypeAlias = SessionUp | SessionLost | Heard | GivenUp | Withdrawn | Tick


class Effect(enum.Enum):
    """What the party does for the machine."""

    RESERVE = "send Reserve"
    ABORT = "send Abort"


Step: TypeAlias = tuple[Receive, list[Effect]]


def new(transfer: TransferId, generation: Generation, wanted: int, timers: Timers, now: float) -> Receive:
    """Return a reservation that has not left yet."""
    return Receive(transfer, generation, wanted, timers, deliver_by=now + timers.deliver_s, timer=now + timers.accept_s)


def over(receive: Receive) -> bool:
    """Say whether vLLM may have the pages back."""
    return receive.phase in (Phase.READY, Phase.RELEASED)


def due(receive: Receive) -> float:
    """Return when :class:`Tick` has something to do."""
    match receive.phase:
        case Phase.CALLING:
            return receive.timer
        case Phase.RESERVED | Phase.RECEIVING | Phase.ABORTING:
            return min(receive.timer, receive.retry_at, receive.deliver_by)
        case Phase.QUARANTINE:
            return min(receive.timer, receive.retry_at)
        case _:
            return NEVER


def step(receive: Receive, event: Event, now: float) -> Step:
    """Advance a reservation by one event at a monotonic time."""
    if over(receive):
        return receive, []
    match event:
        case SessionUp():
            return _session_up(receive, event, now)
        case SessionLost():
            return _session_lost(receive, event.reason, now)
        case Heard():
            return _heard(receive, event, now)
        case GivenUp():
            return _given_up(receive, event.reason, now)
        case Withdrawn():
            return _withdrawn(receive, event.reason, now)
        case Tick():
            return _tick(receive, event, now)


def _session_up(receive: Receive, event: SessionUp, now: float) -> Step:
    if receive.phase is not Phase.CALLING:
        return receive, []
    wanted = receive.wanted if event.wanted is None else event.wanted
    sent = msgspec.structs.replace(receive, phase=Phase.RESERVED, retry_at=now + receive.timers.retry_s, wanted=wanted)
    return sent, [Effect.RESERVE]


def _session_lost(receive: Receive, reason: str, now: float) -> Step:
    if receive.phase is Phase.CALLING:
        return _release(receive, reason)  # nothing was ever sent
    # P hears nothing more of this session, so it stops within its lease on us; one more for words still on their way.
    settled_at = min(receive.settled_at, now + 2 * receive.timers.lease_s)
    receive = msgspec.structs.replace(receive, settled_at=settled_at)
    if receive.phase is Phase.QUARANTINE:
        return _bounded(receive, now), []
    return _quarantine(receive, reason, now, abort=False)


def _heard(receive: Receive, event: Heard, now: float) -> Step:
    notice = event.notice
    if isinstance(notice, Parked | Accepted | Progress):
        return _sign_of_life(receive, notice, now)
    if receive.phase is Phase.CALLING:
        return receive, []  # an answer to nothing
    if isinstance(notice, Landed):
        return _landed(receive, notice.bytes)
    if notice.drained:
        return _release(receive, receive.reason or notice.reason)
    receive = msgspec.structs.replace(receive, settled_at=now)
    if receive.phase is Phase.QUARANTINE:
        return _bounded(receive, now), []
    return _quarantine(receive, receive.reason or notice.reason, now, abort=False)


def _sign_of_life(receive: Receive, notice: Parked | Accepted | Progress, now: float) -> Step:
    timers = receive.timers
    if receive.phase not in (Phase.RESERVED, Phase.RECEIVING):
        return receive, []
    if isinstance(notice, Parked):
        if receive.phase is Phase.RECEIVING or receive.parked:
            return msgspec.structs.replace(receive, retry_at=NEVER), []
        timer = now + timers.park_s + timers.accept_s
        return msgspec.structs.replace(receive, parked=True, timer=timer, retry_at=NEVER), []
    if isinstance(notice, Accepted) and notice.bytes != receive.wanted:
        return _withdrawn(receive, f"prefill will send {notice.bytes} bytes, {receive.wanted} are needed", now)
    landed = max(receive.landed, notice.bytes if isinstance(notice, Progress) else 0)
    alive = msgspec.structs.replace(
        receive, phase=Phase.RECEIVING, timer=now + timers.stall_s, retry_at=NEVER, landed=landed
    )
    return alive, []


def _landed(receive: Receive, size: int) -> Step:
    """Every write has been applied, so the pages are free of it in any case."""
    if receive.phase in (Phase.ABORTING, Phase.QUARANTINE):
        return _release(receive, receive.reason)
    if size != receive.wanted:
        return _release(receive, f"prefill says that {size} bytes landed, {receive.wanted} were needed")
    return msgspec.structs.replace(receive, phase=Phase.READY, landed=size, timer=NEVER, retry_at=NEVER), []


def _given_up(receive: Receive, reason: str, now: float) -> Step:
    if receive.phase is Phase.CALLING:
        return receive, []
    if receive.phase in (Phase.ABORTING, Phase.QUARANTINE):
        return receive, []
    return _abort(receive, f"prefill gave it up: {reason}", now)


def _withdrawn(receive: Receive, reason: str, now: float) -> Step:
    if receive.phase is Phase.CALLING:
        return _release(receive, reason)
    if receive.phase in (Phase.ABORTING, Phase.QUARANTINE):
        return receive, []
    return _abort(receive, reason, now)


def _tick(receive: Receive, tick: Tick, now: float) -> Step:
    timers = receive.timers
    match receive.phase:
        case Phase.CALLING if now >= receive.timer:
            return _release(receive, f"prefill did not answer within accept_s = {timers.accept_s:g} s")
        case Phase.RESERVED if now >= receive.timer:
            what = "its request did not come" if receive.parked else "prefill did not answer the reservation"
            return _quarantine(receive, f"{what} in time", now, abort=True)
        case Phase.RECEIVING if now >= receive.timer:
            return _quarantine(receive, f"no progress for stall_s = {timers.stall_s:g} s", now, abort=True)
        case Phase.RESERVED | Phase.RECEIVING if now >= receive.deliver_by:
            return _abort(receive, f"not delivered within {timers.deliver_s:g} s", now)
        case Phase.RESERVED if now >= receive.retry_at:
            return msgspec.structs.replace(receive, retry_at=now + timers.retry_s), [Effect.RESERVE]
        case Phase.ABORTING if now >= receive.timer:
            return _quarantine(receive, receive.reason, now, abort=True)
        case Phase.QUARANTINE:
            return _in_quarantine(receive, tick, now)
        case Phase.ABORTING if now >= receive.retry_at:
            return msgspec.structs.replace(receive, retry_at=now + timers.retry_s), [Effect.ABORT]
        case _:
            return receive, []


def _in_quarantine(receive: Receive, tick: Tick, now: float) -> Step:
    settled = now >= receive.settled_at
    if now >= receive.timer or tick.fenced or (settled and tick.connections == 0):
        return _release(receive, receive.reason)
    if now >= receive.retry_at:
        return msgspec.structs.replace(receive, retry_at=now + receive.timers.retry_s), [Effect.ABORT]
    return receive, []


def _abort(receive: Receive, reason: str, now: float) -> Step:
    timers = receive.timers
    aborting = msgspec.structs.replace(
        receive,
        phase=Phase.ABORTING,
        reason=reason,
        timer=now + timers.stall_s,
        retry_at=now + timers.retry_s,
        deliver_by=NEVER,
    )
    return aborting, [Effect.ABORT]


def _quarantine(receive: Receive, reason: str, now: float, *, abort: bool) -> Step:
    timers = receive.timers
    quarantined = msgspec.structs.replace(
        receive,
        phase=Phase.QUARANTINE,
        reason=reason,
        # While P may still submit, its own drain is waited for: once more as long as the sockets need.
        timer=now + 2 * timers.quarantine_s,
        retry_at=now + timers.retry_s,
    )
    return _bounded(quarantined, now), [Effect.ABORT] if abort else []


def _bounded(receive: Receive, now: float) -> Receive:
    if receive.settled_at == NEVER:
        return receive
    end = max(now, receive.settled_at) + receive.timers.quarantine_s
    return msgspec.structs.replace(receive, timer=min(receive.timer, end), retry_at=NEVER)


def _release(receive: Receive, reason: str) -> Step:
    return msgspec.structs.replace(receive, phase=Phase.RELEASED, reason=reason, timer=NEVER, retry_at=NEVER), []
