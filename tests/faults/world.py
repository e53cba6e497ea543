# SPDX-License-Identifier: Apache-2.0
"""Two workers, a network and a transport under a fake clock, with every fault that the protocol is made for.

Sessions, parties and machines are the real ones; sockets, threads, bytes in flight and time are simulated. After every
step the invariants of the protocol are checked; a breach raises :class:`Violation` with the invariant's number.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from tidal_connector.config import ControlConfig
from tidal_connector.control.channel import Route
from tidal_connector.control.handshake import Local
from tidal_connector.control.messages import Identity
from tidal_connector.control.party import Party
from tidal_connector.control.switchboard import Switchboard
from tidal_connector.decode.receiver import Receiver
from tidal_connector.errors import TransferFailed
from tidal_connector.ids import DevicePageId, EngineId, HostPageId, Incarnation, RequestId, TransferId
from tidal_connector.layout import Home, KVLayout, Placement, Region, RegionKind, RegionSpec
from tidal_connector.metrics import Counters
from tidal_connector.prefill.sender import Sender
from tidal_connector.transfer.plane import Receipt, Ticket, TransferPlane
from tidal_connector.transfer.runs import Run

TICK = 0.1
LATE_S = 2.5  # a write that failed lands within so many seconds, or never
SETTINGS = ControlConfig(lease_s=1.2, accept_s=4.0, park_s=6.0, hold_s=6.0, stall_s=3.0, quarantine_s=3.0)
DELIVER_S = 30.0
ENDS_WITHIN_S = 65.0  # the sum of all timers that can follow one another
LAYERS = 3
SPACE = 1 << 20
LAYOUT = KVLayout(
    "deepseek_v32",
    tuple(
        RegionSpec(kind, layer, size, "uint8")
        for layer in range(LAYERS)
        for kind, size in ((RegionKind.LATENT, 3), (RegionKind.INDEX, 2))
        if kind is RegionKind.LATENT or layer < 2
    ),
    64,
    tuple(range(LAYERS)),
    "yarn",
    "w0",
    "auto",
)
P, D = "prefill-0", "decode-0"
PAGES = 64
PAGE_TOKENS = {P: 4, D: 8}


class Violation(AssertionError):
    """An invariant of the protocol does not hold."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"invariant {number}: {text}")
        self.number = number


class Faults(msgspec.Struct, frozen=True):
    """What goes wrong, as probabilities (per frame, per descriptor) or seconds."""

    lost: float = 0.0
    doubled: float = 0.0
    delay_s: float = 0.0
    garbage: float = 0.0
    write_fails: float = 0.0
    write_s: float = 0.3
    hides_connections: bool = False


class Step(msgspec.Struct, frozen=True):
    """At a time, something happens to a transfer (or to everybody)."""

    at: float
    kind: str
    index: int = 0


class Plan(msgspec.Struct, frozen=True):
    """One transfer: what D lacks, and in what chunks P computes."""

    tokens: int
    first: int
    chunk: int


KINDS = (
    "reserve",
    "open",
    "abort_p",
    "abort_d",
    "decline",
    "reject",
    "preempt",
    "crash_p",
    "crash_d",
    "cut",
    "heal",
    "stop_p",
)


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
        return f"{self.worker.name}.{self.worker.life}:1"

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
                self.world.leave_behind(run, body, descriptor.owner, target)
        else:
            self.world.lands(target, run, body, descriptor.owner)
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


class Worker:
    """One life of a worker."""

    def __init__(self, world: World, name: str, life: int) -> None:
        self.world = world
        self.name = name
        self.life = life
        self.alive = True
        self.base = SPACE * len(world.lives) + SPACE
        self.bytes = bytearray(b"\x7e" * SPACE)
        self.placement = self._place()
        self.counters = Counters()
        self.plane = SimPlane(world, self)
        self.wire = SimWire(world, self)
        self.sender: Sender | None = None
        self.receiver: Receiver | None = None
        if name == P:
            self.sender = Sender(LAYOUT, self.placement, self.plane, self.counters, SETTINGS)
        else:
            self.receiver = Receiver(
                LAYOUT, self.placement, self.plane, self.counters, SETTINGS, SETTINGS.quarantine_s or 0, DELIVER_S
            )
        identity = Identity(EngineId(name), Incarnation(f"{name}-life-{life}"))
        local = Local(identity, LAYOUT, self.placement, self.plane.endpoint(), SETTINGS.lease_s)
        self.board = Switchboard(local, self.wire, self.counters, self.sender, self.receiver)
        self.party: Party[object] = self.sender or self.receiver  # type: ignore[assignment]
        self.party.attach(self.board, lambda: None)

    def _place(self) -> Placement:
        size, at = PAGE_TOKENS[self.name], self.base
        regions: list[Region] = []
        for spec in LAYOUT.regions:
            home = Home.HOST if spec.kind is RegionKind.LATENT and self.name == D else Home.DEVICE
            regions.append(Region(spec.kind, spec.layer, spec.row_bytes, home, at, size * spec.row_bytes, size, PAGES))
            at += size * spec.row_bytes * PAGES
        return Placement(tuple(regions))

    def load(self, address: int, length: int) -> bytes:
        """Read memory."""
        return bytes(self.bytes[address - self.base : address - self.base + length])

    def store(self, address: int, body: bytes) -> None:
        """Write memory."""
        self.bytes[address - self.base : address - self.base + len(body)] = body

    def page_at(self, address: int) -> tuple[Home, int]:
        """Return which page an address lies in."""
        for region in self.placement.regions:
            if region.base <= address < region.base + region.page_stride * region.pages:
                return region.home, (address - region.base) // region.page_stride
        raise Violation(5, f"address {address} lies in no region")

    def turn(self, now: float) -> None:
        """One turn of the control loop."""
        while self.party.take_posted(now):
            pass
        self.party.turn(now)
        self.board.tick(now)
        self.party.publish()


@dataclass
class Request:
    """One transfer as vLLM and the proxy see it."""

    index: int
    plan: Plan
    transfer: TransferId
    p_pages: list[int] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)
    device_pages: list[int] = field(default_factory=list)
    p_worker: Worker | None = None
    d_worker: Worker | None = None
    computed: int = 0
    holds: int = 0
    p_state: str = "new"  # new, running, preempting, ended, over
    d_state: str = "new"  # new, waiting, over
    quiet: threading.Event | None = None
    disturbed: bool = False
    p_said: str | None = None
    d_said: str | None = None

    @property
    def p_request(self) -> RequestId:
        """Its id in P's engine."""
        return RequestId(f"p-{self.index}")

    @property
    def d_request(self) -> RequestId:
        """Its id in D's engine."""
        return RequestId(f"d-{self.index}")


class Broken(logging.Handler):
    """Remembers the first thing that broke inside the product."""

    first = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what was logged with an exception."""
        if record.exc_info:
            self.first = self.first or f"{record.getMessage()}: {record.exc_info[1]!r}"


class World:
    """Everything."""

    def __init__(self, seed: int, faults: Faults, plans: Sequence[Plan], steps: Sequence[Step]) -> None:
        self.story = f"World({seed}, {faults}, {list(plans)}, {list(steps)})"
        self.chance = random.Random(seed)
        self.faults = faults
        self.now = 0.0
        self.cut = False
        self.lives: list[Worker] = []
        self.late: list[Late] = []
        self.lines_made = 0
        self.post_box: list[tuple[float, int, bool, bytes, Worker]] = []
        self.free: dict[tuple[str, Home], list[int]] = {}
        self.page_owner: dict[tuple[Worker, Home, int], str] = {}
        self.rows_written: dict[tuple[Worker, int], int] = defaultdict(int)
        self.requests = [Request(index, plan, TransferId(f"xfer-{index}")) for index, plan in enumerate(plans)]
        self.steps = sorted(steps, key=lambda step: step.at)
        self.prefill = self.born(P)
        self.decode = self.born(D)

    def __repr__(self) -> str:
        return self.story

    # --- workers

    def born(self, name: str) -> Worker:
        """Start a worker with empty pools, whose pages come in any order."""
        worker = Worker(self, name, sum(other.name == name for other in self.lives))
        self.lives.append(worker)
        for home in Home:
            pages = list(range(PAGES))
            self.chance.shuffle(pages)
            self.free[name, home] = pages
        return worker

    def at_endpoint(self, endpoint: str) -> Worker | None:
        """Return the living worker behind a transport endpoint."""
        return next((w for w in self.lives if w.alive and w.plane.endpoint() == endpoint), None)

    def crash(self, name: str) -> None:
        """Kill a worker and start the next life at its address."""
        old = self.prefill if name == P else self.decode
        old.alive = False
        self.disturb()
        for descriptor in old.plane.flying:  # its kernel may still deliver what it holds
            target = self.at_endpoint(old.plane.peers[descriptor.ticket])
            if target is not None:
                body = old.load(descriptor.run.source, descriptor.run.length)
                self.leave_behind(descriptor.run, body, descriptor.owner, target)
        old.plane.flying, old.plane.waiting = [], []
        for request in self.requests:
            if request.p_worker is old:
                request.p_state = "over"
            if request.d_worker is old:
                request.d_state = "over"
        new = self.born(name)
        if name == P:
            self.prefill = new
        else:
            self.decode = new

    # --- network

    def post(self, frame: bytes, line: int, *, to_caller: bool, source: Worker) -> None:
        """Carry a frame: lose it, delay it, deliver it twice, or put rubbish before it."""
        if self.chance.random() < self.faults.lost or self.cut:
            return
        for _ in range(2 if self.chance.random() < self.faults.doubled else 1):
            at = self.now + self.chance.uniform(0.0, self.faults.delay_s)
            self.post_box.append((at, line, to_caller, frame, source))
        if self.chance.random() < self.faults.garbage:
            spoilt = bytearray(frame)
            spoilt[self.chance.randrange(len(spoilt))] ^= 1 << self.chance.randrange(8)
            cut = bytes(spoilt[: self.chance.randrange(1, len(spoilt) + 1)])
            if cut != frame and not _readable(cut):
                self.post_box.append((self.now, line, to_caller, cut, source))

    def deliver(self) -> None:
        """Hand over the frames that are due, in any order."""
        due = [item for item in self.post_box if item[0] <= self.now]
        self.post_box = [item for item in self.post_box if item[0] > self.now]
        if self.faults.delay_s:
            self.chance.shuffle(due)
        for _, line, to_caller, frame, _ in due:
            if to_caller:
                for worker in self.lives:
                    for route, number in list(worker.wire.lines.items()):
                        if number == line and worker.alive:
                            worker.board.arrived(route, frame, self.now)
                            worker.turn(self.now)
            else:
                worker = self.prefill  # whoever lives at the address now
                worker.board.arrived(Route(caller=str(line).encode()), frame, self.now)
                worker.turn(self.now)

    # --- bytes, and who owns them

    def submitted(self, worker: Worker, runs: Sequence[Run]) -> None:
        """Every row is submitted only while its request holds the page."""
        for run in runs:
            home, page = worker.page_at(run.source)
            if (worker, home, page) not in self.page_owner:
                raise Violation(2, f"page {page} of {worker.name} is submitted though vLLM has it back")

    def owners_of(self, source: Worker, peer: str, run: Run) -> tuple[str, str]:
        """Return who owns both ends of a run as it is handed on."""
        reads = self.page_owner.get((source, *source.page_at(run.source)), "")
        target = self.at_endpoint(peer)
        owner = "" if target is None else self.page_owner.get((target, *target.page_at(run.destination)), "")
        return reads, owner

    def reads(self, worker: Worker, descriptor: Descriptor) -> None:
        """A source page is read only by the request that holds it."""
        home, page = worker.page_at(descriptor.run.source)
        holder = self.page_owner.get((worker, home, page), "")
        if not descriptor.reads or holder != descriptor.reads:
            raise Violation(2, f"page {page} of {worker.name} is read for {descriptor.reads!r}, held by {holder!r}")

    def lands(self, target: Worker, run: Run, body: bytes, owner: str) -> None:
        """A write arrives only in pages that its transfer still holds."""
        if not target.alive:
            return
        home, page = target.page_at(run.destination)
        holder = self.page_owner.get((target, home, page), "")
        if not owner or holder != owner:
            raise Violation(1, f"a write of {owner!r} lands in {home} page {page}, held by {holder!r}")
        target.store(run.destination, body)

    def leave_behind(self, run: Run, body: bytes, owner: str, target: Worker) -> None:
        """A write that was given up lands later, or never."""
        if self.chance.random() < 0.7:
            at = self.now + self.chance.uniform(0.0, LATE_S)
            self.late.append(Late(at, run, body, owner, target))

    # --- vLLM and the proxy

    def act(self, step: Step) -> None:
        """Let something happen."""
        request = self.requests[step.index % len(self.requests)]
        match step.kind:
            case "reserve":
                self.reserve(request)
            case "open":
                self.schedule(request)
            case "abort_p" if request.p_state in ("running", "preempting"):
                request.disturbed = True
                request.p_state = "ended"
                self.sender_of(request).abort(request.p_request, "aborted at prefill")
            case "abort_d" if request.d_state == "waiting":
                request.disturbed = True
                self.receiver_of(request).abort(request.d_request, "aborted at decode")
            case "decline" if request.d_state == "new":
                request.disturbed, request.d_state = True, "over"
                assert self.decode.receiver is not None
                self.decode.receiver.decline(request.transfer, EngineId(P), "p:1", "declined")
            case "reject" if request.p_state == "new":
                request.disturbed, request.p_state = True, "over"
                assert self.prefill.sender is not None
                self.prefill.sender.reject(request.transfer, "rejected")
            case "preempt" if request.p_state == "running" and request.computed:
                request.p_state = "preempting"
                self.sender_of(request).unready(request.p_request, 0)
                request.quiet = self.sender_of(request).watch([request.p_request])
            case "crash_p":
                self.crash(P)
            case "crash_d":
                self.crash(D)
            case "cut":
                self.cut = True
                self.disturb()
            case "heal":
                self.cut = False
            case "stop_p":
                self.disturb()
                self.prefill.party.stopping("the engine stops", self.now)

    def disturb(self) -> None:
        """From now on no transfer has to succeed."""
        for request in self.requests:
            request.disturbed = True

    def sender_of(self, request: Request) -> Sender:
        """The sender that has the request."""
        assert request.p_worker is not None
        assert request.p_worker.sender is not None
        return request.p_worker.sender

    def receiver_of(self, request: Request) -> Receiver:
        """The receiver that has the request."""
        assert request.d_worker is not None
        assert request.d_worker.receiver is not None
        return request.d_worker.receiver

    def take(self, worker: Worker, home: Home, count: int, owner: str) -> list[int]:
        """Take pages out of a pool."""
        pages = [self.free[worker.name, home].pop() for _ in range(count)]
        for page in pages:
            self.page_owner[worker, home, page] = owner
        return pages

    def give_back(self, worker: Worker, home: Home, pages: Sequence[int]) -> None:
        """Give pages back; the next request may get them at once."""
        for page in pages:
            del self.page_owner[worker, home, page]
            if worker.alive:
                self.free[worker.name, home].append(page)

    def reserve(self, request: Request) -> None:
        """D's scheduler allocates blocks."""
        if request.d_state != "new":
            return
        plan, worker, size = request.plan, self.decode, PAGE_TOKENS[D]
        request.d_worker, request.d_state = worker, "waiting"
        count = -(-plan.tokens // size) - plan.first // size
        request.host_pages = self.take(worker, Home.HOST, count, request.transfer)
        request.device_pages = self.take(worker, Home.DEVICE, count, request.transfer)
        assert worker.receiver is not None
        worker.receiver.reserve(
            request.d_request,
            request.transfer,
            EngineId(P),
            "p:1",
            plan.first,
            plan.tokens,
            [HostPageId(page) for page in request.host_pages],
            [DevicePageId(page) for page in request.device_pages],
        )

    def schedule(self, request: Request) -> None:
        """P's scheduler takes the request, or takes it again after a preemption."""
        if request.p_state != "new":
            return
        request.p_worker, request.p_state, request.computed = self.prefill, "running", 0
        self.allocate(request)

    def allocate(self, request: Request) -> None:
        """Give a request pages on P."""
        assert request.p_worker is not None
        count = -(-request.plan.tokens // PAGE_TOKENS[P])
        request.holds += 1  # a page that comes back by chance is another hold of it
        holder = f"{request.transfer}, hold {request.holds}"
        request.p_pages = self.take(request.p_worker, Home.DEVICE, count, holder)
        sender = self.sender_of(request)
        sender.open(request.p_request, request.transfer, None)
        sender.pages(request.p_request, [DevicePageId(page) for page in request.p_pages])

    def compute(self, request: Request) -> None:
        """One step of P's engine: a chunk, layer by layer; or the end of a preemption, or of the request."""
        worker = request.p_worker
        if worker is None:
            return
        if request.p_state == "preempting" and request.quiet is not None and request.quiet.is_set():
            self.give_back(worker, Home.DEVICE, request.p_pages)
            for page in request.p_pages:
                self.scribble(worker, page)
            request.p_state, request.computed, request.quiet = "running", 0, None
            self.allocate(request)
            return
        if request.p_state != "running":
            return
        sender, plan = self.sender_of(request), request.plan
        first, end = request.computed, min(plan.tokens, request.computed + plan.chunk)
        for layer in range(LAYERS):
            for index, region in enumerate(worker.placement.regions):
                if region.layer == layer:
                    for token in range(first, end):
                        page, row = divmod(token, region.page_tokens)
                        worker.store(region.address(request.p_pages[page], row), true_row(request, index, token))
            sender.ready(request.p_request, (layer,), first, end)
        request.computed = end
        if end == plan.tokens:
            sender.prefill_done(request.p_request, self.now)
            sender.finish(request.p_request, plan.tokens)
            request.p_state = "ended"

    def scribble(self, worker: Worker, page: int) -> None:
        """The next owner of a page writes its own rows."""
        for region in worker.placement.regions:
            worker.store(region.address(page, 0), b"\xee" * region.page_stride)

    # --- time

    def run(self) -> None:
        """Let everything happen, then wait until all is over."""
        steps = list(self.steps)
        last = steps[-1].at if steps else 0.0
        end = last + ENDS_WITHIN_S
        broken = Broken()
        logging.getLogger("tidal").addHandler(broken)
        try:
            self._run(steps, end)
        finally:
            logging.getLogger("tidal").removeHandler(broken)
        if broken.first:
            raise Violation(6, f"something broke: {broken.first}")
        self.check_end()

    def _run(self, steps: list[Step], end: float) -> None:
        while self.now < end:
            self.now += TICK
            while steps and steps[0].at <= self.now:
                self.act(steps.pop(0))
            if not steps and self.cut:
                self.cut = False
            self.tick()
            if not steps and self.settled():
                break

    def tick(self) -> None:
        """One moment."""
        self.deliver()
        for request in self.requests:
            self.compute(request)
        for worker in [w for w in self.lives if w.alive]:
            worker.plane.carry(self.now)
            worker.turn(self.now)
        for late in [late for late in self.late if late.at <= self.now]:
            self.late.remove(late)
            self.lands(late.target, late.run, late.body, late.owner)
        self.collect()

    def settled(self) -> bool:
        """Say whether vLLM waits for nothing, and no byte is on its way."""
        waiting = any(r.d_state == "waiting" or r.p_state in ("running", "preempting", "ended") for r in self.requests)
        return not (waiting or self.late or self.prefill.party.busy() or self.decode.party.busy())

    def collect(self) -> None:
        """Take outcomes, and give the pages of their requests to the next."""
        for worker in (self.prefill, self.decode):
            for outcome in worker.party.outcomes():
                self.take_outcome(worker, outcome)

    def take_outcome(self, worker: Worker, outcome: object) -> None:
        """vLLM hears of each request once, and of none that it does not track."""
        name = outcome.request  # type: ignore[attr-defined]
        request = self.requests[int(name[2:])]
        reason = outcome.reason  # type: ignore[attr-defined]
        if bool(reason) == outcome.ok:  # type: ignore[attr-defined]
            raise Violation(3, f"an outcome that is neither good nor explained: {outcome}")
        if worker.name == P:
            if request.p_worker is not worker or request.p_state != "ended":
                raise Violation(4, f"prefill's vLLM hears of {name} in state {request.p_state}")
            request.p_state, request.p_said = "over", reason
            self.give_back(worker, Home.DEVICE, request.p_pages)
            for page in request.p_pages:
                self.scribble(worker, page)
            return
        if request.d_worker is not worker or request.d_state != "waiting":
            raise Violation(4, f"decode's vLLM hears of {name} in state {request.d_state}")
        request.d_state, request.d_said = "over", reason
        if not reason:
            self.check_rows(request, outcome.bytes)  # type: ignore[attr-defined]
        self.give_back(worker, Home.HOST, request.host_pages)
        self.give_back(worker, Home.DEVICE, request.device_pages)

    def check_rows(self, request: Request, landed: int) -> None:
        """What D lacked is P's, byte for byte; nothing else in its pages was touched by this transfer."""
        plan, worker = request.plan, request.d_worker
        assert worker is not None
        if landed != LAYOUT.transfer_bytes(plan.tokens - plan.first):
            raise Violation(5, f"{landed} bytes are reported for {plan}")
        start = plan.first // PAGE_TOKENS[D]
        for index, region in enumerate(worker.placement.regions):
            pages = request.host_pages if region.home is Home.HOST else request.device_pages
            for token in range(plan.first, plan.tokens):
                page, row = divmod(token, region.page_tokens)
                got = worker.load(region.address(pages[page - start], row), region.row_bytes)
                if got != true_row(request, index, token):
                    raise Violation(5, f"{request.transfer}: {region.kind} layer {region.layer} token {token}: {got!r}")

    def check_end(self) -> None:
        """Everything has ended, on both sides, and what nobody disturbed has ended well."""
        calm = not (self.faults.lost or self.faults.write_fails or self.faults.delay_s > 0.3)
        for request in self.requests:
            if request.d_state == "waiting":
                raise Violation(3, f"{request.transfer}: decode still waits at {self.now:.1f} s")
            if request.p_state in ("running", "preempting", "ended"):
                raise Violation(3, f"{request.transfer}: prefill's pages are still held at {self.now:.1f} s")
            both = request.p_worker is not None and request.d_worker is not None
            if calm and both and not request.disturbed and (request.p_said or request.d_said):
                words = f"prefill: {request.p_said!r}, decode: {request.d_said!r}"
                raise Violation(6, f"{request.transfer} failed though nothing happened to it: {words}")
        for worker in (self.prefill, self.decode):
            if worker.party.busy():
                raise Violation(3, f"{worker.name} is not idle at {self.now:.1f} s")


def true_row(request: Request, region: int, token: int) -> bytes:
    """The bytes that P computes for a token: they tell request, region and token apart."""
    value = (request.index * 7919 + region * 131 + token * 3 + 1) & 0xFFFFFF
    return value.to_bytes(3, "little")[: LAYOUT.regions[region].row_bytes]


def _halves(run: Run) -> list[Run]:
    if run.length < 2:
        return [run]
    middle = run.length // 2
    return [
        Run(run.source, run.destination, middle),
        Run(run.source + middle, run.destination + middle, run.length - middle),
    ]


def _readable(frame: bytes) -> bool:
    """A flipped bit may by chance make another valid message; that is what keys are for, not this test."""
    from tidal_connector.control.messages import open_envelope, read_body
    from tidal_connector.errors import ProtocolError

    try:
        read_body(open_envelope(frame))
    except ProtocolError:
        return False
    return True
