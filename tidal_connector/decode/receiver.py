# SPDX-License-Identifier: Apache-2.0
"""The receiving party: intents of vLLM's decode worker go into receive machines, words to P and outcomes come out.

vLLM's threads call the public methods: they queue and return. Everything else runs on the control thread. A request is
reported once, when its rows are all there or when no write into its pages can still arrive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidal_connector.config import ControlConfig
from tidal_connector.control.handshake import Peer
from tidal_connector.control.messages import (
    NO_RESERVATION,
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
from tidal_connector.decode import reservations as machine
from tidal_connector.decode.records import Declined, ReceiveOutcome, Record, check_pages
from tidal_connector.decode.reservations import Effect, Event, Phase, Timers
from tidal_connector.errors import ConfigError, ProtocolError, TidalError
from tidal_connector.ids import DevicePageId, EngineId, Generation, HostPageId, RequestId, TransferId
from tidal_connector.layout import KVLayout, Placement
from tidal_connector.log import get_logger
from tidal_connector.metrics import Counters
from tidal_connector.transfer.plane import TransferPlane

__all__ = ["ReceiveOutcome", "Receiver"]

logger = get_logger(__name__)

_DELIVER_S = 900.0  # the whole of a transfer, prefill's queue and the longest prompt included
_LOOKS = 20  # how often connections are looked at during a quarantine


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
    ) -> None:
        super().__init__(counters)
        placement.check(layout)
        self._layout = layout
        self._placement = placement
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
        self._declined: dict[TransferId, Declined] = {}
        self._hosts: dict[SessionKey, str] = {}
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
            address: its control address, ``host:port``.
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
        for record in list(self._records.values()):
            fenced = bool(record.door) and self._plane.door_shut(record.door)
            if fenced or now >= min(machine.due(record.receive), record.look_at):
                self._step(record, machine.Tick(self._connections(record, now), fenced), now)
            due = min(due, machine.due(record.receive), record.look_at)
        for transfer, declined in list(self._declined.items()):
            if now >= declined.until:
                del self._declined[transfer]
                continue
            if now >= declined.retry_at:
                declined.retry_at = now + self._timers.retry_s
                self._tell(declined.session, Abort(transfer, NO_RESERVATION, declined.reason))
            due = min(due, declined.until, declined.retry_at)
        return due

    def door(self, key: SessionKey) -> str:
        """Open a door for P alone, so that it can be shut when P is lost."""
        door = self._doors[key] = self._plane.open_door()
        return door

    def up(self, key: SessionKey, peer: Peer, now: float) -> None:
        """P answered: send what waited for it."""
        self._hosts[key] = peer.host
        for record in list(self._records.values()):
            if record.session == key:
                record.host = peer.host
                self._step(record, machine.SessionUp(), now)
        for declined in self._declined.values():
            if declined.session == key:
                declined.retry_at = now

    def lost(self, key: SessionKey, reason: str, now: float) -> None:
        """P is gone, or will not have us."""
        self._hosts.pop(key, None)
        door = self._doors.pop(key, "")
        self._plane.shut_door(door)
        for record in list(self._records.values()):
            if record.session == key:
                record.door = door
                self._step(record, machine.SessionLost(reason), now)
        for transfer, declined in list(self._declined.items()):
            if declined.session == key:
                del self._declined[transfer]  # its pages are freed by its lease on us, or by hold_s

    def heard(self, key: SessionKey, notice: Notice, now: float) -> None:
        """P speaks about a transfer."""
        declined = self._declined.get(notice.transfer)
        if declined is not None and declined.session == key and notice.generation == NO_RESERVATION:
            del self._declined[notice.transfer]
            return
        record = self._records.get(notice.transfer)
        if record is None or record.session != key or record.receive.generation != notice.generation:
            self.counters.add("notices_stale")
        elif isinstance(notice, Abort):
            self.counters.add("aborts_received")
            self._step(record, machine.GivenUp(notice.reason), now)
        elif isinstance(notice, Parked | Accepted | Progress | Landed | Failed | Aborted):
            self._step(record, machine.Heard(notice), now)

    def beat(self, key: SessionKey, pairs: tuple[Pair, ...], now: float) -> None:
        """Tell P again about transfers that it believes live and that are given up or over here."""
        for transfer, generation in pairs:
            record = self._records.get(transfer)
            if record is not None and record.session == key and record.receive.generation == generation:
                if record.receive.phase in (Phase.ABORTING, Phase.QUARANTINE):
                    self._tell(key, Abort(transfer, generation, record.receive.reason))
            else:
                self._tell(key, Abort(transfer, generation, "no such reservation here"))

    def live(self, key: SessionKey) -> tuple[Pair, ...]:
        """Name the reservations that P has answered and that are not over."""
        return tuple(
            (record.receive.transfer, record.receive.generation)
            for record in self._records.values()
            if record.session == key
            and (record.receive.parked or record.receive.phase is not Phase.RESERVED)
            and record.receive.phase is not Phase.CALLING
        )

    def needs(self, key: SessionKey) -> bool:
        """Say whether a reservation or a refusal waits for this session."""
        calling = any(record.session == key for record in self._records.values())
        return calling or any(declined.session == key for declined in self._declined.values())

    def broke(self, transfer: TransferId, reason: str, now: float) -> None:
        """Fail one transfer."""
        record = self._records.get(transfer)
        if record is not None:
            self._step(record, machine.Withdrawn(reason), now)

    def stopping(self, reason: str, now: float) -> None:
        """Give everything up, and reserve nothing more."""
        self._stopped = reason
        for record in list(self._records.values()):
            self._step(record, machine.Withdrawn(reason), now)

    def busy(self) -> bool:
        """Say whether P may still answer something that matters."""
        return any(record.receive.phase is Phase.ABORTING for record in self._records.values())

    def gauges(self) -> Mapping[str, float]:
        """Open reservations, and pages that are out of use."""
        records = self._records.values()
        return {
            "transfers_in_flight": len(records),
            "pages_quarantined": sum(
                len(record.reserve.host_pages) for record in records if record.receive.phase is Phase.QUARANTINE
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
        receive = machine.new(transfer, generation, self._layout.transfer_bytes(end - first), timers, now)
        record = self._records[transfer] = Record(receive, request, reserve, session)
        self._requests[request] = transfer
        self.counters.add("transfers_started")
        if session in self._hosts:
            record.host = self._hosts[session]
            self._step(record, machine.SessionUp(), now)

    def _withdraw(self, request: RequestId, reason: str, now: float) -> None:
        transfer = self._requests.get(request)
        if transfer is not None:
            self._step(self._records[transfer], machine.Withdrawn(reason), now)

    def _decline(self, transfer: TransferId, engine: EngineId, address: str, reason: str, now: float) -> None:
        if transfer in self._records:
            logger.error("transfer %s is being received and cannot be declined", transfer)
            return
        try:
            session = self.link.call(engine, address, now)
        except ConfigError as error:
            logger.warning("transfer %s: prefill cannot be told that it was declined: %s", transfer, error)
            return
        until = now + self._timers.accept_s
        self._declined[transfer] = Declined(session, reason, now, until)

    # --- control thread: machines

    def _step(self, record: Record, event: Event, now: float) -> None:
        was = record.receive.phase
        record.receive, effects = machine.step(record.receive, event, now)
        receive = record.receive
        for effect in effects:
            if effect is Effect.RESERVE:
                self._tell(record.session, record.reserve)
            else:
                self._tell(record.session, Abort(receive.transfer, receive.generation, receive.reason))
        if receive.phase is Phase.QUARANTINE and was is not Phase.QUARANTINE:
            self.counters.add("transfers_quarantined")
            logger.warning("transfer %s: its pages are in quarantine: %s", receive.transfer, receive.reason)
        if receive.phase is Phase.QUARANTINE:
            record.look_at = max(receive.settled_at, now + self._timers.quarantine_s / _LOOKS)
        if machine.over(receive) and self._records.pop(receive.transfer, None) is record:
            self._over(record)

    def _over(self, record: Record) -> None:
        receive, reserve = record.receive, record.reserve
        del self._requests[record.request]
        ok = receive.phase is Phase.READY
        self.counters.add("transfers_completed" if ok else "transfers_failed")
        self.counters.add("bytes_received", receive.landed if ok else 0)
        reason = "" if ok else receive.reason
        logger.debug(
            "[LAND] request %s transfer %s: %d bytes of tokens %d..%d, %s",
            record.request,
            receive.transfer,
            receive.landed,
            reserve.first,
            reserve.end,
            reason or "complete",
        )
        self._report(
            ReceiveOutcome(record.request, receive.transfer, ok, reason, receive.landed, reserve.first, reserve.end)
        )

    def _fail(self, request: RequestId, transfer: TransferId, reason: str, first: int, end: int) -> None:
        """Report a reservation that never left."""
        self.counters.add("transfers_failed")
        self._report(ReceiveOutcome(request, transfer, False, reason, 0, first, end))

    def _connections(self, record: Record, now: float) -> int | None:
        # A list of all sockets is read for it, so only where its answer can end a quarantine.
        if record.receive.phase is not Phase.QUARANTINE or now < record.receive.settled_at or not record.host:
            return None
        return self._plane.peer_connections(record.host, {host for host in self._hosts.values() if host != record.host})

    def _tell(self, key: SessionKey, notice: Notice) -> None:
        if isinstance(notice, Abort):
            self.counters.add("aborts_sent")
        self.link.tell(key, notice)
