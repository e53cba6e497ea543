# SPDX-License-Identifier: Apache-2.0
"""What carries bytes and frames in the simulated world: the transport and the sockets of one life of a worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidal_connector.control.channel import Route
from tidal_connector.errors import TransferFailed
from tidal_connector.layout import Home
from tidal_connector.transfer.plane import Receipt, Ticket, TransferPlane
from tidal_connector.transfer.runs import Run

if TYPE_CHECKING:
    from tests.faults.workers import Worker
    from tests.faults.world import World


@dataclass
class Descriptor:
    """One write on its way."""

    ticket: Ticket
    run: Run
    ends: float
    fails: bool
    owner: str
    reads: str


@dataclass
class Late:
    """Bytes in a kernel's buffer after their write was given up."""

    at: float
    run: Run
    body: bytes
    owner: str
    target: Worker
    source: Worker


class SimPlane(TransferPlane):
    """The transport of one life of a worker."""

    name = "simulated"

    def __init__(self, world: World, worker: Worker) -> None:
        self.world = world
        self.worker = worker
        self.waiting: list[tuple[Ticket, str, Run]] = []
        self.flying: list[Descriptor] = []
        self.open_tickets: dict[Ticket, list[int]] = {}  # descriptors left, bytes
        self.bad: dict[Ticket, str] = {}
        self.unclean: set[Ticket] = set()
        self.receipts: list[Receipt] = []
        self.peers: dict[Ticket, str] = {}
        self.made = 0

    def open(self) -> None:
        """Nothing to open."""

    def close(self) -> None:
        """Nothing to close."""

    def register(self, address: int, length: int, home: Home) -> None:
        """Everything is registered."""

    def endpoint(self) -> str:
        """One per life."""
        return f"{self.worker.name}.{self.worker.engine.life}.{self.worker.rank}:1"

    def submit(self, peer: str, runs: Sequence[Run]) -> Ticket:
        """Queue row by row, so that a part can fail in its middle."""
        self.made += 1
        ticket = Ticket(self.made)
        pieces = [piece for run in runs for piece in _halves(run)]
        if not pieces:
            raise TransferFailed("nothing to submit")
        self.open_tickets[ticket] = [len(pieces), 0]
        self.peers[ticket] = peer
        self.waiting.extend((ticket, peer, piece) for piece in pieces)
        self.world.submitted(self.worker, pieces)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Drop what was not handed on."""
        kept = [item for item in self.waiting if item[0] != ticket]
        dropped = len(self.waiting) - len(kept)
        self.waiting = kept
        if dropped:
            self.bad.setdefault(ticket, "cancelled")
            self.open_tickets[ticket][0] -= dropped
            self._close(ticket)

    def poll(self) -> list[Receipt]:
        """Hand out what ended."""
        found, self.receipts = self.receipts, []
        return found

    def forget_peer(self, peer: str) -> None:
        """Cancel its tickets."""
        for ticket in list(self.open_tickets):
            if self.peers[ticket] == peer:
                self.cancel(ticket)

    def peer_connections(self, host: str, others: Iterable[str] = ()) -> int | None:
        """Count what can still arrive from that life."""
        if self.world.faults.hides_connections:
            return None
        late = sum(late.target is self.worker for late in self.world.late)
        others = (w for w in self.world.lives if w.plane.endpoint().startswith(f"{host}:"))
        return late + sum(len(other.plane.flying) + len(other.plane.waiting) for other in others)

    def carry(self, now: float) -> None:
        """Let time pass for what is in flight."""
        chance = self.world.chance
        while self.waiting and len(self.flying) < 8:
            ticket, peer, run = self.waiting.pop(0)
            fails = chance.random() < self.world.faults.write_fails
            takes = chance.uniform(0.0, self.world.faults.write_s)
            reads, owner = self.world.owners_of(self.worker, peer, run)
            self.flying.append(Descriptor(ticket, run, now + takes, fails, owner, reads))
        for descriptor in [item for item in self.flying if item.ends <= now]:
            target = self.world.at_endpoint(self.peers[descriptor.ticket])
            if self.world.cut and now < descriptor.ends + 3.0:
                continue  # the transport's own deadline
            self.flying.remove(descriptor)
            self._end(descriptor, target, descriptor.fails or self.world.cut)

    def _end(self, descriptor: Descriptor, target: Worker | None, fails: bool) -> None:
        ticket, run = descriptor.ticket, descriptor.run
        self.world.reads(self.worker, descriptor)
        body = self.worker.load(run.source, run.length)
        left = self.open_tickets[ticket]
        left[0] -= 1
        if target is None or fails:
            self.bad.setdefault(ticket, "the write failed")
            self.unclean.add(ticket)
            self.cancel(ticket)
            if target is not None:
                self.world.leave_behind(run, body, descriptor.owner, target, self.worker)
        else:
            self.world.lands(target, run, body, descriptor.owner, self.worker)
            left[1] += run.length
        self._close(ticket)

    def _close(self, ticket: Ticket) -> None:
        left = self.open_tickets.get(ticket)
        if left is not None and left[0] == 0:
            del self.open_tickets[ticket]
            reason = self.bad.get(ticket, "")
            now = self.world.now
            self.receipts.append(Receipt(ticket, not reason, left[1], now, now, reason, ticket not in self.unclean))


class SimWire:
    """The sockets of one life of a worker."""

    def __init__(self, world: World, worker: Worker) -> None:
        self.world = world
        self.worker = worker
        self.lines: dict[Route, int] = {}

    def dial(self, address: str, line: str) -> Route:
        """Remember the line; a new one does not hear what was said on an old one."""
        route = Route(address, line)
        if route not in self.lines:
            self.world.lines_made += 1
            self.lines[route] = self.world.lines_made
            self.world.dialled[self.world.lines_made] = address
        return route

    def hang_up(self, route: Route) -> None:
        """Forget it."""
        self.lines.pop(route, None)

    def send(self, route: Route, frame: bytes) -> bool:
        """Hand a frame to the network."""
        if route.caller:
            number = int(route.caller)
            self.world.post(frame, number, to_caller=True, source=self.worker)
        elif route in self.lines:
            self.world.post(frame, self.lines[route], to_caller=False, source=self.worker)
        return True


def _halves(run: Run) -> list[Run]:
    if run.length < 2:
        return [run]
    middle = run.length // 2
    return [
        Run(run.source, run.destination, middle),
        Run(run.source + middle, run.destination + middle, run.length - middle),
    ]
