# SPDX-License-Identifier: Apache-2.0
"""``tidal bench gather``: what a decode step pays for planning (``ops.resolve``) and for the rows that it misses
(``ops.copy_rows``), beside memcpy, torch and numpy. No engine; one thread, and those that the operators are told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tidal_connector.cli.bench.figures import machine_facts
from tidal_connector.cli.bench.gather_copy import CopyBench, fill
from tidal_connector.cli.bench.gather_plot import draw
from tidal_connector.cli.bench.gather_report import (
    ContextPoint,
    CopyCase,
    Gather,
    ResolveCase,
    context_text,
    gather_result,
)
from tidal_connector.cli.bench.gather_resolve import WARM_UP, Steps, context_sweep, resolve_case
from tidal_connector.cli.bench.gather_tables import show
from tidal_connector.cli.bench.rounds import WARM_UP as COPY_WARM_UP
from tidal_connector.cli.interrupts import sigterm_interrupts
from tidal_connector.cluster.hugepages import extra_hugepages
from tidal_connector.config import PoolConfig, parse_bytes
from tidal_connector.errors import ConfigError
from tidal_connector.memory.region import MemoryRegion, open_region

LAYERS = 61
ROW_BYTES = (1152, 656)
BATCHES = (1, 8)
THREADS = (1, 2)
CONTEXTS = tuple(1 << power for power in (13, 15, 17, 19, 20))

_HIT_RATE = 0.9


class GatherOptions(msgspec.Struct, frozen=True):
    """What the command was asked for; its help says what each means."""

    pool: str = "2GiB"
    top_k: int = 2048
    repetitions: int = 40
    seed: int = 3
    plot: Path | None = None

    @property
    def slots(self) -> int:
        """Slots of a request: the connector's default."""
        return 2 * self.top_k


def run_gather(options: GatherOptions, console: Console) -> Gather:
    """Run the benchmark, print its tables, draw its picture if one is wanted, and return the result.

    Raises:
        ConfigError: an option is out of range.
        PoolExhausted: the pool's memory cannot be had.
        NativeOpMissing: the native module is not there.
        TidalError: an operator did something else than what it was compared with.
    """
    size = parse_bytes("--pool", options.pool)
    needed = LAYERS * max(ROW_BYTES) * options.top_k * max(BATCHES)
    if not 64 <= options.top_k <= 2048 or options.top_k % 64 or options.repetitions < 1:
        raise ConfigError(
            f"--top-k {options.top_k} --repetitions {options.repetitions}: expected a multiple of 64 from 64 to 2048, "
            "and at least 1"
        )
    if size < needed:
        raise ConfigError(
            f"--pool {options.pool}: expected at least {needed} bytes, the rows of one batch in each of {LAYERS} layers"
        )
    machine = machine_facts()
    with contextlib.ExitStack() as stack:
        stack.enter_context(sigterm_interrupts())
        console.print(stack.enter_context(extra_hugepages(size)))
        pool = stack.enter_context(open_region(size, PoolConfig()))
        progress = stack.enter_context(
            Progress(
                TextColumn("{task.description:30}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
        )
        cases = len(BATCHES) * len(THREADS)
        rounds = options.repetitions + COPY_WARM_UP
        steps = options.repetitions + WARM_UP
        task = progress.add_task("", total=len(ROW_BYTES) * cases * rounds + cases * steps + steps)

        def tell(what: str) -> None:
            progress.update(task, description=what)

        def done() -> None:
            progress.advance(task)

        result = gather_result(
            list(_copies(options, pool, tell, done)),
            list(_resolves(options, tell, done)),
            _contexts(options, tell, done),
            pool=pool.report.line(),
            pool_bytes=pool.report.wanted,
            top_k=options.top_k,
            slots=options.slots,
            hit_rate=_HIT_RATE,
            repetitions=options.repetitions,
            machine=machine,
        )
    show(result, console)
    draw(result, options.plot)
    return result


def _copies(
    options: GatherOptions, pool: MemoryRegion, tell: Callable[[str], None], done: Callable[[], None]
) -> Iterator[CopyCase]:
    tell("filling the pool")
    memory = np.frombuffer(pool.buffer, np.uint8)[: pool.report.wanted]
    fill(memory)
    for row_bytes in ROW_BYTES:
        for batch in BATCHES:
            bench = CopyBench(memory, LAYERS, row_bytes, options.top_k, options.slots, batch, options.seed)
            for threads in THREADS:
                tell(f"gather {row_bytes} B, batch {batch}, {threads} threads")
                yield bench.case(threads, options.repetitions, done)
            bench.verify()


def _resolves(options: GatherOptions, tell: Callable[[str], None], done: Callable[[], None]) -> Iterator[ResolveCase]:
    for batch in BATCHES:
        steps = _steps(options, CONTEXTS[2], batch)
        for threads in THREADS:
            tell(f"resolve, batch {batch}, {threads} threads")
            yield resolve_case(steps, threads, options.repetitions, done)


def _contexts(options: GatherOptions, tell: Callable[[str], None], done: Callable[[], None]) -> list[ContextPoint]:
    runs = []
    for context in CONTEXTS:
        tell(f"drawing selections of {context_text(context)}")
        runs.append(_steps(options, context, max(BATCHES)))
    tell("resolve over the context")
    return context_sweep(runs, options.repetitions, done)


def _steps(options: GatherOptions, context: int, batch: int) -> Steps:
    return Steps(
        context=context,
        batch=batch,
        top_k=options.top_k,
        slots=options.slots,
        hit_rate=_HIT_RATE,
        count=options.repetitions + WARM_UP,
        seed=options.seed,
    )
