# SPDX-License-Identifier: Apache-2.0
"""A transfer plane within one process: memory copies, with the faults of a network on demand.

It keeps every promise of :class:`~tidal_connector.transfer.plane.TransferPlane` and ships with the product,
so that whole hand-overs run in a test in milliseconds. One carrier thread per plane does the copies. A
:class:`LoopbackFabric` joins planes and holds the knobs.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from tidal_connector.errors import TransferFailed
from tidal_connector.layout import Home
from tidal_connector.transfer.feed import Descriptor, Feed
from tidal_connector.transfer.plane import Receipt, Ticket, TransferPlane
from tidal_connector.transfer.ranges import Ranges
from tidal_connector.transfer.runs import Run


class LoopbackFabric:
    """The network of loopback planes, and its faults.

    Attributes:
        delay_s: seconds that every descriptor takes.
        fail_after: descriptors that still succeed, over all planes; those after it fail. None: all succeed.
        late: a failing descriptor leaves its bytes, as they were when its turn came, to be written by
            :meth:`land_late`, like bytes in a kernel's socket buffer.
        copied: descriptors that have been copied so far.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.fail_after: int | None = None
        self.late = False
        self.copied = 0
        self.lock = threading.Condition()
        self._planes: dict[str, LoopbackPlane] = {}
        self._dropped: set[str] = set()
        self._held = False
        self._late_writes: list[tuple[int, bytes]] = []
        self._made = 0

    def hold(self) -> None:
        """From now on descriptors stay in flight until :meth:`release`."""
        with self.lock:
            self._held = True

    def release(self) -> None:
        """Let descriptors end again."""
        with self.lock:
            self._held = False
            self.lock.notify_all()

    def drop(self, endpoint: str) -> None:
        """Make a peer unreachable: descriptors to it fail."""
        with self.lock:
            self._dropped.add(endpoint)
            self.lock.notify_all()

    def land_late(self) -> int:
        """Write what failed descriptors left behind; return the bytes."""
        with self.lock:
            writes, self._late_writes = self._late_writes, []
        for destination, body in writes:
            ctypes.memmove(destination, body, len(body))
        return sum(len(body) for _, body in writes)

    def attach(self, plane: LoopbackPlane) -> str:
        """Join a plane and return its endpoint."""
        with self.lock:
            self._made += 1
            endpoint = f"loopback:{self._made}"
            self._planes[endpoint] = plane
            return endpoint

    def detach(self, endpoint: str) -> None:
        """Take a plane out; descriptors to it fail."""
        with self.lock:
            self._planes.pop(endpoint, None)

    def carry(self, peer: str, run: Run, closing: Callable[[], bool]) -> str:
        """Move one descriptor and return why it failed, or an empty text. Blocks while held."""
        snapshot = ctypes.string_at(run.source, run.length) if self.late else b""
        if self.delay_s:
            time.sleep(self.delay_s)
        with self.lock:
            self.lock.wait_for(lambda: not self._held or closing())
            if closing():
                return "the plane is closed"
            reason = self._refusal(peer, run)
            if reason:
                if self.late:
                    self._late_writes.append((run.destination, snapshot))
                return reason
            self.copied += 1
            ctypes.memmove(run.destination, run.source, run.length)
        return ""

    def _refusal(self, peer: str, run: Run) -> str:
        target = self._planes.get(peer)
        if target is None or peer in self._dropped:
            return f"peer {peer} cannot be reached"
        if not target.accepts(run.destination, run.length):
            return f"{run.length} bytes at {run.destination:#x} lie in no single registered range of {peer}"
        if self.fail_after is not None and self.copied >= self.fail_after:
            return "the transport failed"
        return ""


class LoopbackPlane(TransferPlane):
    """One process's end of a :class:`LoopbackFabric`.

    Args:
        fabric: what joins the planes.
        on_receipt: called from the carrier thread whenever :meth:`poll` has something new.
        window, descriptor_bytes: as in the transfer settings.
    """

    name = "loopback"

    def __init__(
        self,
        fabric: LoopbackFabric,
        on_receipt: Callable[[], None],
        window: int = 8,
        descriptor_bytes: int = 4 << 20,
    ) -> None:
        self._fabric = fabric
        self._on_receipt = on_receipt
        self._window = window
        self._descriptor_bytes = descriptor_bytes
        self._endpoint = ""
        self._ranges = Ranges()
        self._targets = Ranges()
        self._feeds: dict[str, Feed] = {}
        self._receipts: list[Receipt] = []
        self._next_ticket = 1
        self._closing = False
        self._wake = threading.Condition()
        self._carrier = threading.Thread(target=self._carry, name="tidal-loopback", daemon=True)

    def open(self) -> None:
        """Join the fabric and start the carrier thread."""
        self._endpoint = self._fabric.attach(self)
        self._carrier.start()

    def close(self) -> None:
        """Leave the fabric and join the carrier thread."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        with self._fabric.lock:
            self._fabric.lock.notify_all()
        self._fabric.detach(self._endpoint)
        if self._carrier.is_alive():
            self._carrier.join()

    def register(self, address: int, length: int, home: Home, *, target: bool = True) -> None:
        """Make a range a source and, by default, a target."""
        try:
            self._ranges.add(address, length)
            if target:
                self._targets.add(address, length)
        except ValueError as error:
            raise TransferFailed(f"register: {error}") from None

    def accepts(self, address: int, length: int) -> bool:
        """Say whether a peer may write these bytes."""
        return self._targets.covers(address, length)

    def endpoint(self) -> str:
        """Return the name on the fabric."""
        return self._endpoint

    def submit(self, peer: str, runs: Sequence[Run]) -> Ticket:
        """Queue a batch of runs for a peer."""
        for run in runs:
            if not self._ranges.covers(run.source, run.length):
                raise TransferFailed(f"source: {run.length} bytes at {run.source:#x} lie in no single registered range")
        with self._wake:
            if self._closing or not self._endpoint:
                raise TransferFailed("the loopback plane is not open")
            ticket = Ticket(self._next_ticket)
            self._next_ticket += 1
            feed = self._feeds.setdefault(peer, Feed(self._window, self._descriptor_bytes))
            feed.add(ticket, runs, time.monotonic())
            self._wake.notify_all()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Copy nothing more of a ticket."""
        with self._wake:
            for feed in self._feeds.values():
                feed.stop(ticket, "cancelled", time.monotonic())
            self._wake.notify_all()

    def poll(self) -> list[Receipt]:
        """Return the receipts since the last call."""
        with self._wake:
            receipts, self._receipts = self._receipts, []
            return receipts

    def forget_peer(self, peer: str) -> None:
        """Cancel all tickets of a peer."""
        with self._wake:
            if peer in self._feeds:
                self._feeds[peer].stop_all(f"peer {peer} was forgotten", time.monotonic())
            self._wake.notify_all()

    def peer_connections(self, host: str, others: Iterable[str] = ()) -> int | None:
        """Return 0: a copy is complete when it ends, so nothing is ever on its way."""
        return 0

    def _carry(self) -> None:
        while True:
            with self._wake:
                news = self._collect()
                while not (self._closing or news or self._busy()):
                    self._wake.wait()
                    news = self._collect()
                if self._closing:
                    return
                batch = [(peer, feed, sent) for peer, feed in self._feeds.items() for sent in self._window_of(feed)]
            if news:
                self._on_receipt()
            for peer, feed, sent in batch:
                reason = self._fabric.carry(peer, sent.run, lambda: self._closing)
                with self._wake:
                    feed.ended(sent.key, reason, time.monotonic())

    def _busy(self) -> bool:
        return any(feed.may_feed for feed in self._feeds.values())

    def _collect(self) -> bool:
        fresh = [receipt for feed in self._feeds.values() for receipt in feed.take_finished()]
        self._receipts.extend(fresh)
        return bool(fresh)

    @staticmethod
    def _window_of(feed: Feed) -> list[Descriptor]:
        return list(iter(lambda: feed.next(time.monotonic()), None))
