# SPDX-License-Identifier: Apache-2.0
"""Every message that two workers exchange, readable aloud, and their bytes.

A frame is one msgpack array ``[version, sender, receiver, session, body]``: the envelope keeps this form in every
version, and so does :class:`Refused`, so that two versions can always tell each other that they differ. ``sender`` and
``receiver`` are incarnations; the receiver is empty only in a :class:`Hello` to a peer that is not known yet, in an
answer to it, and in an :class:`Inquire` and its answer: who inquires has no name. D is the decode worker, which calls;
P is the prefill worker, which is called. Pure; any thread.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from tidal_connector.errors import ProtocolError, VersionMismatch
from tidal_connector.ids import DevicePageId, EngineId, Generation, HostPageId, Incarnation, TransferId
from tidal_connector.layout import KVLayout, Placement

PROTOCOL_VERSION = 1
FRAME_LIMIT = 4 << 20
"""Bytes of the largest frame that is sent or read; a reservation of 160,000 tokens in pages of 16 takes about 100,000.
"""

NO_RESERVATION = Generation(0)
"""Generation in an :class:`Abort` of a transfer that was never reserved (D declined the request). Real ones start at
1.
"""

Text = Annotated[str, msgspec.Meta(max_length=8192)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Pair: TypeAlias = tuple[TransferId, Generation]


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """Who speaks: engine (the operator's name), this life of its worker, and the worker's rank of so many."""

    engine: EngineId
    incarnation: Incarnation
    rank: Count = 0
    size: Annotated[int, msgspec.Meta(ge=1)] = 1


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """D to P: who I am, whom I expect, how my KV is laid out, where my memory is, and how long silence may last.

    ``shares`` is the rule by which engines of several ranks divide the rows; a release that knows none says nothing.
    """

    identity: Identity
    expects: EngineId
    layout: KVLayout
    placement: Placement
    endpoint: Name
    lease_s: Seconds
    shares: Count = 0


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """P to D: who I am; our layouts agree; the shorter of our two leases holds for both.

    ``siblings`` are the control addresses of all ranks of my engine, mine among them, so that D can call the others;
    ``shares`` as in :class:`Hello`. Both are empty in an answer of a release that knows one rank only.
    """

    identity: Identity
    fingerprint: Name
    endpoint: Name
    lease_s: Seconds
    shares: Count = 0
    siblings: tuple[Name, ...] = ()


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Both ways: no session with you, or none any more; the reason names both values."""

    reason: Text


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag="reserve"):
    """D to P: write the rows of tokens ``[first, end)`` into these pages of mine.

    Both page lists cover the tokens from ``first`` rounded down to a page on. An empty range means: I lack nothing.
    ``deliver_s`` bounds the whole transfer; P shows life at least every third of ``stall_s``. ``prompt`` digests the
    prompt's tokens, empty where D does not know them: rows of another prompt would be taken for this one's, in silence.
    """

    transfer: TransferId
    generation: Annotated[Generation, msgspec.Meta(ge=1)]
    first: Count
    end: Count
    host_pages: tuple[HostPageId, ...]
    device_pages: tuple[DevicePageId, ...]
    deliver_s: Seconds
    stall_s: Seconds
    prompt: Text = ""


class Parked(msgspec.Struct, frozen=True, array_like=True, tag="parked"):
    """P to D: the request has not come here yet; your reservation waits for it."""

    transfer: TransferId
    generation: Generation


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """P to D: the request is here; so many bytes will come."""

    transfer: TransferId
    generation: Generation
    bytes: Count


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """P to D: still at it; so many bytes are acknowledged. May be lost."""

    transfer: TransferId
    generation: Generation
    bytes: Count


class Landed(msgspec.Struct, frozen=True, array_like=True, tag="landed"):
    """P to D: all bytes of the range, in all regions, were acknowledged by your transport."""

    transfer: TransferId
    generation: Generation
    bytes: Count


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """P to D: it ended otherwise. ``drained``: every write was acknowledged or never begun, so none can come late."""

    transfer: TransferId
    generation: Generation
    reason: Text
    drained: bool


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Both ways: I give this transfer up; tell me when it is over on your side."""

    transfer: TransferId
    generation: Generation
    reason: Text


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag="aborted"):
    """P to D: as you asked, nothing of it is being written any more. ``drained`` as in :class:`Failed`."""

    transfer: TransferId
    generation: Generation
    reason: Text
    drained: bool


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Both ways, every third of the lease: I live, and these transfers with me."""

    live: tuple[Pair, ...]


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """Both ways, the last word of a session: I leave, and no transfer of mine is left."""

    reason: Text


class Inquire(msgspec.Struct, frozen=True, array_like=True, tag="inquire"):
    """Anyone to a worker: who are you? Opens no session."""


class About(msgspec.Struct, frozen=True, array_like=True, tag="about"):
    """A worker to whoever inquired: who I am, whether I send KV and receive it, how it is laid out, and my lease.

    Engines fit if their fingerprints are equal; the layouts say in what they differ. What follows the lease is for
    people and schedulers: where my data port is, how many requests I run at once, and how many tokens of KV I hold;
    empty or 0 in an answer of a release that did not say it yet.
    """

    identity: Identity
    sends: bool
    receives: bool
    layout: KVLayout
    fingerprint: Name
    lease_s: Seconds
    endpoint: Text = ""
    requests: Count = 0
    kv_tokens: Count = 0


Message: TypeAlias = (
    Hello
    | Welcome
    | Refused
    | Reserve
    | Parked
    | Accepted
    | Progress
    | Landed
    | Failed
    | Abort
    | Aborted
    | Beat
    | Bye
    | Inquire
    | About
)
Notice: TypeAlias = Reserve | Parked | Accepted | Progress | Landed | Failed | Abort | Aborted
"""Messages about one transfer."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What every frame starts with, in every version.

    ``session`` counts the calls of D's worker: a word of a session that D has given up is never taken for one of the
    next, although both are between the same two incarnations.
    """

    version: int
    sender: Incarnation
    receiver: Incarnation
    session: Count
    body: msgspec.Raw


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    version: int
    sender: Incarnation
    receiver: Incarnation
    session: Count
    body: Message


def encode(sender: Incarnation, receiver: Incarnation, session: int, message: Message) -> bytes:
    """Return the frame of a message.

    Raises:
        ProtocolError: it is larger than FRAME_LIMIT bytes.
    """
    frame = msgspec.msgpack.encode(_Frame(PROTOCOL_VERSION, sender, receiver, session, message))
    if len(frame) > FRAME_LIMIT:
        kind = type(message).__name__
        raise ProtocolError(f"{kind} of {len(frame)} bytes is larger than a frame may be ({FRAME_LIMIT} bytes)")
    return frame


def open_envelope(frame: bytes) -> Envelope:
    """Return the envelope of a frame, whatever version its body is of.

    Raises:
        ProtocolError: the frame is too large or has no envelope.
    """
    if len(frame) > FRAME_LIMIT:
        raise ProtocolError(f"a frame of {len(frame)} bytes came; at most {FRAME_LIMIT} are read")
    try:
        return msgspec.msgpack.decode(frame, type=Envelope)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a frame of {len(frame)} bytes has no envelope: {error}") from None


def read_body(envelope: Envelope) -> Message:
    """Return the message inside an envelope.

    Raises:
        VersionMismatch: it is of another protocol version; the text names both.
        ProtocolError: it is none of the messages, or a field is of a wrong type or range.
    """
    if envelope.version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"protocol version {envelope.version} there, {PROTOCOL_VERSION} here: run the same release on both sides"
        )
    try:
        return msgspec.msgpack.decode(envelope.body, type=Message)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"unreadable message: {error}") from None


def foreign_refusal(envelope: Envelope) -> bool:
    """Say whether a frame of another version is a :class:`Refused`, the one message that all versions share."""
    try:
        return isinstance(msgspec.msgpack.decode(envelope.body, type=Refused), Refused)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        return False
