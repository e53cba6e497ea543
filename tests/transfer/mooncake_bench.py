# SPDX-License-Identifier: Apache-2.0
"""Two real processes for the Mooncake tests: this one writes, a child owns the memory that both map."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tidal_connector.config import TransferConfig, child_environment
from tidal_connector.layout import Home
from tidal_connector.transfer.mooncake import MooncakePlane
from tidal_connector.transfer.plane import Receipt, Ticket
from tidal_connector.transfer.runs import Run

HOST = "127.0.0.1"
STALL_S = 3.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Target:
    """The child, and its memory seen from here."""

    process: subprocess.Popen[str]
    endpoint: str
    address: int
    memory: npt.NDArray[np.uint8]

    def connections(self) -> int | None:
        """Ask the child how many connections this host holds to its data port."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())["connections"]


@contextmanager
def target(folder: Path, size: int) -> Iterator[Target]:
    """Run a child with ``size`` bytes of registered zeros; it is gone afterwards in any case."""
    path = folder / "pool"
    with path.open("wb") as file:
        file.truncate(size)
    command = [sys.executable, "-m", "tests.transfer.target", str(path), HOST, str(STALL_S)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=child_environment(),
    )
    try:
        assert process.stdout is not None
        hello = json.loads(process.stdout.readline())
        memory = np.memmap(path, np.uint8, mode="r+")
        yield Target(process, hello["endpoint"], hello["address"], memory)
    finally:
        process.kill()
        process.communicate(timeout=20)


@dataclass
class Source:
    """The plane of this process, and its registered memory."""

    plane: MooncakePlane
    memory: npt.NDArray[np.uint8]
    news: threading.Semaphore
    receipts: dict[Ticket, Receipt] = field(default_factory=dict)
    order: list[Ticket] = field(default_factory=list)

    @property
    def address(self) -> int:
        return self.memory.ctypes.data

    def receipt(self, ticket: Ticket, timeout_s: float = 60) -> Receipt:
        """Wait for a receipt; a second one for a ticket is a failure."""
        while ticket not in self.receipts:
            assert self.news.acquire(timeout=timeout_s), "no receipt came"
            for receipt in self.plane.poll():
                assert receipt.ticket not in self.receipts
                self.receipts[receipt.ticket] = receipt
                self.order.append(receipt.ticket)
        return self.receipts[ticket]

    def send(self, there: Target, length: int | None = None) -> Ticket:
        """Send the first ``length`` bytes (all: None) to the same place there."""
        size = self.memory.size if length is None else length
        return self.plane.submit(there.endpoint, [Run(self.address, there.address, size)])


@contextmanager
def source(
    size: int,
    config: TransferConfig | None = None,
    stall_s: float = STALL_S,
    abandon_s: float | None = None,
) -> Iterator[Source]:
    """Open a plane here with ``size`` bytes of registered, seeded noise that has no zero and no 0x77."""
    news = threading.Semaphore(0)
    memory = np.random.default_rng(1).integers(1, 0x70, size, dtype=np.uint8)
    plane_config = config or TransferConfig()
    with MooncakePlane(plane_config, HOST, news.release, stall_s=stall_s, abandon_s=abandon_s) as plane:
        plane.register(memory.ctypes.data, size, Home.DEVICE, target=False)
        yield Source(plane, memory, news)
