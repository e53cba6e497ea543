# SPDX-License-Identifier: Apache-2.0
"""The sending party: intents of vLLM's prefill worker and words of D go into send machines, pushes and outcomes come
out.

vLLM's threads call the public methods: they queue and return. Everything else runs on the control thread, which alone
touches the machines. A request is reported once, after vLLM has ended it *and* no byte of its pages will be read again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

from tidal_connector.config import ControlConfig
from tidal_connector.control.handshake import Peer
from tidal_connector.control.messages import Abort, Failed, Notice, Pair, Reserve
from tidal_connector.control.party import NEVER, Party, SessionKey
from tidal_connector.errors import ProtocolError, TidalError
from tidal_connector.ids import DevicePageId, RequestId, TransferId
from tidal_connector.layout import KVLayout, Placement
from tidal_connector.log import get_logger
from tidal_connector.metrics import Counters
from tidal_connector.prefill import requests as machine
from tidal_connector.prefill.pushes import Pusher
from tidal_connector.prefill.requests import Event, Part, Phase, Send
from tidal_connector.transfer.plane import Receipt, Ticket, TransferPlane

logger = get_logger(__name__)

_REMEMBER_S = 600.0  # how long late questions about a finished transfer are answered; no peer asks for so long
_REMEMBER = 65536


class SendOutcome(msgspec.Struct, frozen=True):
    """How a request's hand-over ended. From now on nothing reads its pages.

    Attributes:
        request, transfer: which.
        ok: D has everything it asked for.
        reason: why not; empty when ok.
        bytes: acknowledged bytes.
        bytes_before_prefill_end: those of them that were acknowledged before the whole prompt was written.
        seconds: from the first byte handed on to the last acknowledgement.
    """

    request: RequestId
    transfer: TransferId
    ok: bool
    reason: str
    bytes: int
    bytes_before_prefill_end: int
    seconds: float


class _Record:
    """What the machine need not know of a transfer."""

    __slots__ = (
        "acknowledged",
        "done_at",
        "ended",
        "first_at",
        "hold_s",
        "last_at",
        "pages",
        "request",
        "send",
        "settled",
        "started",
    )

    def __init__(self, send: Send) -> None:
        self.send = send
        self.request: RequestId | None = None
        self.pages: tuple[DevicePageId, ...] = ()
        self.hold_s = 0.0
        self.ended = False  # by vLLM
        self.started = False
        self.settled = False
        self.done_at: float | None = None
        self.acknowledged: list[tuple[float, int]] = []  # when, bytes
        self.first_at = NEVER
        self.last_at = 0.0


class _Waiter:
    __slots__ = ("quiet", "requests")

    def __init__(self, requests: frozenset[RequestId]) -> None:
        self.requests = requests
        self.quiet = threading.Event()


class Sender(Party[SendOutcome]):
    """The prefill room.

    Args:
        layout: what our KV is.
        placement: where it is.
        plane: carries the bytes; its memory is registered.
        counters: what is counted.
        settings: timers.
        descriptor_bytes: the plane's largest descriptor, for counting them.
    """

    def __init__(
        self,
        layout: KVLayout,
        placement: Placement,
        plane: TransferPlane,
        counters: Counters,
        settings: ControlConfig,
        descriptor_bytes: int = 4 << 20,
    ) -> None:
        super().__init__(counters)
        self._plane = plane
        self._pusher = Pusher(layout, placement, plane, counters, descriptor_bytes)
        self._settings = settings
        self._records: dict[TransferId, _Record] = {}
        self._requests: dict[RequestId, TransferId] = {}
        self._doubles: dict[RequestId, TransferId] = {}  # requests whose transfer id another request owns
        self._over: OrderedDict[TransferId, tuple[float, Send]] = OrderedDict()
        self._tickets: dict[Ticket, tuple[TransferId, int]] = {}
        self._peers: dict[SessionKey, Peer] = {}
        self._moved: dict[SessionKey, float] = {}
        self._waiters: list[_Waiter] = []

    # --- the worker's threads

    def open(self, request: RequestId, transfer: TransferId, hold_s: float | None) -> None:
        """A request was scheduled, perhaps again.

        Args:
            request: its id here.
            transfer: its transfer.
            hold_s: seconds that its pages wait for a reservation after its prefill; None takes the configured time.
        """
        hold = self._settings.hold_s if hold_s is None else hold_s
        self._post(lambda now: self._open(request, transfer, hold, now), self._blame(request))

    def pages(self, request: RequestId, pages: Sequence[DevicePageId]) -> None:
        """All pages of a request so far, in token order; replaces what was said before."""
        kept = tuple(pages)
        self._post(lambda now: self._set_pages(request, kept), self._blame(request))

    def ready(self, request: RequestId, layers: Sequence[int] | None, first: int, end: int) -> None:
        """The rows of tokens ``[first, end)`` are written in these decoder layers (None: all), in all their regions."""
        self.ready_many(layers, ((request, first, end),))

    def ready_many(self, layers: Sequence[int] | None, ranges: Sequence[tuple[RequestId, int, int]]) -> None:
        """Like :meth:`ready`, for many requests ``(request, first, end)`` at once."""
        chosen = None if layers is None else tuple(layers)
        self._post_many(
            # Bound as defaults: a closure would see the loop's last values.
            (lambda now, r=request, a=first, b=end: self._wrote(r, chosen, a, b, now), self._blame(request))  # type: ignore[misc]
            for request, first, end in ranges
        )

    def unready(self, request: RequestId, keep: int) -> None:
        """Preempted: the rows from token ``keep`` on are gone. Call :meth:`quiesce` before they are reused."""
        self._post(lambda now: self._of(request, machine.Unwritten(keep), now), self._blame(request))

    def prefill_done(self, request: RequestId, at: float) -> None:
        """The whole prompt is written, since ``at`` (monotonic seconds)."""
        self._post(lambda now: self._prefill_done(request, at, now), self._blame(request))

    def finish(self, request: RequestId, total: int) -> None:
        """vLLM finished the request well, after ``total`` tokens; its pages are held until the outcome."""
        self._post(lambda now: self._finish(request, total, now), self._blame(request))

    def abort(self, request: RequestId, reason: str) -> None:
        """vLLM ended the request in any other way; its outcome comes when nothing reads its pages any more."""
        self._post(lambda now: self._abort(request, reason, now), self._blame(request))

    def reject(self, transfer: TransferId, reason: str) -> None:
        """No request of this transfer will ever be scheduled here: tell D, now or when it asks. No outcome."""
        self._post(lambda now: self._reject(transfer, reason, now), lambda why, now: self.broke(transfer, why, now))

    def quiesce(self, requests: Sequence[RequestId], timeout_s: float) -> bool:
        """Block until nothing that was announced before this call still reads pages of these requests.

        For pages that vLLM takes back by itself (preemption): call :meth:`unready` first, so that nothing is submitted
        anew. Returns False if the time is over first; the pages must not be written then.
        """
        return self.watch(requests).wait(timeout_s)

    def watch(self, requests: Sequence[RequestId]) -> threading.Event:
        """Return what is set once :meth:`quiesce` would return True."""
        waiter = _Waiter(frozenset(requests))
        self._post(lambda now: self._waiters.append(waiter), lambda why, now: None)
        return waiter.quiet

    # --- control thread: the party

    def turn(self, now: float) -> float:
        """Take receipts, let timers run, answer those who wait; return when the next timer ends."""
        for receipt in self._plane.poll():
            self._receipt(receipt, now)
        due = NEVER
        for record in list(self._records.values()):
            send = record.send
            if send.phase is Phase.GONE:
                continue
            moved = self._moved.get(send.session, 0.0) if send.session else 0.0
            if now >= machine.due(send, self._settings.stall_s, moved):
                self._step(record, machine.Tick(self._settings.stall_s, moved), now)
            due = min(due, machine.due(record.send, self._settings.stall_s, moved))
        for waiter in list(self._waiters):
            if not self._reading(waiter.requests):
                self._waiters.remove(waiter)
                waiter.quiet.set()
        return due

    def up(self, key: SessionKey, peer: Peer, now: float) -> None:
        """D called."""
        self._peers[key] = peer

    def lost(self, key: SessionKey, reason: str, now: float) -> None:
        """D is gone: feed it nothing more, and forget what waits for it."""
        for record in list(self._records.values()):
            if record.send.session == key:
                self._step(record, machine.PeerLost(reason), now)
        peer = self._peers.pop(key, None)
        self._moved.pop(key, None)
        if peer is not None and all(other.endpoint != peer.endpoint for other in self._peers.values()):
            self._plane.forget_peer(peer.endpoint)

    def heard(self, key: SessionKey, notice: Notice, now: float) -> None:
        """D reserves, or gives a transfer up."""
        if isinstance(notice, Reserve):
            self._reserve(key, notice, now)
        elif isinstance(notice, Abort):
            self.counters.add("aborts_received")
            record = self._record(notice.transfer)
            before = record.send
            self._step(record, machine.AbortAsked(key, notice), now)
            if record.send == before and before.phase is not Phase.DRAINING and before.phase is not Phase.GONE:
                self.counters.add("notices_stale")

    def beat(self, key: SessionKey, pairs: tuple[Pair, ...], now: float) -> None:
        """Answer for the transfers that D believes live and that are over or unknown here."""
        for transfer, generation in pairs:
            record = self._records.get(transfer)
            if record is not None and record.send.phase is not Phase.GONE:
                reserve = record.send.reserve
                if record.send.session == key and reserve is not None and reserve.generation == generation:
                    continue
            over = record.send if record is not None else self._over.get(transfer, (0.0, None))[1]
            if over is not None and over.phase is Phase.GONE:
                self.link.tell(key, machine.repeat(over, generation))
            else:
                self.counters.add("notices_stale")
                self._tell(key, Abort(transfer, generation, "no such reservation here"))

    def live(self, key: SessionKey) -> tuple[Pair, ...]:
        """Name D's reservations that are not over."""
        sends = (record.send for record in self._records.values())
        return tuple(
            (send.transfer, send.reserve.generation)
            for send in sends
            if send.session == key and send.reserve is not None and send.phase is not Phase.GONE
        )

    def needs(self, key: SessionKey) -> bool:
        """P calls nobody."""
        return False

    def broke(self, transfer: TransferId, reason: str, now: float) -> None:
        """Fail one transfer."""
        record = self._records.get(transfer)
        if record is not None:
            self._step(record, machine.Withdrawn(reason), now)

    def stopping(self, reason: str, now: float) -> None:
        """End every transfer."""
        for record in list(self._records.values()):
            self._step(record, machine.Withdrawn(reason), now)

    def busy(self) -> bool:
        """Say whether anything is not over."""
        return any(record.send.phase is not Phase.GONE for record in self._records.values())

    def gauges(self) -> Mapping[str, float]:
        """Transfers that are not over, and pages that vLLM waits for."""
        records = self._records.values()
        return {
            "transfers_in_flight": sum(record.send.phase is not Phase.GONE for record in records),
            "pages_held": sum(len(record.pages) for record in records if record.ended),
        }

    # --- control thread: intents

    def _open(self, request: RequestId, transfer: TransferId, hold_s: float, now: float) -> None:
        record = self._record(transfer)
        if record.request not in (None, request):
            logger.error("request %s: transfer %s belongs to request %s already", request, transfer, record.request)
            self._doubles[request] = transfer
            return
        record.request = request
        record.hold_s = hold_s
        self._requests[request] = transfer
        self._step(record, machine.Opened(), now)

    def _set_pages(self, request: RequestId, pages: tuple[DevicePageId, ...]) -> None:
        record = self._by_request(request)
        if record is not None:
            record.pages = pages

    def _wrote(self, request: RequestId, layers: tuple[int, ...] | None, first: int, end: int, now: float) -> None:
        positions = None if layers is None else self._pusher.positions(layers)
        self._of(request, machine.Wrote(positions, first, end), now)

    def _prefill_done(self, request: RequestId, at: float, now: float) -> None:
        record = self._by_request(request)
        if record is not None:
            record.done_at = at
            self._step(record, machine.PrefillDone(at + record.hold_s), now)

    def _finish(self, request: RequestId, total: int, now: float) -> None:
        if self._doubled(request):
            return
        record = self._by_request(request)
        if record is None:
            return
        record.ended = True
        # A request that computed nothing (all of it cached) may end without a prefill of its own.
        self._step(record, machine.Sealed(now + record.hold_s), now)

    def _abort(self, request: RequestId, reason: str, now: float) -> None:
        if self._doubled(request):
            return
        record = self._by_request(request)
        if record is not None:
            record.ended = True
            self._step(record, machine.Withdrawn(reason), now)

    def _reject(self, transfer: TransferId, reason: str, now: float) -> None:
        record = self._record(transfer)
        if record.request is None:
            self._step(record, machine.Withdrawn(reason), now)

    def _doubled(self, request: RequestId) -> bool:
        transfer = self._doubles.pop(request, None)
        if transfer is None:
            return False
        reason = f"transfer {transfer!r} belongs to another request; use a fresh one for each attempt"
        self._report(SendOutcome(request, transfer, False, reason, 0, 0, 0.0))
        return True

    def _of(self, request: RequestId, event: Event, now: float) -> None:
        record = self._by_request(request)
        if record is not None:
            self._step(record, event, now)

    def _by_request(self, request: RequestId) -> _Record | None:
        transfer = self._requests.get(request)
        return None if transfer is None else self._records.get(transfer)

    def _blame(self, request: RequestId) -> _Blame:
        return _Blame(self, request)

    # --- control thread: machines

    def _record(self, transfer: TransferId) -> _Record:
        record = self._records.get(transfer)
        if record is None:
            _, over = self._over.pop(transfer, (0.0, None))
            record = self._records[transfer] = _Record(over or machine.new(transfer, self._pusher.row_bytes))
            record.settled = over is not None
        return record

    def _reserve(self, key: SessionKey, reserve: Reserve, now: float) -> None:
        peer = self._peers.get(key)
        try:
            if peer is None or peer.placement is None:
                raise ProtocolError("no placement is known of the peer that reserves")
            self._pusher.check(reserve, peer.placement)
        except TidalError as error:
            self.counters.add("messages_refused")
            logger.warning("transfer %s: reservation refused: %s", reserve.transfer, error)
            self.link.tell(key, Failed(reserve.transfer, reserve.generation, str(error), True))
            return
        self._step(self._record(reserve.transfer), machine.Reserved(key, reserve, self._settings.park_s), now)

    def _receipt(self, receipt: Receipt, now: float) -> None:
        transfer, number = self._tickets.pop(receipt.ticket, (None, 0))
        record = self._records.get(transfer) if transfer is not None else None
        if record is None:
            return
        self.counters.add("bytes_pushed", receipt.bytes)
        record.acknowledged.append((receipt.finished, receipt.bytes))
        record.first_at = min(record.first_at, receipt.started)
        record.last_at = max(record.last_at, receipt.finished)
        if receipt.bytes and record.send.session in self._peers:
            self._moved[record.send.session] = now
        ended = machine.PartEnded(number, receipt.ok, receipt.drained, receipt.reason)
        self._step(record, ended, now)

    def _step(self, record: _Record, event: Event, now: float) -> None:
        record.send, effects = machine.step(record.send, event, now)
        failures: list[Event] = []
        for effect in effects:
            if isinstance(effect, machine.Submit):
                failures.extend(self._submit(record, effect.part))
            elif isinstance(effect, machine.Cancel):
                for ticket, (transfer, number) in list(self._tickets.items()):
                    if transfer == record.send.transfer and number in effect.parts:
                        self._plane.cancel(ticket)
            else:
                self._tell(effect.session, effect.notice)
        if record.send.phase in (Phase.SENDING, Phase.DRAINING) and not record.started:
            record.started = True
            self.counters.add("transfers_started")
        for failure in failures:
            self._step(record, failure, now)
        if record.send.phase is Phase.GONE:
            self._gone(record, now)

    def _submit(self, record: _Record, part: Part) -> list[Event]:
        send = record.send
        assert send.session is not None
        assert send.reserve is not None
        try:
            ticket = self._pusher.push(self._peers[send.session], send.reserve, record.pages, part)
        except TidalError as error:
            return [machine.PartEnded(part.number, False, True, str(error))]
        self._tickets[ticket] = (send.transfer, part.number)
        return []

    def _gone(self, record: _Record, now: float) -> None:
        send = record.send
        if not record.settled:
            record.settled = True
            self._settled(record)
        if record.request is not None and not record.ended:
            return  # vLLM still computes it; it is reported when vLLM has ended it
        if self._records.pop(send.transfer, None) is not record:
            return
        self._over[send.transfer] = (now + _REMEMBER_S, machine.buried(send))
        while self._over and (len(self._over) > _REMEMBER or next(iter(self._over.values()))[0] < now):
            self._over.popitem(last=False)
        if record.request is not None:
            del self._requests[record.request]
            self._tell_vllm(record, record.request)

    def _settled(self, record: _Record) -> None:
        if record.send.ok:
            self.counters.add("transfers_completed")
            self.counters.add("transfer_seconds", max(0.0, record.last_at - record.first_at))
        else:
            self.counters.add("transfers_failed")
            logger.warning("transfer %s ended without its bytes: %s", record.send.transfer, record.send.reason)

    def _tell_vllm(self, record: _Record, request: RequestId) -> None:
        send, done_at = record.send, record.done_at
        total = sum(size for _, size in record.acknowledged)
        early = sum(size for at, size in record.acknowledged if done_at is not None and at <= done_at)
        self.counters.add("bytes_landed_before_prefill_end", early)
        seconds = max(0.0, record.last_at - record.first_at) if record.acknowledged else 0.0
        self._report(SendOutcome(request, send.transfer, send.ok, send.reason, total, early, seconds))

    def _tell(self, key: SessionKey, notice: Notice) -> None:
        if isinstance(notice, Abort):
            self.counters.add("aborts_sent")
        self.link.tell(key, notice)

    def _reading(self, requests: frozenset[RequestId]) -> bool:
        records = (self._by_request(request) for request in requests)
        return any(record is not None and bool(record.send.parts) for record in records)


class _Blame:
    """Fails the transfer of a request whose intent broke."""

    __slots__ = ("_request", "_sender")

    def __init__(self, sender: Sender, request: RequestId) -> None:
        self._sender = sender
        self._request = request

    def __call__(self, reason: str, now: float) -> None:
        self._sender._of(self._request, machine.Withdrawn(reason), now)
