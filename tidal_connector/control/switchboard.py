# SPDX-License-Identifier: Apache-2.0
"""The sessions of one worker: handshakes, leases, beats, and who gets which message. No socket, no thread, no clock.

Takes frames with their routes and the time; hands on checked messages to the parties. D's sessions (we called) belong
to the receiving party, P's (we were called) to the sending one. A session is one incarnation of a peer: when the peer
is silent for the lease, says goodbye, refuses us or comes back as another incarnation, the session is lost for good,
and the next transfer opens another. Control thread only.
"""

from __future__ import annotations

from collections import OrderedDict

from tidal_connector.control.channel import Route
from tidal_connector.control.handshake import Local, Peer, about, answer, check_welcome, hello
from tidal_connector.control.messages import (
    Abort,
    About,
    Beat,
    Bye,
    Envelope,
    Hello,
    Inquire,
    Message,
    Notice,
    Refused,
    Reserve,
    Welcome,
    encode,
    foreign_refusal,
    open_envelope,
    read_body,
)
from tidal_connector.control.party import NEVER, Party, SessionKey, survive
from tidal_connector.control.session import Session, Wire
from tidal_connector.errors import ProtocolError, TidalError, VersionMismatch
from tidal_connector.ids import EngineId, Incarnation
from tidal_connector.log import get_logger
from tidal_connector.metrics import Counters

logger = get_logger(__name__)

_BURIED = 1024  # incarnations that were replaced, remembered so that their late words raise no ghost
_QUICK_S = 0.05  # longest wait between two tries to greet a peer whose connection is not made yet


class Switchboard:
    """All sessions of one worker.

    Args:
        local: what this worker says about itself.
        wire: carries the frames.
        counters: what is counted.
        sender: party of the sessions in which we were called; None refuses every caller.
        receiver: party of the sessions that we call.
    """

    def __init__(
        self, local: Local, wire: Wire, counters: Counters, sender: Party[object] | None, receiver: Party[object] | None
    ) -> None:
        self._local = local
        self._wire = wire
        self._counters = counters
        self._sender = sender
        self._receiver = receiver
        self._about = about(local, sends=sender is not None, receives=receiver is not None)
        self._sessions: dict[SessionKey, Session] = {}
        self._called: dict[Route, SessionKey] = {}
        self._callers: dict[Incarnation, SessionKey] = {}
        self._buried: OrderedDict[Incarnation, None] = OrderedDict()
        self._made = 0
        self._calls = 0

    # --- for the parties (Link)

    def call(self, engine: EngineId, address: str, now: float) -> SessionKey:
        """Return the session with an engine at an address, and start to greet if there is none.

        Raises:
            ConfigError: the address cannot be read.
            TransferFailed: no door can be opened for the peer.
        """
        route = self._wire.dial(address, engine)
        if route in self._called:
            return self._called[route]
        self._calls += 1
        session = self._open(self._calls, route, True, engine, now)
        try:
            session.door = self._party(session).door(session.key)
        except TidalError:
            del self._sessions[session.key]
            self._wire.hang_up(route)
            raise
        self._called[route] = session.key
        self._greet(session, now)
        return session.key

    def tell(self, key: SessionKey, notice: Notice) -> bool:
        """Send to a peer; False where the session is not up or the kernel takes nothing now."""
        session = self._sessions.get(key)
        return session is not None and session.peer is not None and self._say(session, notice)

    def peer(self, key: SessionKey) -> Peer | None:
        """Return who is on the other side; None while the session is not up."""
        session = self._sessions.get(key)
        return session.peer if session else None

    # --- for the loop

    @property
    def peers(self) -> int:
        """Sessions that are up."""
        return sum(session.peer is not None for session in self._sessions.values())

    def arrived(self, route: Route, frame: bytes, now: float) -> None:
        """Take one frame. Whatever is in it, nothing but its own transfer changes."""
        try:
            envelope = open_envelope(frame)
            message = read_body(envelope)
        except VersionMismatch as error:
            self._refuse(str(error))
            if route.caller and envelope.sender not in self._callers:
                self._answer(route, envelope, Refused(str(error)))
            elif route in self._called and foreign_refusal(envelope):
                self._refused(self._sessions[self._called[route]], str(error), now)
        except ProtocolError as error:
            self._refuse(str(error))
        else:
            self._sort(route, envelope, message, now)

    def tick(self, now: float) -> float:
        """End leases, send beats and greetings; return when the next is due."""
        due = NEVER
        for session in list(self._sessions.values()):
            peer = session.peer
            if peer is None:
                due = min(due, self._greet_again(session, now))
                continue
            expires = session.heard + peer.lease_s
            if now >= expires:
                self._counters.add("leases_expired")
                self._end(
                    session.key, f"engine {peer.identity.engine!r} was silent for its lease of {peer.lease_s:g} s", now
                )
                continue
            if now >= session.speak_at:
                party = self._party(session)
                self._say(session, Beat(party.live(session.key)))
                session.speak_at = now + peer.lease_s / 3
            due = min(due, expires, session.speak_at)
        return due

    def bye(self, reason: str) -> None:
        """Tell every peer that this worker leaves."""
        for session in self._sessions.values():
            if session.peer is not None:
                self._say(session, Bye(reason))

    # --- messages

    def _sort(self, route: Route, envelope: Envelope, message: Message, now: float) -> None:
        if isinstance(message, Hello) and route.caller:
            self._hello(route, envelope, message, now)
            return
        if isinstance(message, Inquire) and route.caller:
            self._counters.add("inquiries_answered")
            self._answer(route, envelope, self._about)
            return
        if envelope.receiver != self._local.identity.incarnation:
            self._stale(route, envelope, message, f"incarnation {envelope.receiver!r} is addressed")
            return
        key = self._callers.get(envelope.sender) if route.caller else self._called.get(route)
        session = self._sessions.get(key) if key is not None else None
        if session is None:
            self._stale(route, envelope, message, f"there is no session with incarnation {envelope.sender!r}")
        elif session.number != envelope.session:
            self._counters.add("notices_stale")
        elif session.called and isinstance(message, Welcome):
            self._welcome(session, envelope, message, now)
        elif session.called and isinstance(message, Refused):
            self._refused(session, message.reason, now)
        elif session.peer is None or session.peer.identity.incarnation != envelope.sender:
            self._counters.add("notices_stale")
        else:
            session.heard = now
            session.route = route
            self._deliver(session, message, now)

    def _deliver(self, session: Session, message: Message, now: float) -> None:
        party = self._party(session)
        if isinstance(message, Beat):
            survive("a beat", lambda: party.beat(session.key, message.live, now))
        elif isinstance(message, Bye):
            self._end(session.key, f"engine {session.expects!r} left: {message.reason}", now)
        elif isinstance(message, Hello | Welcome | Refused | Inquire | About):
            self._refuse(f"{type(message).__name__} inside a session")
        elif isinstance(message, Reserve) == session.called and not isinstance(message, Abort):
            self._refuse(f"{type(message).__name__} from the wrong side")
        else:
            broken = survive(f"transfer {message.transfer!r}", lambda: party.heard(session.key, message, now))
            if broken:
                survive("failing a transfer", lambda: party.broke(message.transfer, broken, now))

    def _hello(self, route: Route, envelope: Envelope, heard: Hello, now: float) -> None:
        incarnation = heard.identity.incarnation
        try:
            if self._sender is None:
                raise ProtocolError(f"engine {self._local.identity.engine!r} sends no KV: its role is kv_consumer")
            if envelope.sender != incarnation or incarnation in self._buried:
                raise ProtocolError(f"incarnation {envelope.sender!r} of engine {heard.identity.engine!r} is over")
            welcome, peer = answer(self._local, heard)
        except TidalError as error:
            self._counters.add("handshakes_refused")
            self._refuse(str(error))
            self._answer(route, envelope, Refused(str(error)[:8000]))
            return
        known = self._sessions.get(self._callers.get(incarnation, SessionKey("")))
        if known is not None and (envelope.session < known.number or known.peer != peer):
            self._refuse(f"engine {peer.identity.engine!r} greets again, late or with another placement or endpoint")
            return
        if known is not None and envelope.session > known.number:
            self._end(known.key, f"engine {peer.identity.engine!r} gave the former session up", now)
            known = None
        if known is None:
            self._replace(peer, now)
            known = self._open(envelope.session, route, False, peer.identity.engine, now)
            self._callers[incarnation] = known.key
            self._rise(known, peer, now)
        known.heard = now
        known.route = route
        self._say(known, welcome)

    def _replace(self, peer: Peer, now: float) -> None:
        who = (peer.identity.engine, peer.identity.rank)
        for session in list(self._sessions.values()):
            old = session.peer
            if not session.called and old is not None and (old.identity.engine, old.identity.rank) == who:
                self._buried[old.identity.incarnation] = None
                if len(self._buried) > _BURIED:
                    self._buried.popitem(last=False)
                self._end(session.key, f"engine {peer.identity.engine!r} came back as another incarnation", now)

    def _welcome(self, session: Session, envelope: Envelope, heard: Welcome, now: float) -> None:
        if session.peer is not None:
            if session.peer.identity.incarnation != heard.identity.incarnation:
                self._end(session.key, f"engine {session.expects!r} came back as another incarnation", now)
            return
        try:
            if envelope.sender != heard.identity.incarnation:
                raise ProtocolError(f"incarnation {envelope.sender!r} speaks for {heard.identity.incarnation!r}")
            peer = check_welcome(self._local, session.expects, heard)
        except TidalError as error:
            self._refuse(str(error))
            self._answer(session.route, envelope, Bye(str(error)[:8000]))
            self._refused(session, str(error), now)
            return
        self._rise(session, peer, now)

    # --- sessions

    def _open(self, number: int, route: Route, called: bool, expects: EngineId, now: float) -> Session:
        self._made += 1
        key = SessionKey(f"{self._made}:{expects}")
        session = self._sessions[key] = Session(key, number, route, called, expects, now)
        return session

    def _rise(self, session: Session, peer: Peer, now: float) -> None:
        session.peer = peer
        session.heard = now
        session.speak_at = now + peer.lease_s / 3
        logger.info("session with engine %s is up (lease %g s)", peer.identity.engine, peer.lease_s)
        survive("a new session", lambda: self._party(session).up(session.key, peer, now))

    def _end(self, key: SessionKey, reason: str, now: float) -> None:
        session = self._sessions.pop(key, None)
        if session is None:
            return
        if session.called:
            self._called.pop(session.route, None)
            self._wire.hang_up(session.route)
        elif session.peer is not None:
            self._callers.pop(session.peer.identity.incarnation, None)
        logger.info("session with engine %s ended: %s", session.expects, reason)
        survive("a lost session", lambda: self._party(session).lost(key, reason, now))

    def _refused(self, session: Session, reason: str, now: float) -> None:
        if session.peer is None:  # else the other side has lost a session that was up
            self._counters.add("handshakes_refused")
            logger.warning("engine %s and this one do not come together: %s", session.expects, reason)
        self._end(session.key, reason, now)

    def _greet_again(self, session: Session, now: float) -> float:
        if not self._party(session).needs(session.key):
            self._end(session.key, "nothing waits for it", now)
            return NEVER
        if now >= session.speak_at:
            self._greet(session, now)
        return session.speak_at

    def _greet(self, session: Session, now: float) -> None:
        third = self._local.lease_s / 3
        sent = self._post(
            session.route, Incarnation(""), session.number, hello(self._local, session.expects, session.door)
        )
        session.speak_at = now + (third if sent else min(third, _QUICK_S))

    def _party(self, session: Session) -> Party[object]:
        party = self._receiver if session.called else self._sender
        assert party is not None  # a session is opened only for a party that is there
        return party

    # --- frames

    def _say(self, session: Session, message: Message) -> bool:
        assert session.peer is not None
        return self._post(session.route, session.peer.identity.incarnation, session.number, message)

    def _answer(self, route: Route, envelope: Envelope, message: Message) -> None:
        self._post(route, envelope.sender, envelope.session, message)

    def _post(self, route: Route, receiver: Incarnation, session: int, message: Message) -> bool:
        return self._wire.send(route, encode(self._local.identity.incarnation, receiver, session, message))

    def _refuse(self, reason: str) -> None:
        self._counters.add("messages_refused")
        logger.warning("a control message was refused: %s", reason[:500])

    def _stale(self, route: Route, envelope: Envelope, message: Message, reason: str) -> None:
        self._counters.add("notices_stale")
        if route.caller and not isinstance(message, Refused | Bye | Hello):
            mine = self._local.identity
            self._answer(
                route,
                envelope,
                Refused(f"{reason}; here is {mine.engine!r}, incarnation {mine.incarnation!r}"[:8000]),
            )
