# SPDX-License-Identifier: Apache-2.0
"""``tidal bench prefill-overhead``: the same prompts through an engine without the connector and through one that
pushes.

Starts a whole deployment, times pairs in alternating order, and ends it. Both legs are sent by hand, so that the
prefill leg can be timed by itself.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
from rich.console import Console
from rich.progress import track

from tidal_connector.cli.bench.figures import cpu_seconds, load, machine_facts, spread
from tidal_connector.cli.bench.overhead_report import BESIDE, RATIO_BOUND, Overhead, Pair, ratios, show
from tidal_connector.cli.demo.expect import RowBytes, row_bytes
from tidal_connector.cli.interrupts import sigterm_interrupts
from tidal_connector.cluster.launch import ServerProcess
from tidal_connector.cluster.serving import engine_environment
from tidal_connector.cluster.stack import MODEL_NAME, PREFILL_ENGINE, Stack, StackSettings, read_metrics
from tidal_connector.errors import ConfigError, TidalError
from tidal_connector.ids import new_transfer_id
from tidal_connector.vllm_plugin.params import decode_params, prefill_params

_WARM_UP = 2
_ANSWER_S = 300.0
_SETTLE_S = 20.0
_POLL_S = 0.1
_HEAD_START_S = 0.05
_BYTES = 256  # the tokenizer's tokens 0 to 255
_TIME = "vllm:request_prefill_time_seconds"
_PUSHED = "tidal:bytes_pushed_total"
_LANDED = "tidal:bytes_landed_before_prefill_end_total"


class OverheadOptions(msgspec.Struct, frozen=True):
    """What the command was asked for; its help says what each means."""

    tokens: int = 3000
    pairs: int = 7
    arch: str = "v32"
    layers: int | None = None
    dtype: str = "float32"
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    seed: int = 11
    keep_logs: Path | None = None


def run_overhead(options: OverheadOptions, console: Console) -> Overhead:
    """Run the benchmark, print its table, and return the result.

    Raises:
        ConfigError: an option is out of range.
        TidalError: an engine did not start, or a request failed.
        KeyboardInterrupt: Ctrl-C or SIGTERM; everything is undone.
    """
    if options.tokens < 2 or options.pairs < 1:
        raise ConfigError(f"--tokens {options.tokens} --pairs {options.pairs}: expected at least 2 tokens and 1 pair")
    machine = machine_facts()
    with contextlib.ExitStack() as stack:
        stack.enter_context(sigterm_interrupts())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidal-bench-")))
        scratch = folder / "scratch"
        scratch.mkdir()
        settings = StackSettings(
            model=_model(options, folder / "model"),
            logs=options.keep_logs or folder / "logs",
            dtype=options.dtype,
            block_size=options.block_size,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=max(4096, options.tokens + 64),
            environment={"TMPDIR": str(scratch)},
        )
        with console.status("starting the engines") as status:
            servers = stack.enter_context(Stack(settings, _waiting(status.update)))
        rows = row_bytes(settings.model, options.dtype)
        client = stack.enter_context(httpx.Client(timeout=_ANSWER_S, trust_env=False))
        meter = Meter(servers, rows, client)
        prompts = _prompts(options)
        for prompt in prompts[:_WARM_UP]:
            meter.pair(prompt, plain_first=True)
        before = meter.settled()
        timed = enumerate(prompts[_WARM_UP:])
        pairs = tuple(
            meter.pair(prompt, plain_first=number % 2 == 0)
            for number, prompt in track(timed, "timing pairs", options.pairs, console=console, transient=True)
        )
        after = meter.settled()
        stack.enter_context(console.status("ending the processes"))
    ratio, engine_ratio = ratios(pairs)
    pushed = int(after[_PUSHED] - before[_PUSHED])
    result = Overhead(
        ratio=ratio,
        engine_ratio=engine_ratio,
        bound=RATIO_BOUND,
        plain_s=spread(pair.plain_s for pair in pairs),
        push_s=spread(pair.push_s for pair in pairs),
        plain_engine_s=spread(pair.plain_engine_s for pair in pairs),
        push_engine_s=spread(pair.push_engine_s for pair in pairs),
        plain_cpu_s=spread(pair.plain_cpu_s for pair in pairs),
        push_cpu_s=spread(pair.push_cpu_s for pair in pairs),
        decode_cpu_s=spread(pair.decode_cpu_s for pair in pairs),
        bytes_pushed=pushed,
        bytes_expected=options.pairs * rows.prompt(options.tokens),
        landed_before_prefill_end=(after[_LANDED] - before[_LANDED]) / pushed if pushed else 0.0,
        tokens=options.tokens,
        arch=options.arch,
        layers=rows.layers,
        dtype=options.dtype,
        block_size=options.block_size,
        max_num_batched_tokens=options.max_num_batched_tokens,
        threads=engine_environment().get("OMP_NUM_THREADS", "all cores"),
        beside=BESIDE,
        machine=machine,
        pairs=pairs,
    )
    show(result, console)
    return result


class _Timed(NamedTuple):
    """One request: seconds to its answer, the engine's own prefill seconds, its processor seconds."""

    seconds: float
    engine: float
    cpu: float


class _Pushed(NamedTuple):
    """A push: its prefill leg, and the decode leg beside it in seconds and in processor seconds."""

    prefill: _Timed
    decode: float
    decode_cpu: float


class Meter:
    """Times prompts on a started deployment; one request is under way at a time, but for the two legs of a push.

    Args:
        servers: the deployment, with its reference engine.
        rows: bytes of a prompt's rows.
        client: keeps one connection to each engine, so that no request pays for making one.
    """

    def __init__(self, servers: Stack, rows: RowBytes, client: httpx.Client) -> None:
        assert servers.reference is not None
        self._servers = servers
        self._reference = servers.reference
        self._rows = rows
        self._client = client
        self._moved = 0

    def pair(self, prompt: Sequence[int], *, plain_first: bool) -> Pair:
        """Time one prompt both ways.

        Raises:
            TidalError: a request failed, or the engines' metrics do not show it.
        """
        before = load()
        if plain_first:
            plain = self._plain(prompt)
        push = self._push(prompt)
        if not plain_first:
            plain = self._plain(prompt)
        return Pair(
            first="plain" if plain_first else "push",
            plain_s=plain.seconds,
            push_s=push.prefill.seconds,
            plain_engine_s=plain.engine,
            push_engine_s=push.prefill.engine,
            plain_cpu_s=plain.cpu,
            push_cpu_s=push.prefill.cpu,
            decode_cpu_s=push.decode_cpu,
            decode_s=push.decode,
            load=before,
        )

    def settled(self) -> dict[str, float]:
        """Return the prefill engine's metrics once they show all bytes that were sent.

        An engine reports at its next step, so the numbers may lag behind the answers for a moment.

        Raises:
            TidalError: they do not within a bound.
        """
        prefill = self._servers.prefill
        return _until(prefill, lambda found: found.get(_PUSHED, 0) >= self._moved, f"{self._moved} pushed bytes")

    def _plain(self, prompt: Sequence[int]) -> _Timed:
        return self._timed(self._reference, lambda: self._ask(self._reference, prompt))

    def _push(self, prompt: Sequence[int]) -> _Pushed:
        transfer = new_transfer_id()
        prefill = prefill_params(transfer)
        decode = decode_params(transfer, PREFILL_ENGINE, self._servers.prefill_control)
        with ThreadPoolExecutor(1) as pool:
            # The decode leg goes first and gets through this process before the timed one needs the interpreter.
            started = time.monotonic()
            cpu = cpu_seconds(self._servers.decode.pids())
            other = pool.submit(self._ask, self._servers.decode, prompt, decode)
            time.sleep(_HEAD_START_S)
            prefill_leg = self._timed(self._servers.prefill, lambda: self._ask(self._servers.prefill, prompt, prefill))
            other.result()
            whole = time.monotonic() - started
            cpu = cpu_seconds(self._servers.decode.pids()) - cpu
        self._moved += self._rows.prompt(len(prompt))
        self.settled()
        return _Pushed(prefill_leg, whole, cpu)

    def _ask(self, server: ServerProcess, prompt: Sequence[int], transfer: dict[str, str] | None = None) -> None:
        body: dict[str, Any] = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": 1, "temperature": 0.0}
        if transfer is not None:
            body["kv_transfer_params"] = transfer
        try:
            answer = self._client.post(server.url + "/v1/completions", json=body)
        except httpx.TransportError as error:
            raise TidalError(f"{server.name}: no answer to a prompt of {len(prompt)} tokens: {error!r}") from None
        if answer.status_code != httpx.codes.OK:
            raise TidalError(f"{server.name}: {answer.status_code} for {len(prompt)} tokens: {answer.text[:500]}")

    def _timed(self, server: ServerProcess, act: Callable[[], object]) -> _Timed:
        before = read_metrics(server, _TIME)
        wanted = before.get(f"{_TIME}_count", 0) + 1
        cpu = cpu_seconds(server.pids())
        started = time.monotonic()
        act()
        seconds = time.monotonic() - started
        cpu = cpu_seconds(server.pids()) - cpu
        after = _until(server, lambda found: found.get(f"{_TIME}_count", 0) >= wanted, "the request", _TIME)
        return _Timed(seconds, after[f"{_TIME}_sum"] - before.get(f"{_TIME}_sum", 0), cpu)


def _until(
    server: ServerProcess, enough: Callable[[dict[str, float]], bool], what: str, prefix: str = "tidal:"
) -> dict[str, float]:
    deadline = time.monotonic() + _SETTLE_S
    while True:
        found = read_metrics(server, prefix)
        if enough(found):
            return found
        if time.monotonic() > deadline:
            raise TidalError(f"{server.name}: its metrics do not show {what} within {_SETTLE_S:g} s: {found}")
        time.sleep(_POLL_S)


def _model(options: OverheadOptions, folder: Path) -> Path:
    from tidal_connector.modelmaker.api import make_model

    make_model(folder, arch=options.arch, layers=options.layers, dtype=options.dtype)
    return folder


def _prompts(options: OverheadOptions) -> list[list[int]]:
    """Fresh random bytes for every pair, so that nothing is cached anywhere."""
    source = random.Random(options.seed)
    return [[source.randrange(_BYTES) for _ in range(options.tokens)] for _ in range(_WARM_UP + options.pairs)]


def _waiting(update: Callable[[str], None]) -> Callable[[list[str], float], None]:
    def show_waiting(names: list[str], seconds: float) -> None:
        update(f"waiting for {', '.join(names)} ({seconds:.0f} s)")

    return show_waiting
