# SPDX-License-Identifier: Apache-2.0
"""Two engines of one or more ranks, a network and a transport under a fake clock, with every fault that the protocol
is made for.

Sessions, parties and machines are the real ones; sockets, threads, bytes in flight and time are simulated. vLLM is
simulated as it is above the ranks: they share page ids, and it hears of a request when each rank has reported it. After
every step the invariants of the protocol are checked; a breach raises :class:`Violation` with the invariant's number.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tests.faults.carried import Descriptor, Late
from tests.faults.workers import LAYERS, LAYOUT, PAGE_TOKENS, PAGES, D, Engine, P, Violation, Worker, address
from tidal_connector.control.channel import Route
from tidal_connector.ids import DevicePageId, EngineId, HostPageId, RequestId, TransferId
from tidal_connector.layout import Home
from tidal_connector.prefill.sender import Sender
from tidal_connector.transfer.runs import Run

__all__ = ["KINDS", "Faults", "Plan", "Step", "Violation", "World"]

TICK = 0.1
LATE_S = 2.5  # a write that failed lands within so many seconds, or never
DYING_S = 1.5  # from the death of one rank to that of its engine
ENDS_WITHIN_S = 65.0  # the sum of all timers that can follow one another


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
    "lose_p",
    "cut",
    "heal",
    "stop_p",
)


@dataclass
class Request:
    """One transfer as vLLM and the proxy see it."""

    index: int
    plan: Plan
    transfer: TransferId
    p_pages: list[int] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)
    device_pages: list[int] = field(default_factory=list)
    p_engine: Engine | None = None
    d_engine: Engine | None = None
    p_heard: dict[int, str] = field(default_factory=dict)  # what each rank said
    d_heard: dict[int, str] = field(default_factory=dict)
    landed: int = 0
    computed: int = 0
    holds: int = 0
    p_state: str = "new"  # new, running, preempting, ended, over
    d_state: str = "new"  # new, waiting, over
    quiet: list[threading.Event] = field(default_factory=list)
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

    def __init__(
        self,
        seed: int,
        faults: Faults,
        plans: Sequence[Plan],
        steps: Sequence[Step],
        ranks: tuple[int, int] = (1, 1),
    ) -> None:
        self.story = f"World({seed}, {faults}, {list(plans)}, {list(steps)}, {ranks})"
        self.ranks = {P: ranks[0], D: ranks[1]}
        self.chance = random.Random(seed)
        self.faults = faults
        self.now = 0.0
        self.cut = False
        self.lives: list[Worker] = []
        self.late: list[Late] = []
        self.dying: list[tuple[float, Engine]] = []  # engines that lost a rank, and when they go
        self.lines_made = 0
        self.dialled: dict[int, str] = {}  # address behind each line
        self.post_box: list[tuple[float, int, bool, bytes, Worker]] = []
        self.free: dict[tuple[str, Home], list[int]] = {}
        self.page_owner: dict[tuple[Engine, Home, int], str] = {}
        self.writers: dict[tuple[str, Home, int, int], tuple[int, int]] = {}
        self.requests = [Request(index, plan, TransferId(f"xfer-{index}")) for index, plan in enumerate(plans)]
        self.steps = sorted(steps, key=lambda step: step.at)
        self.prefill = self.born(P)
        self.decode = self.born(D)

    def __repr__(self) -> str:
        return self.story

    # --- workers

    def born(self, name: str) -> Engine:
        """Start an engine with empty pools, whose pages come in any order."""
        engine = Engine(self, name, len({other.engine for other in self.lives if other.name == name}), self.ranks[name])
        for home in Home:
            pages = list(range(PAGES))
            self.chance.shuffle(pages)
            self.free[name, home] = pages
        return engine

    def at_endpoint(self, endpoint: str) -> Worker | None:
        """Return the living worker behind a transport endpoint."""
        return next((w for w in self.lives if w.alive and w.plane.endpoint() == endpoint), None)

    def crash(self, name: str) -> None:
        """Kill an engine and start the next life at its addresses."""
        old = self.prefill if name == P else self.decode
        for worker in old.workers:
            self.kill(worker)
        for request in self.requests:
            if request.p_engine is old:
                request.p_state = "over"
            if request.d_engine is old:
                request.d_state = "over"
        new = self.born(name)
        if name == P:
            self.prefill = new
        else:
            self.decode = new

    def kill(self, worker: Worker) -> None:
        """End one rank; its kernel may still deliver what it holds."""
        worker.alive = False
        self.disturb()
        for descriptor in worker.plane.flying:
            target = self.at_endpoint(worker.plane.peers[descriptor.ticket])
            if target is not None:
                body = worker.load(descriptor.run.source, descriptor.run.length)
                self.leave_behind(descriptor.run, body, descriptor.owner, target, worker)
        worker.plane.flying, worker.plane.waiting = [], []

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
                # whoever lives at the address now
                worker = next(w for w in self.prefill.workers if address(w.rank) == self.dialled[line])
                if worker.alive:
                    worker.board.arrived(Route(caller=str(line).encode()), frame, self.now)
                    worker.turn(self.now)

    # --- bytes, and who owns them

    def submitted(self, worker: Worker, runs: Sequence[Run]) -> None:
        """Every row is submitted only while its request holds the page."""
        for run in runs:
            home, page = worker.page_at(run.source)
            if (worker.engine, home, page) not in self.page_owner:
                raise Violation(2, f"page {page} of {worker.name} is submitted though vLLM has it back")

    def owners_of(self, source: Worker, peer: str, run: Run) -> tuple[str, str]:
        """Return who owns both ends of a run as it is handed on."""
        reads = self.page_owner.get((source.engine, *source.page_at(run.source)), "")
        target = self.at_endpoint(peer)
        owner = "" if target is None else self.page_owner.get((target.engine, *target.page_at(run.destination)), "")
        return reads, owner

    def reads(self, worker: Worker, descriptor: Descriptor) -> None:
        """A source page is read only by the request that holds it."""
        home, page = worker.page_at(descriptor.run.source)
        holder = self.page_owner.get((worker.engine, home, page), "")
        if not descriptor.reads or holder != descriptor.reads:
            raise Violation(2, f"page {page} of {worker.name} is read for {descriptor.reads!r}, held by {holder!r}")

    def lands(self, target: Worker, run: Run, body: bytes, owner: str, source: Worker) -> None:
        """A write arrives only in pages that its transfer still holds, and only from the one rank that has to."""
        if not target.alive:
            return
        home, page = target.page_at(run.destination)
        holder = self.page_owner.get((target.engine, home, page), "")
        if not owner or holder != owner:
            raise Violation(1, f"a write of {owner!r} lands in {home} page {page}, held by {holder!r}")
        pool = -1 if home is Home.HOST else target.rank
        writer, place = (source.rank, target.rank), run.destination - target.base
        if self.writers.setdefault((owner, home, pool, place), writer) != writer:
            raise Violation(5, f"{home} byte {place} of {owner!r} is written by two pairs of ranks, one {writer}")
        target.store(run.destination, body)

    def leave_behind(self, run: Run, body: bytes, owner: str, target: Worker, source: Worker) -> None:
        """A write that was given up lands later, or never."""
        if self.chance.random() < 0.7:
            at = self.now + self.chance.uniform(0.0, LATE_S)
            self.late.append(Late(at, run, body, owner, target, source))

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
                for sender in self.senders_of(request):
                    sender.abort(request.p_request, "aborted at prefill")
            case "abort_d" if request.d_state == "waiting":
                request.disturbed = True
                assert request.d_engine is not None
                for receiver in request.d_engine.receivers:
                    receiver.abort(request.d_request, "aborted at decode")
            case "decline" if request.d_state == "new":
                request.disturbed, request.d_state = True, "over"
                for receiver in self.decode.receivers:
                    receiver.decline(request.transfer, EngineId(P), address(0), "declined")
            case "reject" if request.p_state == "new":
                request.disturbed, request.p_state = True, "over"
                for sender in self.prefill.senders:
                    sender.reject(request.transfer, "rejected")
            case "preempt" if request.p_state == "running" and request.computed:
                request.p_state = "preempting"
                for sender in self.senders_of(request):
                    sender.unready(request.p_request, 0)
                request.quiet = [sender.watch([request.p_request]) for sender in self.senders_of(request)]
            case "crash_p":
                self.crash(P)
            case "crash_d":
                self.crash(D)
            case "lose_p" if len(self.prefill.workers) > 1:
                self.kill(self.prefill.workers[step.index % len(self.prefill.workers)])
                self.dying.append((self.now + DYING_S, self.prefill))
            case "cut":
                self.cut = True
                self.disturb()
            case "heal":
                self.cut = False
            case "stop_p":
                self.disturb()
                for worker in self.prefill.workers:
                    worker.party.stopping("the engine stops", self.now)

    def disturb(self) -> None:
        """From now on no transfer has to succeed."""
        for request in self.requests:
            request.disturbed = True

    def senders_of(self, request: Request) -> list[Sender]:
        """The senders that have the request, one for each rank."""
        assert request.p_engine is not None
        return request.p_engine.senders

    def take(self, engine: Engine, home: Home, count: int, owner: str) -> list[int]:
        """Take pages out of a pool."""
        pages = [self.free[engine.name, home].pop() for _ in range(count)]
        for page in pages:
            self.page_owner[engine, home, page] = owner
        return pages

    def give_back(self, engine: Engine, home: Home, pages: Sequence[int]) -> None:
        """Give pages back; the next request may get them at once."""
        for page in pages:
            del self.page_owner[engine, home, page]
            if engine.alive:
                self.free[engine.name, home].append(page)

    def reserve(self, request: Request) -> None:
        """D's scheduler allocates blocks."""
        if request.d_state != "new":
            return
        plan, engine, size = request.plan, self.decode, PAGE_TOKENS[D]
        request.d_engine, request.d_state = engine, "waiting"
        count = -(-plan.tokens // size) - plan.first // size
        request.host_pages = self.take(engine, Home.HOST, count, request.transfer)
        request.device_pages = self.take(engine, Home.DEVICE, count, request.transfer)
        for receiver in engine.receivers:
            receiver.reserve(
                request.d_request,
                request.transfer,
                EngineId(P),
                address(0),
                plan.first,
                plan.tokens,
                [HostPageId(page) for page in request.host_pages],
                [DevicePageId(page) for page in request.device_pages],
            )

    def schedule(self, request: Request) -> None:
        """P's scheduler takes the request, or takes it again after a preemption."""
        if request.p_state != "new":
            return
        request.p_engine, request.p_state, request.computed = self.prefill, "running", 0
        self.allocate(request)

    def allocate(self, request: Request) -> None:
        """Give a request pages on P."""
        assert request.p_engine is not None
        count = -(-request.plan.tokens // PAGE_TOKENS[P])
        request.holds += 1  # a page that comes back by chance is another hold of it
        holder = f"{request.transfer}, hold {request.holds}"
        request.p_pages = self.take(request.p_engine, Home.DEVICE, count, holder)
        for sender in self.senders_of(request):
            sender.open(request.p_request, request.transfer, None)
            sender.pages(request.p_request, [DevicePageId(page) for page in request.p_pages])

    def compute(self, request: Request) -> None:
        """One step of P's engine: a chunk, layer by layer; or the end of a preemption, or of the request."""
        engine = request.p_engine
        if engine is None:
            return
        if request.p_state == "preempting" and all(quiet.is_set() for quiet in request.quiet):
            self.give_back(engine, Home.DEVICE, request.p_pages)
            self.scribble(engine, request.p_pages)
            request.p_state, request.computed, request.quiet = "running", 0, []
            self.allocate(request)
            return
        if request.p_state != "running":
            return
        plan = request.plan
        first, end = request.computed, min(plan.tokens, request.computed + plan.chunk)
        for worker in engine.workers:
            if worker.alive and worker.sender is not None:
                self.compute_rank(request, worker, worker.sender, first, end)
        request.computed = end
        if end == plan.tokens:
            request.p_state = "ended"

    def compute_rank(self, request: Request, worker: Worker, sender: Sender, first: int, end: int) -> None:
        """What one rank does of a chunk: each computes the same rows."""
        for layer in range(LAYERS):
            for index, region in enumerate(worker.placement.regions):
                if region.layer == layer:
                    for token in range(first, end):
                        page, row = divmod(token, region.page_tokens)
                        worker.store(region.address(request.p_pages[page], row), true_row(request, index, token))
            sender.ready(request.p_request, (layer,), first, end)
        if end == request.plan.tokens:
            sender.prefill_done(request.p_request, self.now)
            sender.finish(request.p_request, request.plan.tokens)

    def scribble(self, engine: Engine, pages: Sequence[int]) -> None:
        """The next owner of pages writes its own rows."""
        for worker in engine.workers:
            for region in worker.placement.regions:
                for page in pages:
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
        for at, engine in list(self.dying):
            if at <= self.now:
                self.dying.remove((at, engine))
                if engine is self.prefill:
                    self.crash(P)
        self.deliver()
        for request in self.requests:
            self.compute(request)
        for worker in [w for w in self.lives if w.alive]:
            worker.plane.carry(self.now)
            worker.turn(self.now)
        for late in [late for late in self.late if late.at <= self.now]:
            self.late.remove(late)
            self.lands(late.target, late.run, late.body, late.owner, late.source)
        self.collect()

    def settled(self) -> bool:
        """Say whether vLLM waits for nothing, and no byte is on its way."""
        waiting = any(r.d_state == "waiting" or r.p_state in ("running", "preempting", "ended") for r in self.requests)
        return not (waiting or self.late or self.dying or self.prefill.busy or self.decode.busy)

    def collect(self) -> None:
        """Take outcomes, and give the pages of their requests to the next."""
        for worker in (*self.prefill.workers, *self.decode.workers):
            for outcome in worker.party.outcomes() if worker.alive else ():
                self.take_outcome(worker, outcome)

    def take_outcome(self, worker: Worker, outcome: object) -> None:
        """vLLM hears of each request once from each rank, and of none that it does not track; when the last rank has
        reported, the request is over.
        """
        name = outcome.request  # type: ignore[attr-defined]
        request = self.requests[int(name[2:])]
        reason = outcome.reason  # type: ignore[attr-defined]
        if bool(reason) == outcome.ok:  # type: ignore[attr-defined]
            raise Violation(3, f"an outcome that is neither good nor explained: {outcome}")
        at_p, engine = worker.name == P, worker.engine
        heard = request.p_heard if at_p else request.d_heard
        state = request.p_state if at_p else request.d_state
        tracked = engine is (request.p_engine if at_p else request.d_engine)
        if not tracked or state != ("ended" if at_p else "waiting") or worker.rank in heard:
            raise Violation(4, f"vLLM at {worker.name} hears of {name} in state {state} from rank {worker.rank}")
        heard[worker.rank] = reason
        request.landed += 0 if at_p else outcome.bytes  # type: ignore[attr-defined]
        if len(heard) < len(engine.workers):
            return
        said = next((why for why in heard.values() if why), "")
        if at_p:
            request.p_state, request.p_said = "over", said
            self.give_back(engine, Home.DEVICE, request.p_pages)
            self.scribble(engine, request.p_pages)
            return
        request.d_state, request.d_said = "over", said
        if not said:
            self.check_rows(request, engine)
        self.give_back(engine, Home.HOST, request.host_pages)
        self.give_back(engine, Home.DEVICE, request.device_pages)

    def check_rows(self, request: Request, engine: Engine) -> None:
        """What D lacked is P's, byte for byte, at each of its ranks; the pool's rows were sent once for all of them."""
        plan = request.plan
        regions = engine.workers[0].placement.regions
        token_bytes = sum(r.row_bytes * (1 if r.home is Home.HOST else len(engine.workers)) for r in regions)
        if request.landed != (plan.tokens - plan.first) * token_bytes:
            raise Violation(5, f"{request.landed} bytes are reported for {plan}")
        for worker in engine.workers:
            self.check_rank(request, worker)

    def check_rank(self, request: Request, worker: Worker) -> None:
        """What one rank reads is P's, byte for byte."""
        plan = request.plan
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
            both = request.p_engine is not None and request.d_engine is not None
            if calm and both and not request.disturbed and (request.p_said or request.d_said):
                words = f"prefill: {request.p_said!r}, decode: {request.d_said!r}"
                raise Violation(6, f"{request.transfer} failed though nothing happened to it: {words}")
        for engine in (self.prefill, self.decode):
            if engine.busy:
                raise Violation(3, f"{engine.name} is not idle at {self.now:.1f} s")


def true_row(request: Request, region: int, token: int) -> bytes:
    """The bytes that P computes for a token: they tell request, region and token apart."""
    value = (request.index * 7919 + region * 131 + token * 3 + 1) & 0xFFFFFF
    return value.to_bytes(3, "little")[: LAYOUT.regions[region].row_bytes]


def _readable(frame: bytes) -> bool:
    """A flipped bit may by chance make another valid message; that is what keys are for, not this test."""
    from tidal_connector.control.messages import open_envelope, read_body
    from tidal_connector.errors import ProtocolError

    try:
        read_body(open_envelope(frame))
    except ProtocolError:
        return False
    return True
