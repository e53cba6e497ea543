# SPDX-License-Identifier: Apache-2.0
"""One thread that carries the tickets of one peer through an engine of its own.

Opening a silent peer blocks an engine, with everybody else on it, for a minute; so each peer has its own
engine and its own thread, and a stuck one delays nobody. The thread asks the peer for its segment before the
first write and again after a failure, keeps the window full, polls each id until it is terminal, and forgets
it before anything else (ids are raw pointers inside Mooncake). A failure stops the feeding of its ticket;
the receipt waits for the last id.

The last resort is time: if nothing has ended for ``abandon_s`` seconds although writes are in flight, the
    engine is
destroyed. That is the only thing that cancels, and only it lets the sources go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from tidal_connector.errors import PeerLost, TransferFailed
from tidal_connector.log import get_logger
from tidal_connector.transfer.feed import Descriptor, Feed
from tidal_connector.transfer.plane import Receipt, Ticket
from tidal_connector.transfer.ranges import Ranges
from tidal_connector.transfer.runs import Run
from tidal_connector.transfer.segment import Segment

_log = get_logger(__name__)

POLL_S = 0.0003
"""Sleep between two polls that found nothing; spinning halves the throughput on two cores."""


class Engine(Protocol):
    """What a carrier needs of a transport."""

    def submit_write(self, peer: str, source: int, destination: int, length: int) -> int:
        """Start one write; return its id, 0 if it was refused. May block while the peer is opened."""

    def check(self, write: int) -> int:
        """Return 1 when done, 0 while running, -1 when failed; not to be asked again after 1 or -1."""

    def close(self) -> None:
        """Destroy it: nothing is read or written any more when this returns. Idempotent."""


class Engines(Protocol):
    """Where carriers take engines from and give them back to; thread-safe."""

    def take(self, peer: str) -> Engine:
        """Return an initialised engine that has never opened this peer.

        Raises:
            TransferFailed: none can be made.
        """

    def give(self, engine: Engine) -> None:
        """Take back an engine with nothing in flight."""

    def drop(self, engine: Engine) -> bool:
        """Destroy an engine; False where it serves other peers too and must live."""


class CarrierSettings(msgspec.Struct, frozen=True):
    """How one peer is served.

    Attributes:
        protocol: transport that the peer has to run.
        window: descriptors in flight.
        descriptor_bytes: largest descriptor.
        ask_s: seconds for the peer to describe itself.
        abandon_s: seconds without an end after which the engine is destroyed.
    """

    protocol: str
    window: int
    descriptor_bytes: int
    ask_s: float
    abandon_s: float


class Carrier:
    """Carries one peer's tickets; its thread lives from :meth:`start` to the end of :meth:`retire` or
    :meth:`stop`."""

    def __init__(
        self,
        peer: str,
        settings: CarrierSettings,
        engines: Engines,
        ask: Callable[[str, float], Segment],
        deliver: Callable[[list[Receipt]], None],
    ) -> None:
        self.peer = peer
        self._settings = settings
        self._engines = engines
        self._ask = ask
        self._deliver = deliver
        self._feed = Feed(settings.window, settings.descriptor_bytes)
        self._wake = threading.Condition()
        self._ending = ""  # why; set once
        self._engine: Engine | None = None
        self._segment: Segment | None = None
        self._targets = Ranges()
        self._ids: dict[int, int] = {}
        self._doubtful = True  # ask the peer before the next write
        self._progress = 0.0
        self._thread = threading.Thread(target=self._run, name=f"tidal-carry-{peer}", daemon=True)

    @property
    def alive(self) -> bool:
        """The thread is running."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, ticket: Ticket, runs: Sequence[Run]) -> None:
        """Queue a ticket; any thread."""
        with self._wake:
            self._feed.add(ticket, runs, time.monotonic())
            if self._ending:
                self._feed.stop(ticket, self._ending, time.monotonic())
            self._wake.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Feed nothing more of a ticket; any thread."""
        with self._wake:
            self._feed.stop(ticket, "cancelled", time.monotonic())
            self._wake.notify()

    def retire(self, reason: str) -> None:
        """Let what is in flight end, give the engine back, end the thread. Does not wait."""
        with self._wake:
            self._ending = self._ending or reason
            self._feed.stop_all(reason, time.monotonic())
            self._wake.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; False if it is still blocked in its engine."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
        except TransferFailed as error:  # the engine was closed under us: nothing is read any more, nobody waits
            _log.info("carrier of peer %s ends: %s", self.peer, error)

    def _serve(self) -> None:
        while True:
            with self._wake:
                while self._feed.idle and not self._ending:
                    self._wake.wait()
                receipts = self._feed.take_finished()
                over = bool(self._ending) and self._feed.idle
                pending = self._feed.may_feed
            if receipts:
                self._deliver(receipts)
            if over:
                break
            if pending and (not self._doubtful or (not self._ids and self._prepare())):
                self._fill()
            if not self._reap() and self._ids:
                self._abandon_if_stuck()
                time.sleep(POLL_S)
        if self._engine is not None:
            self._engines.give(self._engine)

    def _prepare(self) -> bool:
        """Ask the peer, and take an engine if there is none or the peer is not what it was."""
        try:
            segment = self._ask(self.peer, self._settings.ask_s)
            if segment.protocol != self._settings.protocol:
                raise PeerLost(
                    f"peer {self.peer} runs transport {segment.protocol!r}, expected "
                    f"{self._settings.protocol!r}: check transfer.protocol and transfer.device on both sides"
                )
            if self._engine is not None and segment != self._segment:
                self._engines.give(self._engine)  # restarted under the same name: never revive a cached segment
                self._engine = None
            if self._engine is None:
                self._engine = self._engines.take(self.peer)
            self._targets = Ranges()
            for buffer in segment.buffers:
                self._targets.add(buffer.addr, buffer.length)
        except (PeerLost, TransferFailed, ValueError) as error:
            _log.warning("%s", error)
            with self._wake:
                self._feed.stop_all(str(error), time.monotonic())
            return False
        self._segment = segment
        self._doubtful = False
        return True

    def _fill(self) -> None:
        engine = self._engine
        assert engine is not None
        while not self._doubtful:
            with self._wake:
                sent = self._feed.next(time.monotonic())
            if sent is None:
                return
            if not self._ids:
                self._progress = time.monotonic()
            run = sent.run
            if not self._targets.covers(run.destination, run.length):
                where = f"{run.length} bytes at {run.destination:#x}"
                self._doubtful = True  # it may have registered more since we asked
                reason = f"{where} lie in no single registered range of peer {self.peer}"
                self._end(sent.key, reason, sent=False)
                continue
            write = engine.submit_write(self.peer, run.source, run.destination, run.length)
            if write == 0:
                self._fail(sent, "refused")
            else:
                self._ids[sent.key] = write

    def _reap(self) -> bool:
        """Poll every id once; say whether one ended."""
        engine = self._engine
        ended = False
        for key, write in list(self._ids.items()):
            assert engine is not None
            state = engine.check(write)
            if state == 0:
                continue
            del self._ids[key]
            ended = True
            if state == 1:
                self._end(key, "")
            else:
                self._doubtful = True
                self._end(key, f"a write to peer {self.peer} failed; it may have landed in part, or land later")
        if ended:
            self._progress = time.monotonic()
        return ended

    def _fail(self, sent: Descriptor, what: str) -> None:
        self._doubtful = True
        self._end(sent.key, f"a write of {sent.run.length} bytes to peer {self.peer} was {what} by the transport")

    def _end(self, key: int, reason: str, *, sent: bool = True) -> None:
        with self._wake:
            self._feed.ended(key, reason, time.monotonic(), sent=sent)

    def _abandon_if_stuck(self) -> None:
        if time.monotonic() - self._progress < self._settings.abandon_s or self._engine is None:
            return
        reason = f"peer {self.peer}: no write ended for {self._settings.abandon_s:g} s; its engine was destroyed"
        if not self._engines.drop(self._engine):
            return
        _log.error("%s", reason)
        self._engine = None
        self._doubtful = True
        self._ids.clear()
        with self._wake:
            self._feed.end_all(reason, time.monotonic())
