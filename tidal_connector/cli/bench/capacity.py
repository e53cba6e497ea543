# SPDX-License-Identifier: Apache-2.0
"""``tidal bench capacity``: how many requests run at once in one device KV budget, and how fast, with the latents in
the host pool and with all of them on the device.

Two engines with the same budget get the same requests at once, more than either can hold, one engine after the other.
A thread looks at the engine while it works.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tidal_connector.cli.bench.capacity_plot import draw
from tidal_connector.cli.bench.capacity_report import Capacity, Sample, Served, layout_bound, served, show
from tidal_connector.cli.bench.engines import START_S, complete, random_prompts, single_engine, waiting
from tidal_connector.cli.bench.figures import machine_facts
from tidal_connector.cli.demo.expect import row_bytes
from tidal_connector.cli.interrupts import sigterm_interrupts
from tidal_connector.cluster.hugepages import extra_hugepages
from tidal_connector.cluster.launch import ServerProcess, wait_ready
from tidal_connector.cluster.stack import StackSettings, read_metrics
from tidal_connector.errors import ConfigError, TidalError

_BLOCK_SIZE = 16
_LOOK_S = 0.25
_SETTLE_S = 10.0
_WARM_UP_TOKENS = 64


class CapacityOptions(msgspec.Struct, frozen=True):
    """What the command was asked for; its help says what each means."""

    fit: int = 2
    requests: int = 24
    output: int = 640
    layers: int = 4
    top_k: int = 64
    slots: int | None = None
    arch: str = "v32"
    dtype: str = "bfloat16"
    seed: int = 23
    keep_logs: Path | None = None
    plot: Path | None = None

    @property
    def slots_of_request(self) -> int:
        """Slots of a request: the connector's default where not said."""
        return self.slots or 2 * self.top_k

    @property
    def context(self) -> int:
        """Tokens of a request."""
        return 16 * self.slots_of_request


def run_capacity(options: CapacityOptions, console: Console) -> Capacity:
    """Run the benchmark, print its table, draw its picture if one is wanted, and return the result.

    Raises:
        ConfigError: an option is out of range.
        TidalError: an engine did not start, or a request failed.
        KeyboardInterrupt: Ctrl-C or SIGTERM; everything is undone.
    """
    _check(options)
    machine = machine_facts()
    with contextlib.ExitStack() as stack:
        stack.enter_context(sigterm_interrupts())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidal-bench-")))
        model = _model(options, folder / "model")
        rows = row_bytes(model, options.dtype)
        blocks = options.fit * -(-options.context // _BLOCK_SIZE) + 1  # vLLM keeps one for itself
        budget = blocks * _BLOCK_SIZE * rows.moved
        bound = layout_bound(rows.latent, rows.index / rows.layers, options.slots_of_request, options.context)
        seqs = int(options.fit * bound)
        pool = (seqs + 1) * options.context * rows.layers * rows.latent
        settings = _settings(options, model, folder, budget, seqs)
        console.print(stack.enter_context(extra_hugepages(pool)))
        selection = {} if options.slots is None else {"slots": options.slots}
        tidal: dict[str, Any] = {"pool": {"bytes": pool}, "selection": selection}
        engines = {
            "off": single_engine("off", settings, {"offload": "off"}),
            "on": single_engine("on", settings, tidal | {"offload": "on"}),
        }
        with console.status("") as status:
            for engine in engines.values():
                stack.enter_context(engine)
            stack.callback(_begin_stop, engines)
            wait_ready(list(engines.values()), START_S, waiting(status.update))
        found = {name: _serve(options, engine, name, console) for name, engine in engines.items()}
        layout = read_metrics(engines["on"])
        stack.enter_context(console.status("ending the engines"))
    layers = layout["tidal:kv_layers"]
    index = layout["tidal:device_bytes_per_token"] / layers
    latent = layout["tidal:kv_bytes_per_token"] / layers - index
    on, off = found["on"], found["off"]
    bound = layout_bound(latent, index, options.slots_of_request, options.context)
    ratio = on.peak / off.peak
    result = Capacity(
        concurrent_requests_on_over_off=ratio,
        concurrent_requests_over_bound=ratio / bound,
        bound=bound,
        throughput_on_over_off=on.tokens_per_s / off.tokens_per_s,
        device_kv_on_over_off=on.device_kv_bytes / off.device_kv_bytes,
        budget_bytes=budget,
        latent_bytes=latent,
        index_bytes=index,
        layers=int(layers),
        top_k=options.top_k,
        slots=options.slots_of_request,
        context=options.context,
        prompt=options.context - options.output,
        output=options.output,
        requests=options.requests,
        max_num_seqs=seqs,
        arch=options.arch,
        dtype=options.dtype,
        machine=machine,
        on=on,
        off=off,
    )
    show(result, console)
    draw(result, options.plot)
    return result


def _check(options: CapacityOptions) -> None:
    """Refuse what would not measure capacity.

    Raises:
        ConfigError: an option is out of range.
    """
    if options.fit < 1 or options.requests <= options.fit or options.slots_of_request < options.top_k:
        raise ConfigError(
            f"--fit {options.fit} --requests {options.requests} --slots {options.slots_of_request}: expected at least "
            f"1, more requests than fit, and at least top-k {options.top_k} slots"
        )
    # With shorter prompts the engine without the pool starts one more, and preempts it later: it would lose by that.
    longest = options.context // (options.fit + 1)
    if not 1 <= options.output < longest:
        raise ConfigError(
            f"--output {options.output}: expected 1 to {longest - 1}, so that no more than {options.fit} prompts fit"
        )


def _model(options: CapacityOptions, folder: Path) -> Path:
    from tidal_connector.modelmaker.api import make_model

    make_model(folder, arch=options.arch, layers=options.layers, topk=options.top_k, dtype=options.dtype)
    return folder


def _settings(options: CapacityOptions, model: Path, folder: Path, budget: int, seqs: int) -> StackSettings:
    scratch = folder / "scratch"
    scratch.mkdir()
    return StackSettings(
        model=model,
        logs=options.keep_logs or folder / "logs",
        dtype=options.dtype,
        block_size=_BLOCK_SIZE,
        max_model_len=options.context,
        max_num_seqs=seqs,
        kv_bytes=budget,
        environment={"TMPDIR": str(scratch)},
    )


def _serve(options: CapacityOptions, engine: ServerProcess, name: str, console: Console) -> Served:
    """Send all requests to one engine and watch it until the last answer."""
    prompts = random_prompts(options.requests, options.context - options.output, options.seed)
    complete(engine, random_prompts(1, _WARM_UP_TOKENS, options.seed + 1), 4)
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"latents in the pool: {name}", total=options.requests)
        with _watched(engine) as samples:
            began = time.monotonic()
            complete(engine, prompts, options.output, lambda: progress.advance(task))
            seconds = time.monotonic() - began
    tidal, blocks = read_metrics(engine), kv_blocks(engine)
    index, selection = (int(tidal.get(f"tidal:{what}_cache_bytes", 0)) for what in ("index", "selection"))
    return served(
        samples,
        seconds,
        options.requests * options.output,
        index_bytes=index,
        selection_bytes=selection,
        device_kv_bytes=int(tidal["tidal:device_kv_bytes"]),
        pool_bytes=int(tidal["tidal:pool_bytes"]),
        kv_blocks=blocks,
    )


@contextlib.contextmanager
def _watched(engine: ServerProcess) -> Iterator[list[Sample]]:
    """Look at an engine several times a second while the block runs; yields what is seen."""
    samples: list[Sample] = []
    ended = threading.Event()
    began = time.monotonic()

    def watch() -> None:
        while not ended.wait(_LOOK_S):
            with contextlib.suppress(TidalError):  # a busy engine that does not answer once is looked at again
                samples.append(sample_of(read_metrics(engine, "vllm:"), time.monotonic() - began))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield samples
    finally:
        ended.set()
        watcher.join(_SETTLE_S)


def sample_of(metrics: Mapping[str, float], at: float) -> Sample:
    """Read what vLLM's metrics say at a moment, in seconds since the requests were sent."""
    return Sample(
        at=at,
        running=int(metrics.get("vllm:num_requests_running", 0)),
        waiting=int(metrics.get("vllm:num_requests_waiting", 0)),
        generated=int(metrics.get("vllm:generation_tokens_total", 0)),
        preempted=int(metrics.get("vllm:num_preemptions_total", 0)),
    )


def kv_blocks(engine: ServerProcess) -> int:
    """Return how many KV blocks an engine has.

    Raises:
        TidalError: its metrics do not say.
    """
    text = httpx.get(engine.url + "/metrics", timeout=10.0, trust_env=False).text
    for line in text.splitlines():
        if line.startswith("vllm:cache_config_info{"):
            return int(line.partition('num_gpu_blocks="')[2].partition('"')[0])
    raise TidalError(f"{engine.name}: its metrics do not say how many KV blocks it has")


def _begin_stop(servers: Mapping[str, ServerProcess]) -> None:
    for server in servers.values():
        server.begin_stop()
