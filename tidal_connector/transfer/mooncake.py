# SPDX-License-Identifier: Apache-2.0
"""The transfer plane over Mooncake's TransferEngine, and the only importer of ``mooncake``.

A *home* engine is initialised at :meth:`MooncakePlane.open`; it owns our registrations and the endpoint that
peers write to. Writes go out through further engines, one for each peer (see
:mod:`tidal_connector.transfer.carrier`). Over TCP these register nothing, so a prefill node's memory stays
out of reach; RDMA needs every source registered. Ascend allows one engine for each process, so there the
home engine carries too and nothing can be abandoned; what else it demands is in
:mod:`tidal_connector.transfer.ascend`.

Destroying an engine holds the interpreter for about 0.9 s (its listener leaves ``accept`` once a second). So
engines are pooled and destroyed only at :meth:`MooncakePlane.close` and as the last resort; one that has
opened a peer's name is never used for that name again.

The metadata mode is always ``P2PHANDSHAKE``: no server, and a restarted process has a new name. There is no
authentication or encryption on these ports; the network has to isolate them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tidal_connector.address import join_address, only_ipv6
from tidal_connector.config import Protocol, TransferConfig, ascend_environment, mooncake_environment
from tidal_connector.errors import PeerLost, TransferFailed
from tidal_connector.layout import Home
from tidal_connector.log import get_logger
from tidal_connector.transfer import ascend
from tidal_connector.transfer.carrier import Carrier, CarrierSettings
from tidal_connector.transfer.engines import EnginePool
from tidal_connector.transfer.families import as_called
from tidal_connector.transfer.plane import Receipt, Ticket, TransferPlane
from tidal_connector.transfer.ranges import Ranges
from tidal_connector.transfer.runs import Run
from tidal_connector.transfer.segment import Segment, ask_segment
from tidal_connector.transfer.sockets import count_connections

_log = get_logger(__name__)

_METADATA = "P2PHANDSHAKE"  # any unknown scheme aborts the process inside Mooncake
_CODES = {
    -1: "invalid argument",
    -3: "not registered",
    -7: "overlaps a registered range",
    -200: "metadata failure",
}
_REMEMBERED_DOORS = 1024
_CLOSE_S = 3.0  # wait for writes in flight at close


class MooncakeEngine:
    """One TransferEngine that allows no call before its start, after its end, or in a forked child.

    Raises:
        TransferFailed: Mooncake cannot be loaded or initialised.
    """

    def __init__(self, host: str, protocol: Protocol, device: str, *, ipv6: bool = False) -> None:
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise TransferFailed(
                f"mooncake cannot be imported: {error}; needed: mooncake-transfer-engine-*, libibverbs1"
            ) from error
        self._engine: Any = TransferEngine()
        self._pid = os.getpid()
        self._ipv6 = ipv6
        self._called: dict[str, str] = {}
        code = self._engine.initialize(host, _METADATA, str(protocol), device)
        if code != 0:
            self._engine = None
            raise TransferFailed(
                f"Mooncake failed on {host!r} with protocol {protocol}, device {device!r} (code {code}): "
                "check the address, the device, and two free ports in MC_MIN_RPC_PORT..MC_MAX_RPC_PORT"
            )
        self.endpoint = join_address(host, self._engine.get_rpc_port())

    def register(self, address: int, length: int, location: str) -> None:
        """Register a range.

        Raises:
            TransferFailed: Mooncake refuses it.
        """
        self.register_many([address], [length], location)

    def register_many(self, addresses: Sequence[int], lengths: Sequence[int], location: str) -> None:
        """Register ranges of one location, all or none.

        Raises:
            TransferFailed: Mooncake refuses them.
        """
        code = self._live().batch_register_memory(list(addresses), list(lengths), location)
        if code != 0:
            text = _CODES.get(code, "unknown")
            what = f"{lengths[0]} bytes at {addresses[0]:#x}" if len(lengths) == 1 else f"{len(lengths)} ranges"
            raise TransferFailed(f"register {what} as {location!r}: {text} (code {code})")

    def submit_write(self, peer: str, source: int, destination: int, length: int) -> int:
        """Start one write; return its id, 0 if refused. May block to open the peer."""
        live = self._live()
        if peer not in self._called:
            try:
                self._called[peer] = as_called(peer, ipv6=self._ipv6)
            except PeerLost:  # its name has gone since the carrier asked it
                return 0
        return int(live.transfer_submit_write(self._called[peer], source, destination, length))

    def check(self, write: int) -> int:
        """Return 1 when done, -1 when failed, else 0; Mooncake's -2 (time-out) is not terminal."""
        state = int(self._live().transfer_check_status(write))
        return 0 if state == -2 else state

    def close(self) -> None:
        """Destroy the engine, which holds the interpreter for up to a second. Idempotent."""
        self._engine = None

    def _live(self) -> Any:
        if self._engine is None:
            raise TransferFailed("the Mooncake engine is closed")
        if os.getpid() != self._pid:
            raise TransferFailed("a Mooncake engine cannot be used in a forked child; start it there")
        return self._engine


class MooncakePlane(TransferPlane):
    """Mooncake as a transfer plane.

    Args:
        config: protocol, device, window, descriptor size.
        host: address under which peers reach this process.
        on_receipt: called from a carrier thread whenever :meth:`poll` has something new.
        stall_s: seconds after which a peer that moves nothing has failed.
        quarantine_s: seconds for which pages stay out of use after a transfer that did not end well.
        npu: the NPUs, for the protocol ``ascend``.
        abandon_s: seconds without an end after which a peer's engine is destroyed; None: three times
            ``stall_s``, at least 30.
    """

    name = "mooncake"

    def __init__(
        self,
        config: TransferConfig,
        host: str,
        on_receipt: Callable[[], None],
        *,
        stall_s: float,
        quarantine_s: float = 30.0,
        npu: ascend.Npu | None = None,
        abandon_s: float | None = None,
    ) -> None:
        self._config = config
        self._host = host.strip("[]")
        self._ipv6 = False
        self._on_receipt = on_receipt
        self._stall_s = stall_s
        self._quarantine_s = quarantine_s
        self._npu = npu
        self._ascend: ascend.Regions | None = None
        self._settings = CarrierSettings(
            protocol=str(config.protocol),
            window=config.window,
            descriptor_bytes=config.descriptor_bytes,
            ask_s=stall_s,
            abandon_s=max(30.0, 3 * stall_s) if abandon_s is None else abandon_s,
        )
        self._lock = threading.Lock()
        self._home: MooncakeEngine | None = None
        self._pool: EnginePool | None = None
        self._self: Segment | None = None
        self._sources = Ranges()
        self._registered: list[tuple[int, int, str]] = []
        self._carriers: dict[str, Carrier] = {}
        self._retired: list[Carrier] = []
        self._receipts: list[Receipt] = []
        self._next_ticket = 1
        self._doors: dict[str, MooncakeEngine] = {}
        self._shutting: dict[str, threading.Thread] = {}
        self._shut: OrderedDict[str, None] = OrderedDict()

    def open(self) -> None:
        """Initialise the home engine and check that it runs the transport that was asked for."""
        enter = self._prepare_ascend() if self._config.protocol is Protocol.ASCEND else None
        # A third of the stall: a descriptor waits for its lane, its bytes and its acknowledgement in turn.
        self._ipv6 = mooncake_environment(
            force_tcp=self._config.protocol is Protocol.TCP,
            progress_timeout_s=self._stall_s / 3,
            wait_timeout_s=max(60.0, 3 * self._stall_s),
            ipv6=only_ipv6(self._host),
        )
        home = self._make()
        try:
            self._self = ask_segment(home.endpoint, self._stall_s)
        except PeerLost as error:
            home.close()
            raise TransferFailed(
                f"our own engine is silent: does transfer.host = {self._host!r} name this machine? {error}"
            ) from None
        if self._self.protocol != self._settings.protocol:
            home.close()
            raise TransferFailed(
                f"transfer.protocol = {self._settings.protocol!r}, but {self._self.protocol!r} runs here: "
                "the device was not found; name it in transfer.device or choose the protocol that runs"
            )
        self._home = home
        self._pool = EnginePool(self._make_sender, home, enter) if enter else EnginePool(self._make_sender, None)

    def _prepare_ascend(self) -> Callable[[], None]:
        """Check what the transport demands, and return what each thread has to do that uses its engine."""
        found = ascend_environment(self._stall_s)
        device = ascend.prepare(self._host, self._npu, found, self._quarantine_s)
        npu = self._npu
        assert npu is not None
        self._ascend = ascend.Regions(device)
        note = ascend.link_note(found)
        if note:
            _log.warning("transfer.protocol = ascend: %s", note)
        return lambda: npu.enter(device)

    def close(self) -> None:
        """Let writes in flight end for a few seconds, then destroy all engines."""
        with self._lock:
            home, pool, self._home, self._pool = self._home, self._pool, None, None
            carriers = [*self._carriers.values(), *self._retired]
            self._carriers, self._retired = {}, []
            doors, self._doors = list(self._doors.values()), {}
            shutting = list(self._shutting.values())
        for carrier in carriers:
            carrier.retire("the plane is closed")
        for door in doors:
            door.close()
        for thread in shutting:
            thread.join(_CLOSE_S)
        end = time.monotonic() + _CLOSE_S
        stuck = [carrier.peer for carrier in carriers if not carrier.join(max(0.0, end - time.monotonic()))]
        if stuck:
            _log.warning("closing with writes to %s in flight", ", ".join(stuck))
        if pool is not None:
            pool.close()
        if home is not None:
            home.close()

    def register(self, address: int, length: int, home: Home, *, target: bool = True) -> None:
        """Make a range a source and, by default, a target; over Ascend, once :meth:`endpoint` is asked for."""
        engine = self._opened()
        needed = target or self._config.protocol is not Protocol.TCP
        if self._ascend is not None:
            self._ascend.add(address, length, home)
        try:
            self._sources.add(address, length)
        except ValueError as error:
            raise TransferFailed(f"register: {error}") from None
        if needed and self._ascend is None:
            engine.register(address, length, "*")
            self._registered.append((address, length, "*"))

    def endpoint(self) -> str:
        """Return ``host:rpc_port`` of the home engine; nobody can call it before."""
        home = self._opened()
        regions = self._ascend.seal() if self._ascend is not None else []
        for location, ranges in ascend.locations(regions).items():
            home.register_many([each.address for each in ranges], [each.length for each in ranges], location)
        return home.endpoint

    def open_door(self) -> str:
        """Return the endpoint of an engine for one peer: over TCP, destroying it is the only fence there is.

        A write that a frozen peer had under way cannot be recalled, and goes on when it thaws; a connection that is cut
        is made anew. A door that is gone takes nothing.
        """
        self._opened()
        if self._config.protocol is not Protocol.TCP:
            return self.endpoint()
        door = self._make()
        for address, length, location in self._registered:
            door.register(address, length, location)
        with self._lock:
            self._doors[door.endpoint] = door
        return door.endpoint

    def shut_door(self, endpoint: str) -> None:
        """Destroy a door's engine on a thread of its own; ``on_receipt`` is called when that is done."""
        with self._lock:
            door = self._doors.pop(endpoint, None)
            if door is None:
                return
            thread = threading.Thread(target=self._destroy, args=(endpoint, door), name="tidal-door", daemon=True)
            self._shutting[endpoint] = thread
        thread.start()

    def _destroy(self, endpoint: str, door: MooncakeEngine) -> None:
        door.close()
        with self._lock:
            del self._shutting[endpoint]
            self._shut[endpoint] = None
            if len(self._shut) > _REMEMBERED_DOORS:
                self._shut.popitem(last=False)
        self._on_receipt()

    def door_shut(self, endpoint: str) -> bool:
        """Say whether a door's engine is gone."""
        with self._lock:
            return endpoint in self._shut

    def submit(self, peer: str, runs: Sequence[Run]) -> Ticket:
        """Queue a batch for a peer; its carrier is started at the first one."""
        for run in runs:
            if not self._sources.covers(run.source, run.length):
                raise TransferFailed(f"source: {run.length} bytes at {run.source:#x} lie in no single registered range")
        self._opened()
        with self._lock:
            if self._pool is None:
                raise TransferFailed("the Mooncake plane is not open")
            ticket = Ticket(self._next_ticket)
            self._next_ticket += 1
            carrier = self._carriers.get(peer)
            if carrier is None:
                carrier = Carrier(peer, self._settings, self._pool, self._ask, self._take)
                self._carriers[peer] = carrier
                carrier.start()
            carrier.submit(ticket, runs)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Feed nothing more of a ticket."""
        with self._lock:
            carriers = [*self._carriers.values(), *self._retired]
        for carrier in carriers:
            carrier.cancel(ticket)

    def poll(self) -> list[Receipt]:
        """Return the receipts since the last call."""
        with self._lock:
            receipts, self._receipts = self._receipts, []
            return receipts

    def forget_peer(self, peer: str) -> None:
        """Let the peer's carrier end; a later submit starts afresh."""
        with self._lock:
            self._retired = [carrier for carrier in self._retired if carrier.alive]
            carrier = self._carriers.pop(peer, None)
            if carrier is not None:
                self._retired.append(carrier)
                carrier.retire(f"peer {peer} was forgotten")

    def peer_connections(self, host: str, others: Iterable[str] = ()) -> int | None:
        """Count live connections to the home engine's data port; None unless over TCP, or once there are doors."""
        with self._lock:
            if self._doors or self._shutting or self._shut:
                return None
        port = self._self.tcp_data_port if self._self else 0
        return count_connections(port, host, others=others) if port else None

    def _make(self) -> MooncakeEngine:
        return MooncakeEngine(self._host, self._config.protocol, self._config.device, ipv6=self._ipv6)

    def _ask(self, peer: str, deadline_s: float) -> Segment:
        as_called(peer, ipv6=self._ipv6)  # says it if our sockets cannot reach the peer; the question below could
        return ask_segment(peer, deadline_s)

    def _make_sender(self) -> MooncakeEngine:
        engine = self._make()
        if self._config.protocol is not Protocol.TCP:
            for address, length, location in self._registered:
                engine.register(address, length, location)
        return engine

    def _opened(self) -> MooncakeEngine:
        if self._home is None:
            raise TransferFailed("the Mooncake plane is not open")
        self._home._live()
        return self._home

    def _take(self, receipts: list[Receipt]) -> None:
        with self._lock:
            self._receipts.extend(receipts)
        self._on_receipt()
