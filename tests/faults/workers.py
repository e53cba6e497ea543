# SPDX-License-Identifier: Apache-2.0
"""The engines of the simulated world: each has one or more ranks, and each rank is a worker with sessions, machines and
memory of its own. The host pool of a decode engine is one memory that each of its ranks maps somewhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.faults.carried import SimPlane, SimWire
from tidal_connector.config import ControlConfig
from tidal_connector.control.handshake import Local
from tidal_connector.control.messages import Identity
from tidal_connector.control.party import Party
from tidal_connector.control.switchboard import Switchboard
from tidal_connector.decode.receiver import Receiver
from tidal_connector.ids import EngineId, Incarnation
from tidal_connector.layout import Home, KVLayout, Placement, Region, RegionKind, RegionSpec
from tidal_connector.metrics import Counters
from tidal_connector.prefill.sender import Sender

if TYPE_CHECKING:
    from tests.faults.world import World

SETTINGS = ControlConfig(lease_s=1.2, accept_s=4.0, park_s=6.0, hold_s=6.0, stall_s=3.0, quarantine_s=3.0)
DELIVER_S = 30.0
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


def address(rank: int) -> str:
    """Control address of a rank of P."""
    return f"p:{rank + 1}"


class Engine:
    """One life of an engine: its ranks, and the memory that they share.

    Attributes:
        pool: the host pool's bytes, of which each rank has a mapping.
    """

    def __init__(self, world: World, name: str, life: int, size: int) -> None:
        self.name = name
        self.life = life
        self.pool = bytearray(b"\x7e" * SPACE)
        self.workers = [Worker(world, self, rank, size) for rank in range(size)]

    @property
    def alive(self) -> bool:
        """Whether any of its ranks lives."""
        return any(worker.alive for worker in self.workers)

    @property
    def busy(self) -> bool:
        """Whether a living rank has something open."""
        return any(worker.alive and worker.party.busy() for worker in self.workers)

    @property
    def senders(self) -> list[Sender]:
        """The senders of the living ranks."""
        return [worker.sender for worker in self.workers if worker.alive and worker.sender is not None]

    @property
    def receivers(self) -> list[Receiver]:
        """The receivers of the living ranks."""
        return [worker.receiver for worker in self.workers if worker.alive and worker.receiver is not None]


class Worker:
    """One rank in one life of an engine."""

    def __init__(self, world: World, engine: Engine, rank: int, size: int) -> None:
        self.world = world
        self.engine = engine
        self.name = engine.name
        self.rank = rank
        self.alive = True
        self.base = 2 * SPACE * len(world.lives) + SPACE
        world.lives.append(self)
        self.bytes = bytearray(b"\x7e" * SPACE)
        self.placement = self._place()
        self.counters = Counters()
        self.plane = SimPlane(world, self)
        self.wire = SimWire(world, self)
        self.sender: Sender | None = None
        self.receiver: Receiver | None = None
        if self.name == P:
            self.sender = Sender(LAYOUT, self.placement, self.plane, self.counters, SETTINGS, rank=rank, size=size)
        else:
            quarantine_s = SETTINGS.quarantine_s or 0
            self.receiver = Receiver(
                LAYOUT,
                self.placement,
                self.plane,
                self.counters,
                SETTINGS,
                quarantine_s,
                DELIVER_S,
                rank=rank,
                size=size,
            )
        identity = Identity(EngineId(self.name), Incarnation(f"{self.name}-life-{engine.life}-rank-{rank}"), rank, size)
        siblings = tuple(address(other) for other in range(size))
        local = Local(identity, LAYOUT, self.placement, self.plane.endpoint(), SETTINGS.lease_s, siblings=siblings)
        self.board = Switchboard(local, self.wire, self.counters, self.sender, self.receiver)
        self.party: Party[object] = self.sender or self.receiver  # type: ignore[assignment]
        self.party.attach(self.board, lambda: None)

    def _place(self) -> Placement:
        size, at = PAGE_TOKENS[self.name], 0
        regions: list[Region] = []
        for spec in LAYOUT.regions:
            home = Home.HOST if spec.kind is RegionKind.LATENT and self.name == D else Home.DEVICE
            base = self.base + at + (SPACE if home is Home.HOST else 0)  # the pool is mapped behind the device
            regions.append(
                Region(spec.kind, spec.layer, spec.row_bytes, home, base, size * spec.row_bytes, size, PAGES)
            )
            at += size * spec.row_bytes * PAGES
        return Placement(tuple(regions))

    def _memory(self, address: int) -> tuple[bytearray, int]:
        place = address - self.base
        return (self.bytes, place) if place < SPACE else (self.engine.pool, place - SPACE)

    def load(self, address: int, length: int) -> bytes:
        """Read memory."""
        memory, place = self._memory(address)
        return bytes(memory[place : place + length])

    def store(self, address: int, body: bytes) -> None:
        """Write memory."""
        memory, place = self._memory(address)
        memory[place : place + len(body)] = body

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


class Violation(AssertionError):
    """An invariant of the protocol does not hold."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"invariant {number}: {text}")
        self.number = number
