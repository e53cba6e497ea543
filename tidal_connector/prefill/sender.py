# SPDX-License-Identifier: Apache-2.0
"""The sending party: intents of vLLM's prefill worker and words of D go into send machines, pushes and outcomes come
out.

vLLM's threads call the public methods: they queue and return. Everything else runs on the control thread, which alone
touches the machines. A request is reported once, after vLLM has ended it *and* no byte of its pages will be read again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from tidal_connector.config import ControlConfig
from tidal_connector.control.handshake import Peer
from tidal_connector.control.messages import Abort, Aborted, Failed, Notice, Pair, Reserve
from tidal_connector.control.party import Party, SessionKey
from tidal_connector.errors import ProtocolError, TidalError
from tidal_connector.ids import DevicePageId, RequestId, TransferId
from tidal_connector.layout import KVLayout, Placement
from tidal_connector.log import get_logger
from tidal_connector.metrics import Counters
from tidal_connector.prefill import requests as machine
from tidal_connector.prefill import sends
from tidal_connector.prefill.ledger import Ledger, SendOutcome
from tidal_connector.prefill.pushes import Pusher
from tidal_connector.prefill.sends import Event, Phase
from tidal_connector.transfer.plane import TransferPlane

logger = get_logger(__name__)

__all__ = ["SendOutcome", "Sender"]


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
        rank: which rank of this engine this is.
        size: of how many; each holds all rows and sends its share.
    """

    def __init__(
        self,
        layout: KVLayout,
        placement: Placement,
        plane: TransferPlane,
        counters: Counters,
        settings: ControlConfig,
        descriptor_bytes: int = 4 << 20,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        super().__init__(counters)
        self._plane = plane
        self._pusher = Pusher(layout, placement, plane, counters, descriptor_bytes, rank, size)
        self._settings = settings
        self._ledger = Ledger(self._pusher, plane, counters, self._tell, self._report)
        self._doubles: dict[RequestId, TransferId] = {}  # requests whose transfer id another request owns
        self._waiters: list[_Waiter] = []

    # --- the worker's threads

    def open(self, request: RequestId, transfer: TransferId, hold_s: float | None, prompt: str = "") -> None:
        """A request was scheduled, perhaps again.

        Args:
            request: its id here.
            transfer: its transfer.
            hold_s: seconds that its pages wait for a reservation after its prefill; None takes the configured time.
            prompt: digest of its prompt's tokens; D's has to be equal, unless one of them is empty.
        """
        hold = self._settings.hold_s if hold_s is None else hold_s
        self._post(lambda now: self._open(request, transfer, hold, prompt, now), self._blame(request))

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
        self._post(lambda now: self._of(request, sends.Unwritten(keep), now), self._blame(request))

    def prefill_done(self, request: RequestId, at: float) -> None:
        """The whole prompt is written, since ``at`` (monotonic seconds)."""
        self._post(lambda now: self._prefill_done(request, at, now), self._blame(request))

    def finish(self, request: RequestId, total: int) -> None:
        """vLLM finished the request well, after ``total`` tokens; its pages are held until the outcome."""
        self._post(lambda now: self._finish(request, total, now), self._blame(request))

    def abort(self, request: RequestId, reason: str) -> None:
        """vLLM ended the request in any other way; its outcome comes when nothing reads its pages any more."""
        self._post(lambda now: self._abort(request, reason, now), self._blame(request))

    def give_up(self, request: RequestId, reason: str) -> None:
        """Its KV cannot be handed over any more, though vLLM has not ended it: the outcome waits for that."""
        self._post(lambda now: self._of(request, sends.Withdrawn(reason), now), self._blame(request))

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
            self._ledger.receipt(receipt, now)
        due = self._ledger.timers(self._settings.stall_s, now)
        for waiter in list(self._waiters):
            if not self._ledger.reading(waiter.requests):
                self._waiters.remove(waiter)
                waiter.quiet.set()
        return due

    def up(self, key: SessionKey, peer: Peer, now: float) -> None:
        """A rank of D called."""
        target = self._pusher.target(peer)
        if target is not None:
            self._ledger.peers[key] = target

    def lost(self, key: SessionKey, reason: str, now: float) -> None:
        """D is gone: feed it nothing more, and forget what waits for it."""
        for record in list(self._ledger.records.values()):
            for index, send in enumerate(record.sends):
                if send.session == key:
                    self._ledger.step(record, index, sends.PeerLost(reason), now)
        peer = self._ledger.peers.pop(key, None)
        self._ledger.moved.pop(key, None)
        if peer is not None and all(other.endpoint != peer.endpoint for other in self._ledger.peers.values()):
            self._plane.forget_peer(peer.endpoint)

    def heard(self, key: SessionKey, notice: Notice, now: float) -> None:
        """D reserves, or gives a transfer up."""
        if isinstance(notice, Reserve):
            self._reserve(key, notice, now)
        elif isinstance(notice, Abort):
            self.counters.add("aborts_received")
            self._abort_asked(key, notice, now)

    def beat(self, key: SessionKey, pairs: tuple[Pair, ...], now: float) -> None:
        """Answer for the transfers that D believes live and that are over or unknown here."""
        live = set(self.live(key))
        for transfer, generation in pairs:
            if (transfer, generation) in live:
                continue
            target = self._ledger.peers.get(key)
            over = self._ledger.over(transfer, target.rank if target is not None else 0)
            if over is not None:
                self.link.tell(key, machine.repeat(over, key, generation))
            else:
                self.counters.add("notices_stale")
                self._tell(key, Abort(transfer, generation, "no such reservation here"))

    def live(self, key: SessionKey) -> tuple[Pair, ...]:
        """Name D's reservations that are not over."""
        sends = (send for record in self._ledger.records.values() for send in record.sends)
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
        record = self._ledger.records.get(transfer)
        if record is not None:
            self._ledger.step_all(record, sends.Withdrawn(reason), now)

    def stopping(self, reason: str, now: float) -> None:
        """End every transfer."""
        for record in list(self._ledger.records.values()):
            self._ledger.step_all(record, sends.Withdrawn(reason), now)

    def busy(self) -> bool:
        """Say whether anything is not over."""
        return any(not record.over for record in self._ledger.records.values())

    def gauges(self) -> Mapping[str, float]:
        """Transfers that are not over, and pages that vLLM waits for."""
        records = self._ledger.records.values()
        return {
            "transfers_in_flight": sum(not record.over for record in records),
            "pages_held": sum(len(record.pages) for record in records if record.ended),
        }

    # --- control thread: intents

    def _open(self, request: RequestId, transfer: TransferId, hold_s: float, prompt: str, now: float) -> None:
        if request in self._doubles:
            return  # the transfer stays the other's, even when that one is over
        record = self._ledger.record(transfer)
        if record.request not in (None, request):
            logger.error("request %s: transfer %s belongs to request %s already", request, transfer, record.request)
            self._doubles[request] = transfer
            return
        record.request = request
        record.hold_s = hold_s
        self._ledger.requests[request] = transfer
        self._ledger.step_all(record, sends.Opened(prompt), now)

    def _set_pages(self, request: RequestId, pages: tuple[DevicePageId, ...]) -> None:
        record = self._ledger.by_request(request)
        if record is not None:
            record.pages = pages

    def _wrote(self, request: RequestId, layers: tuple[int, ...] | None, first: int, end: int, now: float) -> None:
        positions = None if layers is None else self._pusher.positions(layers)
        self._of(request, sends.Wrote(positions, first, end), now)

    def _prefill_done(self, request: RequestId, at: float, now: float) -> None:
        record = self._ledger.by_request(request)
        if record is not None:
            record.done_at = at
            self._ledger.step_all(record, sends.PrefillDone(at + record.hold_s), now)

    def _finish(self, request: RequestId, total: int, now: float) -> None:
        if self._doubled(request):
            return
        record = self._ledger.by_request(request)
        if record is None:
            return
        record.ended = True
        # A request that computed nothing (all of it cached) may end without a prefill of its own.
        self._ledger.step_all(record, sends.Sealed(now + record.hold_s), now)

    def _abort(self, request: RequestId, reason: str, now: float) -> None:
        if self._doubled(request):
            return
        record = self._ledger.by_request(request)
        if record is not None:
            record.ended = True
            self._ledger.step_all(record, sends.Withdrawn(reason), now)

    def _reject(self, transfer: TransferId, reason: str, now: float) -> None:
        record = self._ledger.record(transfer)
        if record.request is None:
            self._ledger.step_all(record, sends.Withdrawn(reason), now)

    def _doubled(self, request: RequestId) -> bool:
        transfer = self._doubles.pop(request, None)
        if transfer is None:
            return False
        reason = f"transfer {transfer!r} belongs to another request; use a fresh one for each attempt"
        self._report(SendOutcome(request, transfer, False, reason, 0, 0, 0.0))
        return True

    def _of(self, request: RequestId, event: Event, now: float) -> None:
        record = self._ledger.by_request(request)
        if record is not None:
            self._ledger.step_all(record, event, now)

    def _blame(self, request: RequestId) -> _Blame:
        return _Blame(self, request)

    # --- control thread: machines

    def _reserve(self, key: SessionKey, reserve: Reserve, now: float) -> None:
        target = self._ledger.peers.get(key)
        try:
            if target is None:
                raise ProtocolError("no placement is known of the peer that reserves")
            self._pusher.check(reserve, target.placement)
            record, index = self._ledger.meet(reserve.transfer, target, now)
        except TidalError as error:
            self.counters.add("messages_refused")
            logger.warning("transfer %s: reservation refused: %s", reserve.transfer, error)
            self.link.tell(key, Failed(reserve.transfer, reserve.generation, str(error), True))
            return
        event = sends.Reserved(key, reserve, self._settings.park_s, target.row_bytes)
        self._ledger.step(record, index, event, now)

    def _abort_asked(self, key: SessionKey, abort: Abort, now: float) -> None:
        target = self._ledger.peers.get(key)
        try:
            if target is None:
                raise ProtocolError("no placement is known of the peer that gives up")
            record, index = self._ledger.meet(abort.transfer, target, now)
        except ProtocolError as error:
            self.counters.add("notices_stale")
            self.link.tell(key, Aborted(abort.transfer, abort.generation, str(error), True))
            return
        before = record.sends[index]
        self._ledger.step(record, index, sends.AbortAsked(key, abort), now)
        if record.sends[index] == before and before.phase is not Phase.DRAINING and before.phase is not Phase.GONE:
            self.counters.add("notices_stale")

    def _tell(self, key: SessionKey, notice: Notice) -> None:
        if isinstance(notice, Abort):
            self.counters.add("aborts_sent")
        self.link.tell(key, notice)


class _Blame:
    """Fails the transfer of a request whose intent broke."""

    __slots__ = ("_request", "_sender")

    def __init__(self, sender: Sender, request: RequestId) -> None:
        self._sender = sender
        self._request = request

    def __call__(self, reason: str, now: float) -> None:
        self._sender._of(self._request, sends.Withdrawn(reason), now)
