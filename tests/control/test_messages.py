# SPDX-License-Identifier: Apache-2.0
"""Frames: what is written is read, and nothing else is."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.control.pair import layout
from tests.control.tables import table_rows
from tidal_connector.control import messages
from tidal_connector.control.messages import (
    Abort,
    Aborted,
    About,
    Accepted,
    Beat,
    Bye,
    Failed,
    Hello,
    Identity,
    Inquire,
    Landed,
    Message,
    Parked,
    Progress,
    Refused,
    Reserve,
    Welcome,
    encode,
    open_envelope,
    read_body,
)
from tidal_connector.errors import ProtocolError, VersionMismatch
from tidal_connector.ids import DevicePageId, EngineId, Generation, HostPageId, Incarnation, TransferId
from tidal_connector.layout import Placement

A, B = Incarnation("a" * 32), Incarnation("b" * 32)
X, G = TransferId("xfer-1"), Generation(7)
WHO = Identity(EngineId("decode-0"), A, 1, 2)
ALL: list[Message] = [
    Hello(WHO, EngineId("prefill-0"), layout(), Placement(()), "10.0.0.1:1", 9.0),
    Welcome(WHO, "f" * 32, "10.0.0.2:2", 9.0),
    Refused("because"),
    Reserve(X, G, 3, 40, (HostPageId(1), HostPageId(2)), (DevicePageId(9),), 900.0, 10.0),
    Parked(X, G),
    Accepted(X, G, 10),
    Progress(X, G, 10),
    Landed(X, G, 10),
    Failed(X, G, "reset", False),
    Abort(X, G, "left"),
    Aborted(X, G, "left", True),
    Beat(((X, G),)),
    Bye("stops"),
    Inquire(),
    About(WHO, True, False, layout(), "f" * 32, 9.0, "10.0.0.1:1", 8, 4096),
]


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_what_is_written_is_read(message: Message) -> None:
    envelope = open_envelope(encode(A, B, 5, message))
    assert (envelope.sender, envelope.receiver, envelope.session) == (A, B, 5)
    assert read_body(envelope) == message


def test_who_says_less_of_itself_is_understood_too() -> None:
    whole = About(WHO, True, False, layout(), "f" * 32, 9.0, "10.0.0.1:1", 8, 4096)
    words = msgspec.msgpack.decode(encode(A, B, 5, whole))
    del words[4][-3:]
    found = read_body(open_envelope(msgspec.msgpack.encode(words)))
    assert found == About(WHO, True, False, layout(), "f" * 32, 9.0)
    assert isinstance(found, About)
    assert (found.endpoint, found.requests, found.kv_tokens) == ("", 0, 0)


def test_the_documented_messages_are_these() -> None:
    assert [name.strip("`") for name, _, _ in table_rows("Messages")] == [type(message).__name__ for message in ALL]


@given(st.binary(max_size=300))
def test_rubbish_is_a_protocol_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_body(open_envelope(frame))


@given(st.sampled_from(ALL), st.data())
def test_a_bitten_frame_is_a_message_or_a_protocol_error(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(A, B, 5, message))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    del frame[data.draw(st.integers(1, len(frame))) :]
    try:
        read_body(open_envelope(bytes(frame)))
    except ProtocolError:
        return


def test_another_version_is_refused_with_both_numbers() -> None:
    frame = msgspec.msgpack.encode((2, A, B, 0, ["something", "new"]))
    with pytest.raises(VersionMismatch, match=r"version 2 there, 1 here"):
        read_body(open_envelope(frame))


def test_a_refusal_is_understood_across_versions() -> None:
    refusal = msgspec.msgpack.encode((2, A, B, 0, ["refused", "version 1 there, 2 here"]))
    assert messages.foreign_refusal(open_envelope(refusal))
    other = msgspec.msgpack.encode((2, A, B, 0, ["landed", "xfer-1", 1, 1]))
    assert not messages.foreign_refusal(open_envelope(other))


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (["reserve", "x", 0, 0, 1, [], [], 1.0, 1.0], ">= 1"),
        (["reserve", "x", 1, -1, 1, [], [], 1.0, 1.0], ">= 0"),
        (["reserve", "x", 1, 0, 1, ["1"], [], 1.0, 1.0], "Expected `int`"),
        (["reserve", "x", 1, 0, 1, [], [], 0.0, 1.0], "> 0"),
        (["landed", "x", 1], "at least length"),
        (["evil", 1], "Invalid value"),
        ({"type": "landed"}, "Expected `array`"),
        (["refused", "x" * 9000], "length <= 8192"),
    ],
)
def test_fields_of_wrong_type_or_range_are_named(body: object, word: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(word)):
        read_body(open_envelope(msgspec.msgpack.encode((1, A, B, 0, body))))


def test_frames_have_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "FRAME_LIMIT", 64)
    with pytest.raises(ProtocolError, match="larger than a frame may be"):
        encode(A, B, 0, Bye("x" * 100))
    with pytest.raises(ProtocolError, match="at most 64 are read"):
        open_envelope(b"x" * 65)


def test_a_reservation_of_the_longest_context_fits() -> None:
    pages = range(163_840 // 16)
    reserve = Reserve(X, G, 0, 163_840, tuple(map(HostPageId, pages)), tuple(map(DevicePageId, pages)), 1.0, 1.0)
    assert len(encode(A, B, 1, reserve)) < messages.FRAME_LIMIT / 10
