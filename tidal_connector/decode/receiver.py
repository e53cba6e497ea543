# SPDX-License-Identifier: Apache-2.0
"""The receiving party: intents of vLLM's decode worker go into receive machines, words to P and outcomes come out.

vLLM's threads call the public methods: they queue and return. Everything else runs on the control thread. A request is
reported once, when its rows are all there or when no write into its pages can still arrive. Where P has several ranks,
each sends its share: rank 0 is called first and names the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidal_connector.config import ControlConfig
from tidal_connector.control.handshake import Peer
from tidal_connector.control.messages import (
    Abort,
    Aborted,
    Accepted,
    Failed,
    Landed,
    Notice,
    Pair,
    Parked,
    Progress,
    Reserve,
)
from tidal_connector.control.party import NEVER, Party, SessionKey
from tidal_connector.control.shares import Ranks, row_bytes
from tidal_connector.decode import reservations as machine
from tidal_connector.decode.declines import Declines
from tidal_connector.decode.records import Leg, ReceiveOutcome, Record, check_pages
from tidal_connector.decode.reservations import Effect, Event, Phase, Timers
from tidal_connector.errors import ProtocolError, TidalError
from tidal_connector.ids import DevicePageId, EngineId, Generation, HostPageId, RequestId, TransferId
from tidal_connector.layout import KVLayout, Placement
from tidal_connector.log import get_logger
from tidal_connector.metrics import Counters
from tidal_connector.transfer.plane import TransferPlane

__all__ = ["ReceiveOutcome", "Receiver"]

logger = get_logger(__name__)

_DELIVER_S = 900.0  # the whole of a transfer, prefill's queue and the longest prompt included
_LOOKS = 20  # how often connections are looked at during a quarantine
_FAILING = (Phase.ABORTING, Phase.QUARANTINE, Phase.RELEASED)


class Receiver(Party[ReceiveOutcome]):
    """The decode room.

    Args:
        layout: what our KV is.
        placement: where it is.
        plane: is asked for a peer's connections; its memory is registered.
        counters: what is counted.
        settings: timers.
        quarantine_s: seconds of quarantine, by the transport.
        deliver_s: bound of a whole transfer.
        rank: which rank of this engine this is.
        size: of how many; the host pool is the same memory for all of them.
    """

    def __init__(
        self,
        layout: KVLayout,
        placement: Placement,
        plane: TransferPlane,
        counters: Counters,
        settings: ControlConfig,
        quarantine_s: float,
        deliver_s: float = _DELIVER_S,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        super().__init__(counters)
        placement.check(layout)
        self._placement = placement
        self._rank = rank
        self._size = size
        self._plane = plane
        self._timers = Timers(
            accept_s=settings.accept_s,
            park_s=settings.park_s,
            stall_s=settings.stall_s,
            quarantine_s=quarantine_s,
            deliver_s=deliver_s,
            lease_s=settings.lease_s,
            retry_s=settings.lease_s / 3,
        )
        self._records: dict[TransferId, Record] = {}
        self._requests: dict[RequestId, TransferId] = {}
        self._declines = Declines(
            self._timers.retry_s,
            settings.accept_s,
            self._call,
            self._tell,
        )
        self._peers: dict[SessionKey, Peer] = {}
        self._doors: dict[SessionKey, str] = {}
        self._generation = 0
        self._stopped = ""

    # --- the worker's threads

    def reserve(
        self,
        request: RequestId,
        transfer: TransferId,
        engine: EngineId,
        address: str,
        first: int,
        end: int,
        host_pages: Sequence[HostPageId],
        device_pages: Sequence[DevicePageId],
        prompt: str = "",
    ) -> None:
        """Ask P to write the rows of tokens ``[first, end)`` into these pages.

        Args:
            request: its id here.
            transfer: its transfer, the same as P's request has.
            engine: the engine that must be at the address.
            address: control address of its rank 0, ``host:port``.
            first: first token that is lacking.
            end: one past the last; ``first == end`` tells P that nothing is lacking.
            host_pages: pages of the host pool, from ``first`` rounded down to a page on.
            device_pages: pages of the device caches, likewise.
            prompt: digest of the prompt's tokens; P's has to be equal, unless one of them is empty.
        """
        hosts, devices = tuple(host_pages), tuple(device_pages)
        self._post(
            lambda now: self._reserve(request, transfer, engine, address, first, end, hosts, devices, prompt, now),
            lambda why, now: self._fail(request, transfer, why, first, end),
        )

    def abort(self, request: RequestId, reason: str) -> None:
        """Give a request up; its outcome comes when no write into its pages can arrive. Unknown ones are ignored."""
        self._post(lambda now: self._withdraw(request, reason, now), lambda why, now: None)

    def decline(self, transfer: TransferId, engine: EngineId, address: str, reason: str) -> None:
        """Tell P that a request was never admitted here, so that it frees its pages now. No outcome."""
        self._post(lambda now: self._decline(transfer, engine, address, reason, now), lambda why, now: None)

    # --- control thread: the party

    def turn(self, now: float) -> float:
        """Let timers run; return when the next one ends."""
        due = NEVER
        for record, leg in self._legs():
            fenced = bool(leg.door) and self._plane.door_shut(leg.door)
            if fenced or now >= min(machine.due(leg.receive), leg.look_at):
                self._step(record, leg, machine.Tick(self._connections(leg, now), fenced), now)
            if not machine.over(leg.receive):
                due = min(due, machine.due(leg.receive), leg.look_at)
        return min(due, self._declines.turn(now))

    def door(self, key: SessionKey) -> str:
        """Open a door for P alone, so that it can be shut when P is lost."""
        door = self._doors[key] = self._plane.open_door()
        return door

    def up(self, key: SessionKey, peer: Peer, now: float) -> None:
        """A rank of P answered: send what waited for it."""
        self._peers[key] = peer
        for record, leg in self._legs(key):
            self._answered(record, leg, peer, now)
        self._declines.up(key, peer, now)

    def lost(self, key: SessionKey, reason: str, now: float) -> None:
        """P is gone, or will not have us."""
        self._peers.pop(key, None)
        door = self._doors.pop(key, "")
        self._plane.shut_door(door)
        for record, leg in self._legs(key):
            leg.door = door
            self._step(record, leg, machine.SessionLost(reason), now)
        self._declines.lost(key)

    def heard(self, key: SessionKey, notice: Notice, now: float) -> None:
        """P speaks about a transfer."""
        if self._declines.heard(key, notice):
            return
        record = self._records.get(notice.transfer)
        leg = record.leg(key, notice.generation) if record is not None else None
        if record is None or leg is None or machine.over(leg.receive):
            self.counters.add("notices_stale")
        elif isinstance(notice, Abort):
            self.counters.add("aborts_received")
            self._step(record, leg, machine.GivenUp(notice.reason), now)
        elif isinstance(notice, Parked | Accepted | Progress | Landed | Failed | Aborted):
            self._step(record, leg, machine.Heard(notice), now)

    def beat(self, key: SessionKey, pairs: tuple[Pair, ...], now: float) -> None:
        """Tell P again about transfers that it believes live and that are given up or over here."""
        for transfer, generation in pairs:
            record = self._records.get(transfer)
            leg = record.leg(key, generation) if record is not None else None
            if leg is not None and not machine.over(leg.receive):
                if leg.receive.phase in (Phase.ABORTING, Phase.QUARANTINE):
                    self._tell(key, Abort(transfer, generation, leg.receive.reason))
            else:
                self._tell(key, Abort(transfer, generation, "no such reservation here"))

    def live(self, key: SessionKey) -> tuple[Pair, ...]:
        """Name the reservations that P has answered and that are not over."""
        receives = (leg.receive for _, leg in self._legs(key))
        return tuple(
            (receive.transfer, receive.generation)
            for receive in receives
            if (receive.parked or receive.phase is not Phase.RESERVED) and receive.phase is not Phase.CALLING
        )

    def needs(self, key: SessionKey) -> bool:
        """Say whether a reservation or a refusal waits for this session."""
        return bool(self._legs(key)) or self._declines.waits_for(key)

    def broke(self, transfer: TransferId, reason: str, now: float) -> None:
        """Fail one transfer."""
        record = self._records.get(transfer)
        if record is not None:
            self._withdraw_all(record, reason, now)

    def stopping(self, reason: str, now: float) -> None:
        """Give everything up, and reserve nothing more."""
        self._stopped = reason
        for record in list(self._records.values()):
            self._withdraw_all(record, reason, now)

    def busy(self) -> bool:
        """Say whether P may still answer something that matters."""
        return any(leg.receive.phase is Phase.ABORTING for _, leg in self._legs())

    def gauges(self) -> Mapping[str, float]:
        """Open reservations, and pages that are out of use."""
        records = self._records.values()
        return {
            "transfers_in_flight": len(records),
            "pages_quarantined": sum(
                len(record.reserve.host_pages)
                for record in records
                if any(leg.receive.phase is Phase.QUARANTINE for leg in record.legs)
            ),
        }

    # --- control thread: intents

    def _reserve(
        self,
        request: RequestId,
        transfer: TransferId,
        engine: EngineId,
        address: str,
        first: int,
        end: int,
        host_pages: tuple[HostPageId, ...],
        device_pages: tuple[DevicePageId, ...],
        prompt: str,
        now: float,
    ) -> None:
        try:
            if self._stopped:
                raise ProtocolError(self._stopped)
            if transfer in self._records or request in self._requests:
                raise ProtocolError(
                    f"request {request!r} or transfer {transfer!r} is being received already; "
                    "use a fresh one for each attempt"
                )
            check_pages(self._placement, first, end, host_pages, device_pages)
            session = self.link.call(engine, address, now)
        except TidalError as error:
            self._fail(request, transfer, str(error), first, end)
            return
        self._generation += 1
        generation = Generation(self._generation)
        timers = self._timers
        bounds = (timers.deliver_s, timers.stall_s)
        reserve = Reserve(transfer, generation, first, end, host_pages, device_pages, *bounds, prompt)
        leg = Leg(machine.new(transfer, generation, 0, timers, now), 0, session)
        record = self._records[transfer] = Record(request, reserve, leg)
        self._requests[request] = transfer
        self.counters.add("transfers_started")
        if session in self._peers:
            self._answered(record, leg, self._peers[session], now)

    def _withdraw(self, request: RequestId, reason: str, now: float) -> None:
        transfer = self._requests.get(request)
        if transfer is not None:
            self._withdraw_all(self._records[transfer], reason, now)

    def _decline(self, transfer: TransferId, engine: EngineId, address: str, reason: str, now: float) -> None:
        if transfer in self._records:
            logger.error("transfer %s is being received and cannot be declined", transfer)
            return
        self._declines.add(transfer, engine, address, reason, self._peers, now)

    # --- control thread: the ranks of P

    def _call(self, engine: EngineId, address: str, now: float) -> SessionKey:
        return self.link.call(engine, address, now)

    def _legs(self, key: SessionKey | None = None) -> list[tuple[Record, Leg]]:
        """Return the legs that are not over, of one session or of all."""
        return [
            (record, leg)
            for record in self._records.values()
            for leg in record.legs
            if key in (None, leg.session) and not machine.over(leg.receive)
        ]

    def _answered(self, record: Record, leg: Leg, peer: Peer, now: float) -> None:
        """A rank can be spoken to: ask it for its share; and if it is the first of several, call the others."""
        if leg.receive.phase is not Phase.CALLING:
            return
        who, reserve = peer.identity, record.reserve
        try:
            if leg is record.legs[0]:
                self._call_others(record, peer, now)
            elif (who.rank, who.size) != (leg.rank, len(record.legs)):
                raise ProtocolError(
                    f"rank {leg.rank} of {len(record.legs)} was looked for, rank {who.rank} of {who.size} answered"
                )
        except TidalError as error:
            self._withdraw_all(record, str(error), now)
            return
        leg.host = peer.host
        ranks = Ranks(who.rank, who.size, self._rank, self._size)
        wanted = (reserve.end - reserve.first) * row_bytes(self._placement.regions, ranks)
        self._step(record, leg, machine.SessionUp(wanted), now)
        for other in record.legs[1:] if leg is record.legs[0] else ():
            if other.session in self._peers:
                self._answered(record, other, self._peers[other.session], now)

    def _call_others(self, record: Record, peer: Peer, now: float) -> None:
        who, first = peer.identity, record.legs[0].receive
        if who.rank:
            raise ProtocolError(
                f"engine {who.engine!r}: rank {who.rank} of {who.size} is at the address that was given; "
                f"give that of its rank 0, {peer.siblings[0]}"
            )
        for rank in range(1, who.size):
            session = self.link.call(who.engine, peer.siblings[rank], now)
            receive = machine.new(first.transfer, first.generation, 0, self._timers, now)
            record.legs.append(Leg(receive, rank, session))

    def _withdraw_all(self, record: Record, reason: str, now: float) -> None:
        record.failure = record.failure or reason
        for leg in record.legs:
            if leg.receive.phase is Phase.CALLING and len(record.legs) > 1:
                # It was never asked, while other ranks of its engine were: it holds the pages until it hears of it.
                self._declines.owe(record.reserve.transfer, leg.session, reason, now)
            self._step(record, leg, machine.Withdrawn(reason), now)

    # --- control thread: machines

    def _step(self, record: Record, leg: Leg, event: Event, now: float) -> None:
        was = leg.receive.phase
        leg.receive, effects = machine.step(leg.receive, event, now)
        receive = leg.receive
        for effect in effects:
            if effect is Effect.RESERVE:
                self._tell(leg.session, record.reserve)
            else:
                self._tell(leg.session, Abort(receive.transfer, receive.generation, receive.reason))
        if receive.phase is Phase.QUARANTINE and was is not Phase.QUARANTINE:
            self.counters.add("transfers_quarantined")
            logger.warning("transfer %s: its pages are in quarantine: %s", receive.transfer, receive.reason)
        if receive.phase is Phase.QUARANTINE:
            leg.look_at = max(receive.settled_at, now + self._timers.quarantine_s / _LOOKS)
        if receive.phase in _FAILING and not record.failure:
            self._withdraw_all(record, record.named(leg, receive.reason), now)
        if record.over and self._records.pop(receive.transfer, None) is record:
            self._over(record)

    def _over(self, record: Record) -> None:
        reserve, ok, landed = record.reserve, record.ok, record.landed
        del self._requests[record.request]
        self.counters.add("transfers_completed" if ok else "transfers_failed")
        self.counters.add("bytes_received", landed if ok else 0)
        reason = "" if ok else record.failure
        logger.debug(
            "[LAND] request %s transfer %s: %d bytes of tokens %d..%d, %s",
            record.request,
            reserve.transfer,
            landed,
            reserve.first,
            reserve.end,
            reason or "complete",
        )
        self._report(ReceiveOutcome(record.request, reserve.transfer, ok, reason, landed, reserve.first, reserve.end))

    def _fail(self, request: RequestId, transfer: TransferId, reason: str, first: int, end: int) -> None:
        """Report a reservation that never left."""
        self.counters.add("transfers_failed")
        self._report(ReceiveOutcome(request, transfer, False, reason, 0, first, end))

    def _connections(self, leg: Leg, now: float) -> int | None:
        # A list of all sockets is read for it, so only where its answer can end a quarantine.
        if leg.receive.phase is not Phase.QUARANTINE or now < leg.receive.settled_at or not leg.host:
            return None
        hosts = {peer.host for peer in self._peers.values()}
        return self._plane.peer_connections(leg.host, hosts - {leg.host})

    def _tell(self, key: SessionKey, notice: Notice) -> None:
        if isinstance(notice, Abort):
            self.counters.add("aborts_sent")
        self.link.tell(key, notice)
