# SPDX-License-Identifier: Apache-2.0
"""The half of an engine stand-in that other engines see: the real rooms and the real control channel, over no bytes.

A stand-in's hand-overs take the protocol's whole way: greeting with layout fingerprint, reservation, prompt digest,
landing, aborts, leases. Only the transfer plane is hollow: it acknowledges every run at once and touches no memory. So
a wrong engine, another layout, another transfer or another prompt fail here as they fail between vLLM engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from tidal_connector.address import join_address
from tidal_connector.cluster.standin_answers import digest
from tidal_connector.config import ControlConfig
from tidal_connector.control.handshake import Capacity
from tidal_connector.control.loop import ControlLoop
from tidal_connector.control.messages import Identity
from tidal_connector.decode.receiver import Receiver
from tidal_connector.errors import ConfigError
from tidal_connector.ids import (
    DevicePageId,
    EngineId,
    HostPageId,
    Incarnation,
    RequestId,
    Role,
    TransferId,
    new_incarnation,
    new_transfer_id,
)
from tidal_connector.layout import Home, KVLayout, Placement, Region, RegionKind, RegionSpec
from tidal_connector.metrics import Counters
from tidal_connector.prefill.sender import Sender
from tidal_connector.transfer.plane import Receipt, Ticket, TransferPlane
from tidal_connector.transfer.runs import Run

PAGE_TOKENS = 64
PAGES = 4096
_LAYERS = 2
_LATENT_BYTES, _INDEX_BYTES, _ROPE_BYTES = 1152, 132, 128
_WAIT_S = 0.5


def layout(tag: str) -> KVLayout:
    """Return the layout of a stand-in; stand-ins fit one another if their tags are equal."""
    regions: list[RegionSpec] = []
    for layer in range(_LAYERS):
        regions.append(RegionSpec(RegionKind.LATENT, layer, _LATENT_BYTES, "bfloat16", "bfloat16", _ROPE_BYTES))
        regions.append(RegionSpec(RegionKind.INDEX, layer, _INDEX_BYTES, "uint8"))
    return KVLayout("standin", tuple(regions), 2048, tuple(range(_LAYERS)), "none", tag, "auto")


class HollowPlane(TransferPlane):
    """A transfer plane that acknowledges every run at once and moves nothing.

    Args:
        endpoint: what peers are told.
        on_receipt: called whenever :meth:`poll` has something new.
    """

    name = "hollow"

    def __init__(self, endpoint: str, on_receipt: Callable[[], None]) -> None:
        self._endpoint = endpoint
        self._on_receipt = on_receipt
        self._lock = threading.Lock()
        self._receipts: list[Receipt] = []
        self._tickets = 0

    def open(self) -> None:
        """Nothing has to be started."""

    def close(self) -> None:
        """Nothing has to be stopped."""

    def register(self, address: int, length: int, home: Home, *, target: bool = True) -> None:
        """Accept any memory: none is touched."""

    def endpoint(self) -> str:
        """Return the address that peers are told."""
        return self._endpoint

    def submit(self, peer: str, runs: Sequence[Run]) -> Ticket:
        """Acknowledge a batch."""
        now = time.monotonic()
        with self._lock:
            self._tickets += 1
            ticket = Ticket(self._tickets)
            self._receipts.append(Receipt(ticket, True, sum(run.length for run in runs), now, now, drained=True))
        self._on_receipt()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Do nothing: every ticket has ended."""

    def poll(self) -> list[Receipt]:
        """Return the receipts since the last call."""
        with self._lock:
            found, self._receipts = self._receipts, []
            return found

    def forget_peer(self, peer: str) -> None:
        """Do nothing: nothing is cached."""

    def peer_connections(self, host: str, others: Iterable[str] = ()) -> int | None:
        """Return 0: no write can be on its way."""
        return 0


class Sent(msgspec.Struct, frozen=True):
    """What a prefill hand-over needs later: its request here, its transfer and its prompt's length."""

    request: RequestId
    transfer: TransferId
    tokens: int


class Rooms:
    """Sender, receiver and control channel of one stand-in; a context manager.

    Args:
        engine: the operator's name.
        role: prefill stand-ins only send, decode ones only receive, ``both`` do either.
        tag: names the layout.
        settings: addresses and timers of the control channel.
        capacity: what the stand-in claims to serve at once.
        counters: what is counted.

    Attributes:
        incarnation: of this life.
        hold_s: seconds for which finished pages wait to be asked for.
    """

    def __init__(
        self, engine: EngineId, role: Role, tag: str, settings: ControlConfig, capacity: Capacity, counters: Counters
    ) -> None:
        self.incarnation: Incarnation = new_incarnation()
        self._counters = counters
        kv = layout(tag)
        sends, receives = role is not Role.DECODE, role is not Role.PREFILL
        place = _placement(kv, Home.HOST if receives else Home.DEVICE)
        plane = HollowPlane(join_address(settings.advertised()[0], 1), self._woken)
        self._sender = Sender(kv, place, plane, counters, settings) if sends else None
        quarantine_s = settings.quarantine_s or 1.0
        self._receiver = Receiver(kv, place, plane, counters, settings, quarantine_s) if receives else None
        self._loop = ControlLoop(
            Identity(engine, self.incarnation),
            settings,
            kv,
            place,
            plane.endpoint(),
            counters,
            sender=self._sender,
            receiver=self._receiver,
            capacity=capacity,
        )
        self.hold_s = settings.hold_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._arrivals: dict[RequestId, tuple[asyncio.AbstractEventLoop, asyncio.Future[str]]] = {}
        self._threads = [
            threading.Thread(target=work, name=f"standin-{name}", daemon=True)
            for name, work in (("sent", self._drop_sent), ("arrived", self._tell_arrived))
        ]

    @property
    def control(self) -> str:
        """The control address that peers are told, with the port that was really bound."""
        return self._loop.address

    def __enter__(self) -> Self:
        self._loop.__enter__()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.close()
        self._stop.set()
        for thread in self._threads:
            thread.join()

    # --- prefill

    def begin(self, request: RequestId, transfer: TransferId | None, tokens: Sequence[int]) -> Sent:
        """Take a prefill request in; without a transfer (sequential protocol) make one, and hold its pages."""
        assert self._sender is not None  # the leg was checked against the role
        sent = Sent(request, transfer or new_transfer_id(), len(tokens))
        self._sender.open(request, sent.transfer, None, digest(tokens))
        self._sender.pages(request, [DevicePageId(page) for page in _pages(len(tokens))])
        return sent

    def complete(self, sent: Sent) -> None:
        """The prompt is computed: every row may go."""
        assert self._sender is not None
        self._sender.ready(sent.request, None, 0, sent.tokens)
        self._sender.prefill_done(sent.request, time.monotonic())
        self._sender.finish(sent.request, sent.tokens)

    def abandon(self, sent: Sent, reason: str) -> None:
        """The client left before the prompt was computed."""
        assert self._sender is not None
        self._sender.abort(sent.request, reason)

    # --- decode

    async def receive(
        self, request: RequestId, transfer: TransferId, engine: EngineId, control: str, tokens: Sequence[int]
    ) -> str:
        """Ask the prefill engine for a prompt's KV and wait; return why it did not arrive, or an empty text."""
        receiver = self._receiver
        assert receiver is not None
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        with self._lock:
            self._arrivals[request] = (loop, future)
        end = len(tokens) - 1  # the last token is computed here, as vLLM does it
        pages = _pages(end)
        receiver.reserve(
            request,
            transfer,
            engine,
            control,
            0,
            end,
            [HostPageId(page) for page in pages],
            [DevicePageId(page) for page in pages],
            digest(tokens),
        )
        try:
            return await future
        except asyncio.CancelledError:
            receiver.abort(request, "the client left")
            raise

    # --- their threads

    def _woken(self) -> None:
        self._loop.wake()

    def _drop_sent(self) -> None:
        while self._sender is not None and not self._stop.is_set():
            if self._sender.wait(_WAIT_S):
                self._sender.outcomes()  # pages of a stand-in belong to nobody

    def _tell_arrived(self) -> None:
        while self._receiver is not None and not self._stop.is_set():
            if not self._receiver.wait(_WAIT_S):
                continue
            for outcome in self._receiver.outcomes():
                with self._lock:
                    loop, future = self._arrivals.pop(outcome.request)
                with contextlib.suppress(RuntimeError):  # the event loop has closed
                    loop.call_soon_threadsafe(_settle, future, "" if outcome.ok else outcome.reason)


def settings(bind: str, advertise: str | None = None, lease_s: float = 3.0) -> ControlConfig:
    """Return a control channel's settings with timers short enough that a soak sees their ends.

    Raises:
        ConfigError: the lease is not positive.
    """
    if lease_s <= 0:
        raise ConfigError(f"--lease-s {lease_s}: expected more than 0")
    return ControlConfig(
        bind=bind,
        advertise=advertise,
        lease_s=lease_s,
        accept_s=4 * lease_s,
        park_s=10 * lease_s,
        hold_s=10 * lease_s,
        stall_s=3 * lease_s,
        quarantine_s=lease_s / 3,
    )


def _settle(future: asyncio.Future[str], reason: str) -> None:
    if not future.done():
        future.set_result(reason)


def _pages(tokens: int) -> range:
    return range(-(-tokens // PAGE_TOKENS))


def _placement(kv: KVLayout, latents: Home) -> Placement:
    base, regions = 1 << 30, []
    for spec in kv.regions:
        home = latents if spec.kind is RegionKind.LATENT else Home.DEVICE
        stride = PAGE_TOKENS * spec.row_bytes
        regions.append(Region(spec.kind, spec.layer, spec.row_bytes, home, base, stride, PAGE_TOKENS, PAGES))
        base += PAGES * stride
    return Placement(tuple(regions))
