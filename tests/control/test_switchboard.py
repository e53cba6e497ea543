# SPDX-License-Identifier: Apache-2.0
"""Sessions by hand: two switchboards, frames carried one by one, a clock that stands still until told."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from tests.control.pair import layout
from tidal_connector.control.channel import Route
from tidal_connector.control.handshake import Capacity, Local, Peer
from tidal_connector.control.messages import (
    Abort,
    About,
    Beat,
    Bye,
    Hello,
    Identity,
    Inquire,
    Landed,
    Message,
    Notice,
    Pair,
    Parked,
    Refused,
    Welcome,
    encode,
    open_envelope,
    read_body,
)
from tidal_connector.control.party import NEVER, Party, SessionKey
from tidal_connector.control.switchboard import Switchboard
from tidal_connector.ids import EngineId, Generation, Incarnation, TransferId
from tidal_connector.layout import Home, Placement, Region
from tidal_connector.metrics import Counters

X, G = TransferId("xfer-1"), Generation(1)
LEASE = 9.0
P, D = EngineId("prefill-0"), EngineId("decode-0")


def placement() -> Placement:
    return Placement(
        tuple(
            Region(s.kind, s.layer, s.row_bytes, Home.DEVICE, 4096, 16 * s.row_bytes, 16, 4) for s in layout().regions
        )
    )


class Listener(Party[str]):
    """Writes down what it is told."""

    def __init__(self, counters: Counters) -> None:
        super().__init__(counters)
        self.told: list[str] = []
        self.pairs: tuple[Pair, ...] = ()
        self.fragile = False
        self.key = SessionKey("")

    def turn(self, now: float) -> float:
        return NEVER

    def up(self, key: SessionKey, peer: Peer, now: float) -> None:
        self.key = key
        self.told.append(f"up {peer.identity.engine} {peer.identity.incarnation}")

    def lost(self, key: SessionKey, reason: str, now: float) -> None:
        self.told.append(f"lost {reason}")

    def heard(self, key: SessionKey, notice: Notice, now: float) -> None:
        if self.fragile:
            raise KeyError("a fault of ours")
        self.told.append(f"heard {type(notice).__name__}")

    def beat(self, key: SessionKey, pairs: tuple[Pair, ...], now: float) -> None:
        self.told.append(f"beat {list(pairs)}")

    def live(self, key: SessionKey) -> tuple[Pair, ...]:
        return self.pairs

    def needs(self, key: SessionKey) -> bool:
        return True

    def broke(self, transfer: TransferId, reason: str, now: float) -> None:
        self.told.append(f"broke {transfer}")

    def stopping(self, reason: str, now: float) -> None:
        self.told.append("stopping")

    def busy(self) -> bool:
        return False

    def gauges(self) -> Mapping[str, float]:
        return {}


class Side:
    """A switchboard whose frames wait in a list."""

    def __init__(self, engine: EngineId, life: str, *, sends: bool, weights: str = "w0", lease: float = LEASE) -> None:
        self.counters = Counters()
        self.party = Listener(self.counters)
        self.out: list[tuple[Route, bytes]] = []
        self.lines: set[Route] = set()
        identity = Identity(engine, Incarnation(life))
        local = Local(identity, layout(weights), placement(), "10.0.0.1:5", lease, Capacity(8, 4096))
        parties = (self.party, None) if sends else (None, self.party)
        self.board = Switchboard(local, self, self.counters, *parties)
        self.party.attach(self.board, lambda: None)
        self.life = Incarnation(life)

    def dial(self, address: str, line: str) -> Route:
        route = Route(address, line)
        self.lines.add(route)
        return route

    def hang_up(self, route: Route) -> None:
        self.lines.discard(route)

    def send(self, route: Route, frame: bytes) -> bool:
        self.out.append((route, frame))
        return True

    def words(self) -> list[Message]:
        return [read_body(open_envelope(frame)) for _, frame in self.out]

    def count(self, name: str) -> float:
        return self.counters.snapshot()[name]


LINE = Route("p:1", P)
CALLER = Route(caller=b"d")


class Wires:
    """D calls P."""

    def __init__(self) -> None:
        self.d = Side(D, "d1", sends=False)
        self.p = Side(P, "p1", sends=True)
        self.now = 0.0

    def to_p(self) -> None:
        frames, self.d.out = self.d.out, []
        for _, frame in frames:
            self.p.board.arrived(CALLER, frame, self.now)

    def to_d(self) -> None:
        frames, self.p.out = self.p.out, []
        for _, frame in frames:
            self.d.board.arrived(LINE, frame, self.now)

    def connect(self) -> SessionKey:
        key = self.d.board.call(P, "p:1", self.now)
        self.to_p()
        self.to_d()
        return key


@pytest.fixture
def wires() -> Wires:
    return Wires()


def test_hello_and_welcome_make_a_session(wires: Wires) -> None:
    key = wires.connect()
    assert wires.d.party.told == ["up prefill-0 p1"]
    assert wires.p.party.told == ["up decode-0 d1"]
    assert wires.d.board.call(P, "p:1", 1.0) == key
    assert wires.d.board.tell(key, Abort(X, G, "left"))
    wires.to_p()
    assert wires.p.party.told[-1] == "heard Abort"
    assert (wires.d.board.peers, wires.p.board.peers) == (1, 1)


def test_beats_hold_the_lease_and_silence_ends_it(wires: Wires) -> None:
    wires.connect()
    wires.d.party.pairs = ((X, G),)
    for second in range(1, 40):
        wires.now = float(second)
        wires.d.board.tick(wires.now)
        wires.p.board.tick(wires.now)
        wires.to_p()
        wires.to_d()
    assert f"beat {[(X, G)]}" in wires.p.party.told
    assert not any(word.startswith("lost") for word in wires.p.party.told + wires.d.party.told)
    wires.p.board.tick(wires.now + 8.0)
    assert wires.p.board.peers == 1
    wires.p.board.tick(wires.now + LEASE + 3.0)
    assert "silent for its lease of 9 s" in wires.p.party.told[-1]
    assert wires.p.count("leases_expired") == 1


def test_the_shorter_lease_holds_for_both(wires: Wires) -> None:
    wires.p = Side(P, "p1", sends=True, lease=3.0)
    wires.connect()
    wires.d.board.tick(1.5)
    assert any(isinstance(word, Beat) for word in wires.d.words())
    wires.d.board.tick(3.0)
    assert "silent for its lease of 3 s" in wires.d.party.told[-1]


def test_a_restarted_prefill_is_found_out_by_the_first_word(wires: Wires) -> None:
    key = wires.connect()
    wires.p = Side(P, "p2", sends=True)
    wires.d.board.tell(key, Abort(X, G, "left"))
    wires.to_p()
    assert wires.p.party.told == []
    assert wires.p.count("notices_stale") == 1
    wires.to_d()
    assert "lost incarnation 'p1' is addressed; here is 'prefill-0', incarnation 'p2'" in wires.d.party.told[-1]
    assert not wires.d.lines
    wires.connect()
    assert wires.d.party.told[-1] == "up prefill-0 p2"


def test_a_restarted_decode_ends_its_former_life(wires: Wires) -> None:
    wires.connect()
    old, wires.d = wires.d, Side(D, "d2", sends=False)
    wires.connect()
    assert wires.p.party.told[1:] == [
        "lost engine 'decode-0' came back as another incarnation",
        "up decode-0 d2",
    ]
    old.board._greet(next(iter(old.board._sessions.values())), 0.0)  # a late word of the former life
    wires.p.board.arrived(CALLER, old.out[-1][1], 0.0)
    assert wires.p.party.told[-1] == "up decode-0 d2"
    assert wires.p.board.peers == 1


def test_a_session_that_decode_gave_up_ends_at_prefill_with_the_next_call(wires: Wires) -> None:
    wires.connect()
    late = encode(wires.d.life, wires.p.life, 1, Abort(X, G, "of the first session"))
    wires.d.board.tick(LEASE)
    assert wires.d.party.told[-1].startswith("lost")
    wires.now = LEASE
    wires.connect()
    assert wires.p.party.told[1:] == ["lost engine 'decode-0' gave the former session up", "up decode-0 d1"]
    wires.p.board.arrived(CALLER, late, LEASE)
    assert wires.p.party.told[-1] == "up decode-0 d1"
    assert wires.p.count("notices_stale") == 1


def test_a_repeated_hello_is_welcomed_again_and_changes_nothing(wires: Wires) -> None:
    wires.d.board.call(P, "p:1", 0.0)
    frame = wires.d.out[-1][1]
    for _ in range(3):
        wires.p.board.arrived(CALLER, frame, 0.0)
    assert wires.p.party.told == ["up decode-0 d1"]
    assert [type(word) for word in wires.p.words()] == [Welcome] * 3
    wires.to_d()
    assert wires.d.party.told == ["up prefill-0 p1"]


def test_fr_43_another_engine_at_the_address(wires: Wires) -> None:
    wires.d.board.call(EngineId("prefill-9"), "p:1", 0.0)
    wires.to_p()
    (word,) = wires.p.words()
    assert isinstance(word, Refused)
    assert "engine 'prefill-9' was looked for, engine 'prefill-0' is here" in word.reason
    wires.d.board.arrived(Route("p:1", "prefill-9"), wires.p.out[0][1], 0.0)
    assert "prefill-9" in wires.d.party.told[-1]


def test_fr_36_other_layouts_are_named_with_both_values(wires: Wires) -> None:
    wires.d = Side(D, "d1", sends=False, weights="rev-b")
    wires.connect()
    assert "weights: 'w0' here, 'rev-b' there" in wires.d.party.told[-1]
    assert wires.p.party.told == []
    assert wires.p.count("handshakes_refused") == wires.d.count("handshakes_refused") == 1


def test_losing_a_session_is_no_refused_handshake(wires: Wires) -> None:
    wires.connect()
    wires.d.board.arrived(LINE, encode(wires.p.life, wires.d.life, 1, Refused("no session any more")), 0.0)
    assert wires.d.party.told[-1] == "lost no session any more"
    assert wires.d.count("handshakes_refused") == 0


@pytest.mark.parametrize("sends", [True, False])
def test_whoever_asks_is_told_and_nothing_changes(sends: bool) -> None:
    side = Side(P, "p1", sends=sends)
    side.board.arrived(Route(caller=b"proxy"), encode(Incarnation(""), Incarnation(""), 0, Inquire()), 0.0)
    who = Identity(P, side.life)
    assert side.words() == [
        About(who, sends, not sends, layout(), layout().fingerprint(), LEASE, "10.0.0.1:5", 8, 4096)
    ]
    assert side.out[0][0] == Route(caller=b"proxy")
    assert side.count("inquiries_answered") == 1
    assert side.count("messages_refused") == side.count("notices_stale") == 0
    assert (side.board.peers, side.party.told) == (0, [])


def test_an_inquiry_in_the_name_of_a_peer_leaves_its_session_alone(wires: Wires) -> None:
    wires.connect()
    wires.p.board.tick(LEASE / 2)
    wires.p.out.clear()
    wires.p.board.arrived(Route(caller=b"e"), encode(wires.d.life, wires.p.life, 1, Inquire()), LEASE / 2)
    assert [route for route, _ in wires.p.out] == [Route(caller=b"e")]
    wires.p.board.tick(LEASE)  # the inquiry was no word of D's, so its lease ends all the same
    assert wires.p.party.told[-1].startswith("lost")


def test_who_was_not_asked_is_not_believed(wires: Wires) -> None:
    key = wires.connect()
    told = About(Identity(P, wires.p.life), True, False, layout("evil"), "f" * 32, LEASE)
    wires.d.board.arrived(LINE, encode(wires.p.life, wires.d.life, 1, told), 0.0)
    wires.p.board.arrived(CALLER, encode(wires.d.life, wires.p.life, 1, told), 0.0)
    wires.d.board.arrived(LINE, encode(wires.p.life, wires.d.life, 1, Inquire()), 0.0)
    assert (wires.d.count("messages_refused"), wires.p.count("messages_refused")) == (2, 1)
    assert wires.d.out == wires.p.out == []
    assert wires.d.board.peer(key) is not None


def test_an_impostor_cannot_speak_in_a_session(wires: Wires) -> None:
    key = wires.connect()
    impostor = encode(Incarnation("evil"), wires.p.life, 1, Abort(X, G, "mine now"))
    wires.p.board.arrived(Route(caller=b"e"), impostor, 0.0)
    assert wires.p.party.told == ["up decode-0 d1"]
    assert wires.p.count("notices_stale") == 1
    assert wires.d.board.peer(key) is not None


def test_another_life_cannot_speak_on_the_line_of_a_session(wires: Wires) -> None:
    wires.connect()
    wires.d.board.arrived(LINE, encode(Incarnation("p0"), wires.d.life, 1, Landed(X, G, 1)), 0.0)
    assert wires.d.party.told == ["up prefill-0 p1"]
    assert wires.d.count("notices_stale") == 1


def test_words_from_the_wrong_side_are_refused(wires: Wires) -> None:
    wires.connect()
    wires.p.board.arrived(CALLER, encode(wires.d.life, wires.p.life, 1, Landed(X, G, 1)), 0.0)
    wires.p.board.arrived(CALLER, encode(wires.d.life, wires.p.life, 1, Refused("no")), 0.0)
    assert wires.p.party.told == ["up decode-0 d1"]
    assert wires.p.count("messages_refused") == 2


@pytest.mark.parametrize("frame", [b"", b"\x00", b"\x95", b"\xff" * 100, msgspec.msgpack.encode((1, "d1", "p1", 1, 5))])
def test_fr_41_rubbish_is_counted_and_changes_nothing(wires: Wires, frame: bytes) -> None:
    wires.connect()
    wires.p.board.arrived(CALLER, frame, 0.0)
    wires.d.board.arrived(LINE, frame, 0.0)
    assert wires.p.count("messages_refused") == wires.d.count("messages_refused") == 1
    assert (wires.p.board.peers, wires.d.board.peers) == (1, 1)


def test_another_version_is_told_both_numbers_and_two_versions_do_not_chat(wires: Wires) -> None:
    wires.d.board.call(P, "p:1", 0.0)
    foreign = msgspec.msgpack.encode((9, "d1", "", 1, ["hello", "of tomorrow"]))
    wires.p.board.arrived(CALLER, foreign, 0.0)
    (word,) = wires.p.words()
    assert isinstance(word, Refused)
    assert "version 9 there, 1 here" in word.reason
    wires.d.out.clear()
    wires.d.board.arrived(LINE, msgspec.msgpack.encode((9, "p1", "d1", 1, ["refused", "version"])), 0.0)
    assert "version 9 there, 1 here" in wires.d.party.told[-1]
    assert wires.d.out == []


def test_a_fault_of_ours_fails_its_own_transfer(wires: Wires) -> None:
    key = wires.connect()
    wires.d.party.fragile = True
    wires.p.board.tell(wires.p.party.key, Parked(X, G))
    wires.to_d()
    assert wires.d.party.told[-1] == f"broke {X}"
    assert wires.d.board.peer(key) is not None


def test_goodbye_ends_a_session_at_once(wires: Wires) -> None:
    wires.connect()
    wires.p.board.bye("rolled out")
    assert isinstance(wires.p.words()[-1], Bye)
    wires.to_d()
    assert wires.d.party.told[-1] == "lost engine 'prefill-0' left: rolled out"


def test_a_decode_engine_refuses_callers() -> None:
    d, other = Side(D, "d1", sends=False), Side(EngineId("decode-1"), "e1", sends=False)
    d.board.call(EngineId("decode-1"), "e:1", 0.0)
    other.board.arrived(CALLER, d.out[-1][1], 0.0)
    (word,) = other.words()
    assert isinstance(word, Refused)
    assert "sends no KV" in word.reason


def test_a_call_that_nothing_waits_for_is_given_up(wires: Wires) -> None:
    wires.d.board.call(P, "p:1", 0.0)
    wires.d.party.needs = lambda key: False  # type: ignore[method-assign]
    wires.d.board.tick(1.0)
    assert not wires.d.lines
    assert isinstance(wires.d.words()[0], Hello)
