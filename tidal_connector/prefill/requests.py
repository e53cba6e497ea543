# SPDX-License-Identifier: Apache-2.0
"""The send machine: one transfer as the prefill worker sees it. Pure: ``step(state, event, now) -> (state, effects)``.

What is to be submitted is always *ready, and reserved, and not submitted yet*: so early and late reservations, chunks,
prefix hits and preemption are one rule. The table of states is in ``control/README.md``; a test holds it to this file.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tidal_connector.control.messages import (
    Abort,
    Aborted,
    Accepted,
    Failed,
    Landed,
    Notice,
    Parked,
    Progress,
)
from tidal_connector.control.party import NEVER, SessionKey
from tidal_connector.ids import Generation
from tidal_connector.prefill.ranges import Ranges, clip, count, minus, remove, unite
from tidal_connector.prefill.sends import (
    AbortAsked,
    Cancel,
    Effect,
    Event,
    Opened,
    Part,
    PartEnded,
    PeerLost,
    Phase,
    PrefillDone,
    Reserved,
    Sealed,
    Send,
    Step,
    Submit,
    Tell,
    Tick,
    Unwritten,
    Withdrawn,
    Wrote,
)

PART_TOKENS = 4096
"""Tokens of a part at most (some MB): its receipt is the only sign of progress, so it must not take long."""

_BREATH_S = 0.1  # between two words of progress at least, so that D's settings cannot keep the control thread busy


def step(send: Send, event: Event, now: float) -> Step:
    """Advance a transfer by one event at a monotonic time."""
    if send.phase is Phase.GONE and not isinstance(event, Opened | Reserved | AbortAsked):
        return send, []
    match event:
        case Opened():
            return _opened(send, event.prompt, now)
        case Reserved():
            return _reserved(send, event, now)
        case Wrote():
            return _feed(_wrote(send, event), now)
        case Unwritten():
            return _unwritten(send, event.keep), []
        case PrefillDone():
            return _prefill_done(send, event.hold_until), []
        case Sealed():
            return _feed(msgspec.structs.replace(_prefill_done(send, event.hold_until), sealed=True), now)
        case PartEnded():
            return _part_ended(send, event, now)
        case Withdrawn():
            return _end(send, event.reason, now, tell=True)
        case AbortAsked():
            return _abort_asked(send, event, now)
        case PeerLost():
            return _peer_lost(send, event.reason, now)
        case Tick():
            return _tick(send, event, now)


def due(send: Send, stall_s: float, peer_moved_at: float = 0.0) -> float:
    """Return when :class:`Tick` has something to do."""
    match send.phase:
        case Phase.PARKED | Phase.OPEN:
            return send.timer
        case Phase.SENDING:
            stalled = max(send.moved_at, peer_moved_at) + stall_s if send.parts else NEVER
            return min(stalled, send.deliver_by, send.told_at + _breath(send))
        case _:
            return NEVER


def _breath(send: Send) -> float:
    return max(_BREATH_S, send.reserve.stall_s / 3) if send.reserve else NEVER


def _opened(send: Send, prompt: str, now: float) -> Step:
    if send.known:
        return send, []
    send = msgspec.structs.replace(send, known=True, prompt=prompt)
    if send.phase is Phase.PARKED:
        return _start(send, now)
    if send.phase is Phase.NEW:
        send = msgspec.structs.replace(send, phase=Phase.OPEN)
    return send, []


def _reserved(send: Send, event: Reserved, now: float) -> Step:
    reserve, same = event.reserve, send.reserve is not None and send.session == event.session
    if send.reserve is not None and not (same and send.reserve.generation == reserve.generation):
        taken = f"transfer {send.transfer!r} is reserved by generation {send.reserve.generation} already"
        return send, [Tell(event.session, Failed(send.transfer, reserve.generation, taken, True))]
    if send.phase in (Phase.NEW, Phase.OPEN) and event.row_bytes is not None:
        send = msgspec.structs.replace(send, row_bytes=event.row_bytes)
    if send.phase is Phase.NEW:
        send = msgspec.structs.replace(
            send, phase=Phase.PARKED, session=event.session, reserve=reserve, timer=now + event.park_s
        )
        return send, [Tell(event.session, Parked(send.transfer, reserve.generation))]
    if send.phase is Phase.OPEN:
        return _start(msgspec.structs.replace(send, session=event.session, reserve=reserve), now)
    return send, [Tell(event.session, _word_again(send, event.session, reserve.generation))]


def _word_again(send: Send, session: SessionKey, generation: Generation) -> Notice:
    if send.phase is Phase.PARKED:
        return Parked(send.transfer, generation)
    if send.phase is Phase.GONE:
        return repeat(send, session, generation)
    return Accepted(send.transfer, generation, _wanted_bytes(send))


def repeat(send: Send, session: SessionKey, generation: Generation) -> Notice:
    """Answer a question about a transfer that is over.

    What was said to that reservation is said again. Nothing was ever submitted for any other one, above all not for one
    of another decode worker: each counts its generations from 1.
    """
    if send.last_word is not None and (send.session, send.last_word.generation) == (session, generation):
        return send.last_word
    reason = send.reason or "it was handed over"
    return Failed(send.transfer, generation, f"transfer {send.transfer!r} is over: {reason}", True)


def _wanted_bytes(send: Send) -> int:
    return (send.reserve.end - send.reserve.first) * sum(send.row_bytes) if send.reserve else 0


def _start(send: Send, now: float) -> Step:
    session, reserve = send.session, send.reserve
    assert session is not None
    assert reserve is not None
    if send.prompt and reserve.prompt and send.prompt != reserve.prompt:
        return _end(send, "the prompts of prefill and decode differ: is one of them truncated?", now, tell=True)
    send = msgspec.structs.replace(
        send, phase=Phase.SENDING, timer=NEVER, moved_at=now, told_at=now, deliver_by=now + reserve.deliver_s
    )
    accepted = Tell(session, Accepted(send.transfer, reserve.generation, _wanted_bytes(send)))
    send, effects = _feed(send, now)
    return send, [accepted, *effects]


def _wrote(send: Send, event: Wrote) -> Send:
    chosen = range(len(send.row_bytes)) if event.layers is None else event.layers
    ready = list(send.ready)
    for layer in chosen:
        ready[layer] = unite(ready[layer], event.first, event.end)
    return msgspec.structs.replace(send, ready=tuple(ready))


def _unwritten(send: Send, keep: int) -> Send:
    submitted = list(send.submitted)
    parts = []
    for part in send.parts:
        void = min(part.void, max(keep, part.first))
        submitted[part.layer] = remove(submitted[part.layer], void, part.end)
        parts.append(msgspec.structs.replace(part, void=void))
    ready = tuple(clip(ranges, 0, keep) for ranges in send.ready)
    return msgspec.structs.replace(send, ready=ready, submitted=tuple(submitted), parts=tuple(parts))


def _prefill_done(send: Send, hold_until: float) -> Send:
    if send.phase is not Phase.OPEN or send.timer < NEVER:
        return send
    return msgspec.structs.replace(send, timer=hold_until)


def _feed(send: Send, now: float) -> Step:
    """Submit what is ready, reserved and not submitted; end well when everything has landed."""
    session, reserve = send.session, send.reserve
    if send.phase is not Phase.SENDING or session is None or reserve is None:
        return send, []
    first, end = reserve.first, reserve.end
    written = min((count(clip(ready, first, end)) for ready in send.ready), default=0)
    if send.sealed and written < end - first:
        return _end(send, f"decode lacks tokens [{first}, {end}), prefill wrote only {written} of them", now, tell=True)
    submitted, parts, made = list(send.submitted), list(send.parts), send.parts_made
    effects: list[Effect] = []
    mine = [layer for layer, size in enumerate(send.row_bytes) if size]  # the others are other ranks' to send
    for layer in mine:
        ready = send.ready[layer]
        todo = minus(clip(ready, first, end), submitted[layer])
        for part in send.parts:
            if part.layer == layer:  # two writes of one row must not race: a void one ends first
                todo = remove(todo, part.first, part.end)
        for start, stop in _cut(todo):
            made += 1
            part = Part(made, layer, start, stop, stop)
            parts.append(part)
            effects.append(Submit(part))
            submitted[layer] = unite(submitted[layer], start, stop)
    moved_at = now if effects and not send.parts else send.moved_at
    send = msgspec.structs.replace(
        send, submitted=tuple(submitted), parts=tuple(parts), parts_made=made, moved_at=moved_at
    )
    missing = sum(end - first - count(submitted[layer]) for layer in mine)
    if parts or missing:
        return send, effects
    word = Landed(send.transfer, reserve.generation, send.landed)
    gone = msgspec.structs.replace(send, phase=Phase.GONE, ok=True, last_word=word)
    return gone, [*effects, Tell(session, word)]


def _cut(ranges: Ranges) -> Iterator[tuple[int, int]]:
    for first, end in ranges:
        for start in range(first, end, PART_TOKENS):
            yield start, min(end, start + PART_TOKENS)


def _part_ended(send: Send, event: PartEnded, now: float) -> Step:
    part = next((part for part in send.parts if part.number == event.number), None)
    if part is None:
        return send, []
    rest = tuple(other for other in send.parts if other is not part)
    landed = send.landed + (part.void - part.first) * send.row_bytes[part.layer] * event.ok
    send = msgspec.structs.replace(
        send, parts=rest, landed=landed, drained=send.drained and event.drained, moved_at=now
    )
    if send.phase is Phase.DRAINING:
        return _settle(send)
    if not event.ok:
        return _end(send, f"a write failed: {event.reason}", now, tell=True)
    return _feed(send, now)


def _abort_asked(send: Send, event: AbortAsked, now: float) -> Step:
    abort = event.abort
    if send.phase is Phase.GONE:
        return send, [Tell(event.session, repeat(send, event.session, abort.generation))]
    if send.reserve is None:
        send = msgspec.structs.replace(
            send,
            phase=Phase.GONE,
            session=event.session,
            reason=f"decode gave it up: {abort.reason}",
            last_word=Aborted(send.transfer, abort.generation, abort.reason, True),
        )
        return send, [Tell(event.session, repeat(send, event.session, abort.generation))]
    if (send.session, send.reserve.generation) != (event.session, abort.generation):
        return send, []
    return _end(msgspec.structs.replace(send, asked=True), f"decode gave it up: {abort.reason}", now, tell=False)


def _peer_lost(send: Send, reason: str, now: float) -> Step:
    if send.phase is Phase.PARKED:
        # Nobody is left to be told, and the request may yet come: it then finds the transfer over.
        return _end(send, reason, now, tell=False)
    return (send, []) if send.reserve is None else _end(send, reason, now, tell=False)


def _tick(send: Send, event: Tick, now: float) -> Step:
    stall_s = event.stall_s
    match send.phase:
        case Phase.PARKED if now >= send.timer:
            return _end(send, "the request did not come to prefill within park_s", now, tell=True)
        case Phase.OPEN if now >= send.timer:
            return _end(send, "no reservation came within hold_s", now, tell=True)
        case Phase.SENDING if send.parts and now >= max(send.moved_at, event.peer_moved_at) + stall_s:
            return _end(send, f"no byte was acknowledged for {stall_s:g} s", now, tell=True)
        case Phase.SENDING if now >= send.deliver_by:
            return _end(send, "the time that decode gave for the delivery is over", now, tell=True)
        case Phase.SENDING if now >= send.told_at + _breath(send):
            assert send.reserve is not None
            assert send.session is not None
            word = Progress(send.transfer, send.reserve.generation, send.landed)
            return msgspec.structs.replace(send, told_at=now), [Tell(send.session, word)]
        case _:
            return send, []


def _end(send: Send, reason: str, now: float, *, tell: bool) -> Step:
    """Stop feeding; over only when nothing is in flight any more."""
    if send.phase is Phase.DRAINING:
        return _settle(send)
    send = msgspec.structs.replace(send, phase=Phase.DRAINING, reason=reason, timer=NEVER, moved_at=now)
    settled, effects = _settle(send)
    if settled.phase is Phase.GONE:
        return settled, effects
    effects = [Cancel(tuple(part.number for part in send.parts))]
    if tell and send.reserve is not None and send.session is not None:
        effects.append(Tell(send.session, Abort(send.transfer, send.reserve.generation, reason)))
    return send, effects


def _settle(send: Send) -> Step:
    if send.parts:
        return send, []
    if send.reserve is None or send.session is None:
        return msgspec.structs.replace(send, phase=Phase.GONE), []
    kind = Aborted if send.asked else Failed
    word = kind(send.transfer, send.reserve.generation, send.reason, send.drained)
    gone = msgspec.structs.replace(send, phase=Phase.GONE, last_word=word)
    return gone, [Tell(send.session, word)]
