# SPDX-License-Identifier: Apache-2.0
"""``tidal bench decode``: time per output token with the latents in the host pool, beside the same engine with all of
them on the device.

All engines of a model run at the same time, but one decodes at a time, in turn with the others. Prompts stay in the
engines' prefix caches, so that they are prefilled once.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tidal_connector.cli.bench.decode_plot import draw
from tidal_connector.cli.bench.decode_report import (
    TPOT_BOUND,
    BatchCase,
    Decode,
    ModelCase,
    Moved,
    Round,
    batch_case,
    moved,
    prefetch_gain,
    show,
    show_model,
    worst,
)
from tidal_connector.cli.bench.engines import START_S, at_once, random_prompts, single_engine, token_times, waiting
from tidal_connector.cli.bench.figures import machine_facts
from tidal_connector.cli.demo.expect import RowBytes, row_bytes
from tidal_connector.cli.interrupts import sigterm_interrupts
from tidal_connector.cluster.hugepages import extra_hugepages
from tidal_connector.cluster.launch import ServerProcess, wait_ready
from tidal_connector.cluster.serving import engine_environment
from tidal_connector.cluster.stack import StackSettings, read_metrics
from tidal_connector.errors import ConfigError

OFF = "an engine without the connector, all latents on the device"

_SPARE = 1.3  # blocks for the answers of earlier rounds, which the prefix cache keeps for a while
_BLOCK_SIZE = 16
_INDEX_ROW = 132
_FULL_BATCH, _MOST_ROUNDS = 8, 6  # a small batch is done sooner, and noise is a larger part of its time
_CLOCK = "vllm:inter_token_latency_seconds"


class DecodeOptions(msgspec.Struct, frozen=True):
    """What the command was asked for; its help says what each means."""

    archs: tuple[str, ...] = ("v32", "glm")
    batches: tuple[int, ...] = (1, 4, 8)
    context: int = 4000
    layers: int = 8
    top_k: int = 256
    slots: int | None = None
    dtype: str = "float32"
    tokens: int = 33
    repetitions: int = 5
    seed: int = 17
    keep_logs: Path | None = None
    plot: Path | None = None


def run_decode(options: DecodeOptions, console: Console) -> Decode:
    """Run the benchmark, print its tables, draw its picture if one is wanted, and return the result.

    Raises:
        ConfigError: an option is out of range.
        TidalError: an engine did not start, or a request failed.
        KeyboardInterrupt: Ctrl-C or SIGTERM; everything is undone.
    """
    if options.context < 2 * options.top_k or options.tokens < 3 or options.repetitions < 1 or not options.archs:
        raise ConfigError(
            f"--context {options.context} --tokens {options.tokens} --repetitions {options.repetitions}: expected a "
            f"context of at least twice the {options.top_k} rows that are selected, 3 tokens, 1 repetition"
        )
    if not options.batches or not all(1 <= batch <= 64 for batch in options.batches):
        raise ConfigError(f"--batch {', '.join(map(str, options.batches))}: expected sizes of 1 to 64")
    machine = machine_facts()
    with contextlib.ExitStack() as stack:
        stack.enter_context(sigterm_interrupts())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidal-bench-")))
        models = tuple(_model(options, arch, folder / arch, console) for arch in options.archs)
    result = Decode(
        tpot_on_over_off=worst(models),
        prefetch_on_over_off=prefetch_gain(models),
        bound=TPOT_BOUND,
        context=options.context,
        tokens=options.tokens,
        repetitions=options.repetitions,
        dtype=options.dtype,
        off=OFF,
        threads=engine_environment().get("OMP_NUM_THREADS", "all cores"),
        machine=machine,
        models=models,
    )
    show(result, console)
    draw(result, options.plot)
    return result


def _model(options: DecodeOptions, arch: str, folder: Path, console: Console) -> ModelCase:
    """Start the engines of one model, time them at each batch size, and end them."""
    from tidal_connector.modelmaker.api import make_model

    model = folder / "model"
    make_model(model, arch=arch, layers=options.layers, topk=options.top_k, dtype=options.dtype)
    rows = row_bytes(model, options.dtype)
    most = max(options.batches)
    tokens = round(_SPARE * most * (options.context + options.tokens + _BLOCK_SIZE))
    pool = tokens * rows.layers * rows.latent
    scratch = folder / "scratch"
    scratch.mkdir()
    settings = StackSettings(
        model=model,
        logs=(options.keep_logs or folder / "logs") / arch,
        dtype=options.dtype,
        block_size=_BLOCK_SIZE,
        max_model_len=options.context + options.tokens + 64,
        max_num_seqs=most,
        prefix_caching=True,
        kv_bytes=tokens * rows.moved,
        environment={"TMPDIR": str(scratch)},
    )
    groups = rows.index // _INDEX_ROW
    with contextlib.ExitStack() as stack:
        pools = 1 if groups == rows.layers else 2
        console.print(f"{arch}: {stack.enter_context(extra_hugepages(pools * pool))}")
        engines = _engines(options, settings, pool, groups < rows.layers)
        with console.status("") as status:
            for engine in engines.values():
                stack.enter_context(engine)
            stack.callback(_begin_stop, list(engines.values()))
            wait_ready(list(engines.values()), START_S, waiting(status.update))
        meter = _Meter(options, engines, rows, groups, console)
        cases = meter.cases(arch)
        stack.enter_context(console.status("ending the engines"))
    found = ModelCase(
        arch=arch,
        layers=rows.layers,
        groups=groups,
        top_k=options.top_k,
        slots=options.slots or 2 * options.top_k,
        row_bytes=rows.latent,
        context=options.context,
        cases=cases,
    )
    show_model(found, console)
    return found


def _engines(options: DecodeOptions, settings: StackSettings, pool: int, shared: bool) -> dict[str, ServerProcess]:
    """Return the engines by name; one without prefetch only where layers share a selection."""
    selection: dict[str, Any] = {} if options.slots is None else {"slots": options.slots}
    tidal: dict[str, Any] = {"offload": "on", "pool": {"bytes": pool}, "selection": selection}
    found = {
        "on": single_engine("on", settings, tidal),
        "off": single_engine("off", settings),
    }
    if shared:
        late = tidal | {"selection": selection | {"prefetch": False}}
        found["no prefetch"] = single_engine("no-prefetch", settings, late)
    return found


class _Meter:
    """Times the engines of one model, one after the other."""

    def __init__(
        self,
        options: DecodeOptions,
        engines: Mapping[str, ServerProcess],
        rows: RowBytes,
        groups: int,
        console: Console,
    ) -> None:
        self._options = options
        self._engines = engines
        self._rows = rows
        self._groups = groups
        self._console = console
        self._prompts = random_prompts(max(options.batches), options.context, options.seed)

    def cases(self, arch: str) -> tuple[BatchCase, ...]:
        """Prefill all prompts on all engines, then time each batch size."""
        columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        rounds = sum(1 + self._rounds(batch) for batch in self._options.batches) * len(self._engines)
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(f"{arch}: prefill", total=rounds + len(self._engines) * len(self._prompts))

            def done() -> None:
                progress.advance(task)

            with ThreadPoolExecutor(len(self._engines)) as pool:
                for _ in pool.map(lambda engine: self._prefill(engine, done), self._engines.values()):
                    pass
            found = []
            for batch in self._options.batches:
                progress.update(task, description=f"{arch}: batch {batch}")
                found.append(self._case(batch, done))
        return tuple(found)

    def _prefill(self, engine: ServerProcess, done: Callable[[], None]) -> None:
        for prompt in self._prompts:
            at_once(engine, [prompt], 1)
            done()

    def _case(self, batch: int, done: Callable[[], None]) -> BatchCase:
        prompts = self._prompts[:batch]
        found = self._count(self._engines["on"], prompts)
        done()
        for name, engine in self._engines.items():
            if name != "on":
                at_once(engine, prompts, self._options.tokens)
                done()
        rounds: dict[str, list[Round]] = {name: [] for name in self._engines}
        names = list(self._engines)
        for number in range(self._rounds(batch)):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                rounds[name].append(self._round(self._engines[name], prompts))
                done()
        return batch_case(batch, rounds, found)

    def _rounds(self, batch: int) -> int:
        return self._options.repetitions * min(_MOST_ROUNDS, -(-_FULL_BATCH // batch))

    def _round(self, engine: ServerProcess, prompts: Sequence[Sequence[int]]) -> Round:
        before = read_metrics(engine, _CLOCK)
        seconds = token_times(at_once(engine, prompts, self._options.tokens))
        after = read_metrics(engine, _CLOCK)
        spent, tokens = (after[_CLOCK + end] - before.get(_CLOCK + end, 0.0) for end in ("_sum", "_count"))
        return Round(tuple(seconds), spent / tokens)

    def _count(self, engine: ServerProcess, prompts: Sequence[Sequence[int]]) -> Moved:
        """Read the engine's counters around the steps in which all prompts decode; nothing is timed meanwhile."""
        before: dict[str, float] = {}
        at_once(engine, prompts, self._options.tokens, lambda: before.update(read_metrics(engine)))
        return moved(before, read_metrics(engine), len(prompts) * self._options.top_k * self._groups)


def _begin_stop(servers: Sequence[ServerProcess]) -> None:
    for server in servers:
        server.begin_stop()
