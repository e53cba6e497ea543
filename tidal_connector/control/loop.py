# SPDX-License-Identifier: Apache-2.0
"""The control thread of one worker: it waits for frames, bells and clocks, and gives each party its turn.

vLLM's own threads call nothing here but ``wake`` and, at start and end, ``__enter__`` and ``close``. Leases therefore
hold whether the engine computes, idles or compiles.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec

from tidal_connector.config import ControlConfig
from tidal_connector.control.channel import Channel
from tidal_connector.control.handshake import UNKNOWN, Capacity, Local
from tidal_connector.control.messages import Identity
from tidal_connector.control.party import NEVER, Party, survive
from tidal_connector.control.switchboard import Switchboard
from tidal_connector.control.wake import Wake
from tidal_connector.layout import KVLayout, Placement
from tidal_connector.log import get_logger
from tidal_connector.metrics import Counters

logger = get_logger(__name__)

_LONGEST_SLEEP_S = 1.0
_BROKEN_PAUSE_S = 0.1  # after a turn that broke as a whole, so that a lasting fault does not spin
_GRACE_S = 2.0
_LINGER_S = 0.2


def _alone(address: str) -> tuple[str, ...]:
    """Meet nobody: the engine is one rank."""
    return (address,)


class ControlLoop:
    """Owns the channel and the thread; a context manager.

    Args:
        identity: engine, incarnation, rank and size of this worker.
        settings: addresses and timers.
        layout: what our KV is.
        placement: where it is.
        plane_endpoint: what peers' transfer planes need to reach ours.
        counters: what is counted.
        sender: the prefill room's party, for workers that send.
        receiver: the decode room's party, for workers that receive.
        capacity: how much this worker serves at once, for whoever inquires.
        meet: turns this worker's control address into those of all ranks of its engine; called once, before anybody
            can be answered.

    Raises:
        LayoutMismatch: the placement does not fit the layout.
    """

    def __init__(
        self,
        identity: Identity,
        settings: ControlConfig,
        layout: KVLayout,
        placement: Placement,
        plane_endpoint: str,
        counters: Counters,
        *,
        sender: Party[Any] | None = None,
        receiver: Party[Any] | None = None,
        capacity: Capacity = UNKNOWN,
        meet: Callable[[str], tuple[str, ...]] = _alone,
    ) -> None:
        placement.check(layout)
        self._local = Local(identity, layout, placement, plane_endpoint, settings.lease_s, capacity)
        self._meet = meet
        self._settings = settings
        self._counters = counters
        self._sender = sender
        self._receiver = receiver
        self._parties = [party for party in (sender, receiver) if party is not None]
        self._bell = Wake()
        self._stop = threading.Event()
        self._reason = ""
        self._channel: Channel | None = None
        self._thread: threading.Thread | None = None

    @property
    def wake(self) -> Callable[[], None]:
        """What a transfer plane calls when it has receipts; any thread, at any time, also after ``close``."""
        return self._bell.ring

    @property
    def address(self) -> str:
        """The ``host:port`` that peers call, with the port that was really bound.

        Raises:
            RuntimeError: the loop was not entered yet.
        """
        if self._channel is None:
            raise RuntimeError("the control loop listens only once it was entered")
        return self._channel.address

    def __enter__(self) -> ControlLoop:
        """Listen and start the thread.

        Raises:
            ConfigError: the address cannot be bound or advertised.
        """
        channel = self._channel = Channel(self._settings.bind, self._settings.advertise)
        channel.watch(self._bell.fd)
        try:
            local = msgspec.structs.replace(self._local, siblings=self._meet(channel.address))
        except BaseException:
            channel.close()
            raise
        board = Switchboard(local, channel, self._counters, self._sender, self._receiver)
        for party in self._parties:
            party.attach(board, self._bell.ring)
        self._thread = threading.Thread(target=self._run, args=(channel, board), name="tidal-control", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, reason: str = "the engine stops") -> None:
        """End every transfer, say goodbye and stop the thread, within about two seconds. Idempotent."""
        self._reason = reason
        self._stop.set()
        self._bell.ring()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        self._bell.close()

    def _run(self, channel: Channel, board: Switchboard) -> None:
        try:
            while not self._stop.is_set():
                self._once(channel, board)
            until = time.monotonic() + _GRACE_S
            for party in self._parties:
                survive("stopping", lambda party=party: party.stopping(self._reason, time.monotonic()))  # type: ignore[misc]
            while time.monotonic() < until and any(party.busy() for party in self._parties):
                self._once(channel, board, 0.05)
            self._once(channel, board, 0.0)
            board.bye(self._reason)
        finally:
            channel.close(_LINGER_S)

    def _once(self, channel: Channel, board: Switchboard, longest_s: float = _LONGEST_SLEEP_S) -> None:
        broken = survive("a turn of the control loop", lambda: self._turn(channel, board, longest_s))
        if broken:
            time.sleep(_BROKEN_PAUSE_S)

    def _turn(self, channel: Channel, board: Switchboard, longest_s: float) -> None:
        self._bell.clear()
        for route, frame in channel.receive():
            board.arrived(route, frame, time.monotonic())
        due = NEVER
        for party in self._parties:
            more = party.take_posted(time.monotonic())
            due = min(due, party.turn(time.monotonic()), 0.0 if more else NEVER)
        due = min(due, board.tick(time.monotonic()))
        self._count(board)
        for party in self._parties:
            party.publish()
        channel.wait(min(max(0.0, due - time.monotonic()), longest_s))

    def _count(self, board: Switchboard) -> None:
        totals: dict[str, float] = {"peers": board.peers}
        for party in self._parties:
            for name, value in party.gauges().items():
                totals[name] = totals.get(name, 0) + value
        for name, value in totals.items():
            self._counters.set(name, value)
