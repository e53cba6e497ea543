# SPDX-License-Identifier: Apache-2.0
"""``tidal bench transfer``: what a prefill engine hands to the transfer plane, between two processes on this machine.

Each case is timed in turn with a plain socket that moves as many bytes into the same memory; after the last run the
target's bytes are compared with the source's. One thread here, and those of the plane.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from tidal_connector.cli.bench.figures import machine_facts, spread
from tidal_connector.cli.bench.target import ACKNOWLEDGED, LENGTH_BYTES
from tidal_connector.cli.bench.transfer_report import Case, TransferResult, gib, show
from tidal_connector.cli.interrupts import sigterm_interrupts
from tidal_connector.config import PageKind, PoolConfig, TidalConfig, child_environment
from tidal_connector.errors import ConfigError, TransferFailed
from tidal_connector.layout import Home, Region, RegionKind
from tidal_connector.memory.region import MemoryRegion, open_region
from tidal_connector.transfer.plane import TransferPlane, open_plane
from tidal_connector.transfer.runs import Run, plan_runs, split_runs

_HOST = "127.0.0.1"
_ROW = 1152
_CASES = ((16, False), (16, True), (128, False), (128, True))
_SPARE = 1.25  # pages beyond those that are used, so that scattered ones have gaps
_RECEIPT_S = 60.0
_END_S = 10.0
_STEP = 1 << 20


class TransferOptions(msgspec.Struct, frozen=True):
    """What the command was asked for; its help says what each means."""

    layers: int = 61
    tokens: int = 3000
    runs: int = 5
    seed: int = 5


def run_transfer(options: TransferOptions, console: Console) -> TransferResult:
    """Run the benchmark, print its table, and return the result.

    Raises:
        ConfigError: an option is out of range.
        TransferFailed: a write failed, or other bytes than the source's arrived.
    """
    if min(options.layers, options.tokens, options.runs) < 1:
        raise ConfigError("--layers, --tokens, --runs: expected at least 1")
    machine = machine_facts()
    config = TidalConfig()
    size = max(_pages(options, page) * page for page, _ in _CASES) * options.layers * _ROW
    news = threading.Semaphore(0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(sigterm_interrupts())
        status = stack.enter_context(console.status("starting the target"))
        source = stack.enter_context(open_region(size, PoolConfig(pages=PageKind.PLAIN)))
        _fill(source.buffer, options.seed)
        target = stack.enter_context(_target(size))
        plane = stack.enter_context(open_plane(config, _HOST, news.release))
        plane.register(source.address, source.length, Home.DEVICE, target=False)
        link = stack.enter_context(socket.create_connection((_HOST, target.port)))
        bench = _Bench(options, config, source, target, plane, news, link)
        cases = []
        for page, scattered in _CASES:
            cases.append(bench.case(page, scattered, status.update))
        threads = len(list(Path("/proc/self/task").iterdir()))
    result = TransferResult(
        bytes=options.layers * options.tokens * _ROW,
        layers=options.layers,
        tokens=options.tokens,
        row_bytes=_ROW,
        runs=options.runs,
        window=config.transfer.window,
        largest=config.transfer.descriptor_bytes,
        sender_threads=threads,
        target_pages=target.pages,
        machine=machine,
        cases=tuple(cases),
    )
    show(result, console)
    return result


class _Target:
    """The other process, and how to reach it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        hello = self._line()
        self.endpoint: str = hello["endpoint"]
        self.address: int = hello["address"]
        self.pages: str = hello["pages"]
        self.port: int = hello["port"]

    def digest(self, pieces: Sequence[tuple[int, int]]) -> str:
        """Return the digest of the pieces ``(offset, length)`` of its pool, in their order."""
        assert self._process.stdin is not None
        print(json.dumps(pieces), file=self._process.stdin, flush=True)
        found: str = self._line()
        return found

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TransferFailed(f"the target process ended with status {self._process.wait(_END_S)}; see its output")
        return json.loads(line)


@contextlib.contextmanager
def _target(size: int) -> Iterator[_Target]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tidal_connector.cli.bench.target", _HOST, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    try:
        yield _Target(process)
    finally:
        process.kill()
        process.communicate(timeout=_END_S)


class _Bench:
    """The two processes, connected."""

    def __init__(
        self,
        options: TransferOptions,
        config: TidalConfig,
        source: MemoryRegion,
        target: _Target,
        plane: TransferPlane,
        news: threading.Semaphore,
        link: socket.socket,
    ) -> None:
        self._options = options
        self._config = config
        self._source = source
        self._target = target
        self._plane = plane
        self._news = news
        self._link = link

    def case(self, page_tokens: int, scattered: bool, update: Callable[[str], None]) -> Case:
        """Time one geometry, in turn with the socket, after one run of each that is not counted."""
        layers = self._layers(page_tokens, scattered)
        name = "scattered" if scattered else "contiguous"
        size = sum(run.length for runs in layers for run in runs)
        plain, pushed = [], []
        for number in range(self._options.runs + 1):
            update(f"pages of {page_tokens} tokens, {name}: run {number} of {self._options.runs}")
            plain.append(gib(size, self._send([sum(run.length for run in runs) for runs in layers])))
            pushed.append(gib(size, self._push(layers)))
        self._verify(layers)
        writes = sum(1 for runs in layers for _ in split_runs(runs, self._config.transfer.descriptor_bytes))
        return Case(
            page_tokens=page_tokens,
            pages=name,
            descriptors=writes,
            descriptor_bytes=size // writes,
            ratio=spread(mine / other for mine, other in zip(pushed[1:], plain[1:], strict=True)),
            gib_per_s=spread(pushed[1:]),
            socket_gib_per_s=spread(plain[1:]),
        )

    def _layers(self, page_tokens: int, scattered: bool) -> list[list[Run]]:
        """Return each layer's runs, as the prefill room plans them."""
        count = _pages(self._options, page_tokens)
        mix = random.Random(self._options.seed)
        here, there = list(range(count)), list(range(count))
        if scattered:
            mix.shuffle(here)
            mix.shuffle(there)
        stride = page_tokens * _ROW
        found = []
        for layer in range(self._options.layers):
            offset = layer * count * stride
            mine, theirs = (
                Region(RegionKind.LATENT, layer, _ROW, home, base + offset, stride, page_tokens, count)
                for home, base in ((Home.DEVICE, self._source.address), (Home.HOST, self._target.address))
            )
            found.append(plan_runs(mine, theirs, here, there, 0, self._options.tokens))
        return found

    def _push(self, layers: list[list[Run]]) -> float:
        started = time.perf_counter()
        open_tickets = {self._plane.submit(self._target.endpoint, runs) for runs in layers}
        while open_tickets:
            if not self._news.acquire(timeout=_RECEIPT_S):
                raise TransferFailed(f"{len(open_tickets)} batches did not end within {_RECEIPT_S:g} s")
            for receipt in self._plane.poll():
                if not receipt.ok:
                    raise TransferFailed(f"a batch failed: {receipt.reason}")
                open_tickets.discard(receipt.ticket)
        return time.perf_counter() - started

    def _send(self, sizes: Sequence[int]) -> float:
        """Send as many bytes in as many pieces; return the seconds until they are acknowledged."""
        started = time.perf_counter()
        self._link.sendall(sum(sizes).to_bytes(LENGTH_BYTES, "little"))
        offset = 0
        for size in sizes:
            self._link.sendall(self._source.buffer[offset : offset + size])
            offset += size
        if self._link.recv(1) != ACKNOWLEDGED:
            raise TransferFailed("the target closed the socket")
        return time.perf_counter() - started

    def _verify(self, layers: list[list[Run]]) -> None:
        """Compare what landed with what was sent.

        Raises:
            TransferFailed: they differ.
        """
        runs = [run for layer in layers for run in layer]
        digest = hashlib.blake2b()
        for run in runs:
            start = run.source - self._source.address
            digest.update(self._source.buffer[start : start + run.length])
        if (
            self._target.digest([(run.destination - self._target.address, run.length) for run in runs])
            != digest.hexdigest()
        ):
            raise TransferFailed("other bytes landed than were sent")


def _fill(buffer: memoryview, seed: int) -> None:
    """Write noise, so that a row that landed at another place is seen."""
    source = random.Random(seed)
    for start in range(0, len(buffer), _STEP):
        piece = buffer[start : start + _STEP]
        piece[:] = source.randbytes(len(piece))


def _pages(options: TransferOptions, page_tokens: int) -> int:
    return round(-(-options.tokens // page_tokens) * _SPARE)
