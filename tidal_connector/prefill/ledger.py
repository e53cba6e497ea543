# SPDX-License-Identifier: Apache-2.0
"""The book of all sends: machines, what they need to have done, and how each request ends.

Takes events from the sender; hands runs to the plane, words to D and outcomes to whoever reports them. A request's
outcome comes once, after vLLM has ended it *and* no byte of its pages will be read again. Control thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from tidal_connector.control.messages import Notice
from tidal_connector.control.party import NEVER, SessionKey
from tidal_connector.errors import ProtocolError, TidalError
from tidal_connector.ids import DevicePageId, RequestId, TransferId
from tidal_connector.log import get_logger
from tidal_connector.metrics import Counters
from tidal_connector.prefill import requests as machine
from tidal_connector.prefill import sends
from tidal_connector.prefill.pushes import Pusher, Target
from tidal_connector.prefill.sends import Event, Part, Phase, Send
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


class Record:
    """A transfer: one machine for each rank of D, and what the machines need not know.

    Until D's first word nobody knows how many ranks it has. So there is one machine until then, which has gone through
    all that its request has gone through, and each rank gets a copy of it. When one of them fails, the others are given
    up, because D has no use for a part of its rows.
    """

    __slots__ = (
        "acknowledged",
        "done_at",
        "ended",
        "failed",
        "first_at",
        "hold_s",
        "last_at",
        "met",
        "pages",
        "request",
        "sends",
        "settled",
        "started",
        "transfer",
    )

    def __init__(self, transfer: TransferId, sends: list[Send]) -> None:
        self.transfer = transfer
        self.sends = sends
        self.met = len(sends) > 1  # a rank of D spoke, so the number of machines is that of its ranks
        self.request: RequestId | None = None
        self.pages: tuple[DevicePageId, ...] = ()
        self.hold_s = 0.0
        self.ended = False  # by vLLM
        self.started = False
        self.settled = False
        self.failed = False
        self.done_at: float | None = None
        self.acknowledged: list[tuple[float, int]] = []  # when, bytes
        self.first_at = NEVER
        self.last_at = 0.0

    @property
    def over(self) -> bool:
        """Nothing of it will be read or written any more, for any rank."""
        return all(send.phase is Phase.GONE for send in self.sends)

    @property
    def ok(self) -> bool:
        """Every rank of D has what it asked for."""
        return all(send.ok for send in self.sends)

    @property
    def reason(self) -> str:
        """Why it did not go well, by the first rank that says so."""
        return next((send.reason for send in self.sends if not send.ok), "")

    def meet(self, target: Target) -> int:
        """Return which machine is a rank of D's, and make one for each of its ranks at the first word.

        Raises:
            ProtocolError: D has another number of ranks than the one that spoke of this transfer before.
        """
        if not self.met:
            self.met = True
            self.sends = self.sends * target.size
        if len(self.sends) != target.size:
            raise ProtocolError(
                f"transfer {self.transfer!r} was taken by a decode engine of {len(self.sends)} ranks; "
                f"this one has {target.size}"
            )
        return target.rank


class Ledger:
    """Every send, by transfer and by request.

    Args:
        pusher: turns parts into tickets.
        plane: ends them.
        counters: what is counted.
        tell: sends a word to D.
        report: takes an outcome.
    """

    def __init__(
        self,
        pusher: Pusher,
        plane: TransferPlane,
        counters: Counters,
        tell: Callable[[SessionKey, Notice], None],
        report: Callable[[SendOutcome], None],
    ) -> None:
        self._pusher = pusher
        self._plane = plane
        self.counters = counters
        self._tell = tell
        self._report = report
        self.records: dict[TransferId, Record] = {}
        self.requests: dict[RequestId, TransferId] = {}
        self.peers: dict[SessionKey, Target] = {}
        self.moved: dict[SessionKey, float] = {}
        """When bytes were last acknowledged, for each session."""
        self._over: OrderedDict[TransferId, tuple[float, list[Send]]] = OrderedDict()
        self._tickets: dict[Ticket, tuple[TransferId, int, int]] = {}  # transfer, machine, part

    def by_request(self, request: RequestId) -> Record | None:
        """Return the record of a request that vLLM has not ended, or None."""
        transfer = self.requests.get(request)
        return None if transfer is None else self.records.get(transfer)

    def over(self, transfer: TransferId, rank: int) -> Send | None:
        """Return what is remembered of a rank's part in a transfer that is over, or that vLLM has yet to end."""
        record = self.records.get(transfer)
        sends = record.sends if record is not None else self._over.get(transfer, (0.0, []))[1]
        send = sends[min(rank, len(sends) - 1)] if sends else None
        return send if send is not None and send.phase is Phase.GONE else None

    def reading(self, requests: frozenset[RequestId]) -> bool:
        """Say whether anything of these requests is in flight."""
        records = (self.by_request(request) for request in requests)
        return any(record is not None and any(send.parts for send in record.sends) for record in records)

    def timers(self, stall_s: float, now: float) -> float:
        """Let timers run; return when the next one ends."""
        due = NEVER
        for record in list(self.records.values()):
            # One transport carries the bytes for all ranks of an engine: those for one may queue behind another's.
            moved = max((self.moved.get(send.session, 0.0) for send in record.sends if send.session), default=0.0)
            for index, send in enumerate(record.sends):
                if send.phase is Phase.GONE:
                    continue
                if now >= machine.due(send, stall_s, moved):
                    self.step(record, index, sends.Tick(stall_s, moved), now)
                due = min(due, machine.due(record.sends[index], stall_s, moved))
        return due

    def record(self, transfer: TransferId) -> Record:
        """Return the record of a transfer, a new one if nobody has spoken of it yet."""
        record = self.records.get(transfer)
        if record is None:
            _, over = self._over.pop(transfer, (0.0, []))
            record = Record(transfer, over or [sends.new(transfer, self._pusher.row_bytes)])
            record.settled = bool(over)
            self.records[transfer] = record
        return record

    def meet(self, transfer: TransferId, target: Target, now: float) -> tuple[Record, int]:
        """Return the record of a transfer, and which of its machines is a rank of D's.

        Raises:
            ProtocolError: another decode engine, of another number of ranks, spoke of this transfer before.
        """
        record = self.record(transfer)
        try:
            return record, record.meet(target)
        except ProtocolError:
            if record.over:
                self._gone(record, now)
            raise

    def receipt(self, receipt: Receipt, now: float) -> None:
        """Take the plane's word that a part has ended."""
        transfer, index, number = self._tickets.pop(receipt.ticket, (None, 0, 0))
        record = self.records.get(transfer) if transfer is not None else None
        if record is None:
            return
        self.counters.add("bytes_pushed", receipt.bytes)
        record.acknowledged.append((receipt.finished, receipt.bytes))
        record.first_at = min(record.first_at, receipt.started)
        record.last_at = max(record.last_at, receipt.finished)
        session = record.sends[index].session
        if receipt.bytes and session is not None and session in self.peers:
            self.moved[session] = now
        ended = sends.PartEnded(number, receipt.ok, receipt.drained, receipt.reason)
        self.step(record, index, ended, now)

    def step_all(self, record: Record, event: Event, now: float) -> None:
        """Feed an event of the request, which concerns every rank of D, to all its machines."""
        for index in range(len(record.sends)):
            self.step(record, index, event, now)

    def step(self, record: Record, index: int, event: Event, now: float) -> None:
        """Feed an event to a machine and do what it asks for."""
        record.sends[index], effects = machine.step(record.sends[index], event, now)
        failures: list[Event] = []
        for effect in effects:
            if isinstance(effect, sends.Submit):
                failures.extend(self._submit(record, index, effect.part))
            elif isinstance(effect, sends.Cancel):
                for ticket, (transfer, whose, number) in list(self._tickets.items()):
                    if (transfer, whose) == (record.transfer, index) and number in effect.parts:
                        self._plane.cancel(ticket)
            else:
                self._tell(effect.session, effect.notice)
        if record.sends[index].phase in (Phase.SENDING, Phase.DRAINING) and not record.started:
            record.started = True
            self.counters.add("transfers_started")
        for failure in failures:
            self.step(record, index, failure, now)
        self._spread(record, index, now)
        if record.over:
            self._gone(record, now)

    def _spread(self, record: Record, index: int, now: float) -> None:
        send = record.sends[index]
        if record.failed or send.ok or send.phase not in (Phase.DRAINING, Phase.GONE):
            return
        record.failed = True
        for other in range(len(record.sends)):
            if other != index:
                self.step(record, other, sends.Withdrawn(f"rank {index} of decode: {send.reason}"), now)

    def _submit(self, record: Record, index: int, part: Part) -> list[Event]:
        send = record.sends[index]
        assert send.session is not None
        assert send.reserve is not None
        try:
            ticket = self._pusher.push(self.peers[send.session], send.reserve, record.pages, part)
        except TidalError as error:
            return [sends.PartEnded(part.number, False, True, str(error))]
        self._tickets[ticket] = (send.transfer, index, part.number)
        logger.debug(
            "[PUSH] request %s transfer %s: layer %d, tokens %d..%d",
            record.request,
            send.transfer,
            part.layer,
            part.first,
            part.end,
        )
        return []

    def _gone(self, record: Record, now: float) -> None:
        if not record.settled:
            record.settled = True
            self._settled(record)
        if record.request is not None and not record.ended:
            return  # vLLM still computes it; it is reported when vLLM has ended it
        if self.records.pop(record.transfer, None) is not record:
            return
        self._over[record.transfer] = (now + _REMEMBER_S, [sends.buried(send) for send in record.sends])
        while self._over and (len(self._over) > _REMEMBER or next(iter(self._over.values()))[0] < now):
            self._over.popitem(last=False)
        if record.request is not None:
            del self.requests[record.request]
            self._tell_vllm(record, record.request)

    def _settled(self, record: Record) -> None:
        if record.ok:
            self.counters.add("transfers_completed")
            self.counters.add("transfer_seconds", max(0.0, record.last_at - record.first_at))
        else:
            self.counters.add("transfers_failed")
            logger.warning("transfer %s ended without its bytes: %s", record.transfer, record.reason)

    def _tell_vllm(self, record: Record, request: RequestId) -> None:
        done_at = record.done_at
        total = sum(size for _, size in record.acknowledged)
        early = sum(size for at, size in record.acknowledged if done_at is not None and at <= done_at)
        self.counters.add("bytes_landed_before_prefill_end", early)
        seconds = max(0.0, record.last_at - record.first_at) if record.acknowledged else 0.0
        self._report(SendOutcome(request, record.transfer, record.ok, record.reason, total, early, seconds))
