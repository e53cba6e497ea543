# SPDX-License-Identifier: Apache-2.0
"""``tidal bench proxy``: what a request takes longer through the proxy, and many streams at once through it.

Starts engine stand-ins, which answer at once, and the proxy, each as a process of its own, and ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from tidal_connector.cli.bench.figures import cpu_seconds, machine_facts
from tidal_connector.cli.bench.proxy_load import Address, Asker, Body, Timed, WrongAnswer
from tidal_connector.cli.bench.proxy_report import BESIDE, BOUND_MS, ProxyResult, Streams, added, quantiles, show
from tidal_connector.cli.interrupts import sigterm_interrupts
from tidal_connector.cluster.launch import ServerProcess, free_ports, wait_ready
from tidal_connector.config import child_environment
from tidal_connector.errors import ConfigError, TidalError
from tidal_connector.proxy.wire import Client, WireError

_START_S = 60.0
_ANSWER_S = 60.0
_WARM_UP = 30
_KEPT_FAULTS = 5
_SEATS = 4096  # requests that a stand-in serves at once


class ProxyOptions(msgspec.Struct, frozen=True):
    """What the command was asked for; its help says what each means."""

    requests: int = 400
    streams: int = 500
    engines: int = 2
    prompt_tokens: int = 512
    tokens: int = 40
    token_ms: float = 100.0
    policy: str = "least_tokens"
    keep_logs: Path | None = None


class _Bed(msgspec.Struct, frozen=True):
    """Stand-ins and the proxy before them."""

    prefill: tuple[Address, ...]
    decode: tuple[Address, ...]
    proxy: ServerProcess


def run_proxy_bench(options: ProxyOptions, console: Console) -> ProxyResult:
    """Run the benchmark, print its table, and return the result.

    Raises:
        ConfigError: an option is out of range.
        TidalError: a process did not start, or no request was answered.
        KeyboardInterrupt: Ctrl-C or SIGTERM; everything is undone.
    """
    if options.requests < 2:
        raise ConfigError(f"--requests {options.requests}: expected at least 2")
    machine = machine_facts()
    with contextlib.ExitStack() as stack:
        stack.enter_context(sigterm_interrupts())
        logs = options.keep_logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidal-bench-")))
        with console.status("timing requests"), _running(options, logs, "quick", 0.0) as quick:
            times = asyncio.run(_time_requests(options, quick))
        status = console.status(f"{options.streams} streams at once")
        with status, _running(options, logs, "slow", options.token_ms) as slow:
            streams = asyncio.run(_carry_streams(options, slow))
    result = ProxyResult(
        answer=added(times.direct_answer, times.proxy_answer),
        first_token=added(times.direct_first, times.proxy_first),
        requests=options.requests,
        proxy_cpu_ms=times.proxy_cpu_s * 1000 / (2 * options.requests),
        failed=times.failed,
        bound_ms=BOUND_MS,
        streams=streams,
        prefill=options.engines,
        decode=options.engines,
        prompt_tokens=options.prompt_tokens,
        tokens=_TIMED_TOKENS,
        policy=options.policy,
        beside=BESIDE,
        machine=machine,
    )
    show(result, console)
    return result


_TIMED_TOKENS = 4


class _Times(msgspec.Struct):
    """Seconds of every timed request."""

    direct_answer: list[float] = []
    proxy_answer: list[float] = []
    direct_first: list[float] = []
    proxy_first: list[float] = []
    proxy_cpu_s: float = 0.0
    failed: int = 0


async def _time_requests(options: ProxyOptions, bed: _Bed) -> _Times:
    times = _Times()
    async with Client(5.0, 3.0) as client:
        asker = Asker(client, bed.proxy.url, bed.prefill, bed.decode, _ANSWER_S)
        ways: list[tuple[Callable[[Body], object], bool]] = [
            (asker.directly, False), (asker.through_proxy, False), (asker.directly, True), (asker.through_proxy, True)
        ]  # fmt: skip
        kept = [times.direct_answer, times.proxy_answer, times.direct_first, times.proxy_first]
        for number in range(-_WARM_UP, options.requests):
            if number == 0:
                cpu = cpu_seconds(bed.proxy.pids())
            first = number % len(ways)
            for index in (*range(first, len(ways)), *range(first)):  # who begins a round changes
                ask, stream = ways[index]
                body = _body(number * len(ways) + index, options.prompt_tokens, _TIMED_TOKENS, stream)
                try:
                    timed = await ask(body)
                except (WrongAnswer, WireError, TimeoutError) as error:
                    if number < 0:
                        raise TidalError(f"no answer from the stand-ins: {error!r}") from None
                    times.failed += 1
                    continue
                assert isinstance(timed, Timed)
                if number >= 0:
                    kept[index].append(timed.first_s if stream else timed.last_s)
        times.proxy_cpu_s = cpu_seconds(bed.proxy.pids()) - cpu
    if min(map(len, kept)) < 2:
        raise TidalError(f"{times.failed} of {4 * options.requests} requests failed; nothing is left to compare")
    return times


async def _carry_streams(options: ProxyOptions, bed: _Bed) -> Streams:
    async with Client(30.0, 3.0) as client:
        asker = Asker(
            client, bed.proxy.url, bed.prefill, bed.decode, _ANSWER_S + options.tokens * options.token_ms / 1000
        )
        for number in range(3):
            await asker.through_proxy(_body(-1 - number, options.prompt_tokens, 2, stream=True))
        bodies = [
            _body(number, options.prompt_tokens, options.tokens, stream=True) for number in range(options.streams)
        ]
        cpu, began = cpu_seconds(bed.proxy.pids()), time.perf_counter()
        ended = await asyncio.gather(*map(asker.through_proxy, bodies), return_exceptions=True)
        seconds = time.perf_counter() - began
    good = [item for item in ended if isinstance(item, Timed)]
    faults = [f"{type(item).__name__}: {item}" for item in ended if not isinstance(item, Timed)]
    for item in ended:
        if isinstance(item, BaseException) and not isinstance(item, WrongAnswer | WireError | TimeoutError):
            raise item
    p50, p99 = quantiles([item.first_s for item in good]) if len(good) > 1 else (0.0, 0.0)
    return Streams(
        asked=options.streams,
        failed=len(faults),
        most_open=asker.most_open,
        tokens=len(good) * options.tokens,
        seconds=seconds,
        first_p50_ms=p50,
        first_p99_ms=p99,
        proxy_cpu_s=cpu_seconds(bed.proxy.pids()) - cpu,
        faults=tuple(faults[:_KEPT_FAULTS]),
    )


def _body(number: int, prompt_tokens: int, tokens: int, stream: bool) -> Body:
    """Return a body whose prompt no other number has."""
    prompt = f"{number} " + "x" * prompt_tokens
    return {"model": "tidal", "prompt": prompt[:prompt_tokens], "max_tokens": tokens, "stream": stream}


@contextlib.contextmanager
def _running(options: ProxyOptions, logs: Path, name: str, token_ms: float):  # noqa: ANN202
    ports = free_ports(4 * options.engines + 1)
    prefill = _places("prefill", ports[: 2 * options.engines])
    decode = _places("decode", ports[2 * options.engines : -1])
    servers = [
        _standin(address, role, logs / f"{name}-{address.engine}.log", token_ms)
        for role, addresses in (("prefill", prefill), ("decode", decode))
        for address in addresses
    ]
    proxy = _proxy(options, prefill, decode, ports[-1], logs / f"{name}-proxy.log")
    with contextlib.ExitStack() as stack:
        for server in (*servers, proxy):
            stack.enter_context(server)
        stack.callback(lambda: [server.begin_stop() for server in (*servers, proxy)])
        wait_ready([*servers, proxy], _START_S)
        yield _Bed(tuple(prefill), tuple(decode), proxy)


def _places(role: str, ports: Sequence[int]) -> list[Address]:
    pairs = zip(ports[::2], ports[1::2], strict=True)
    return [
        Address(f"{role}-{number}", f"http://127.0.0.1:{http}", f"127.0.0.1:{control}")
        for number, (http, control) in enumerate(pairs)
    ]


def _standin(address: Address, role: str, log: Path, token_ms: float) -> ServerProcess:
    command = [
        *(sys.executable, "-m", "tidal_connector.cluster.standin", "--role", role, "--engine", address.engine),
        *("--http", address.url.removeprefix("http://"), "--control", address.control),
        *("--token-ms", str(token_ms if role == "decode" else 0.0), "--max-num-seqs", str(_SEATS)),
    ]
    return ServerProcess(address.engine, command, child_environment(), address.url, log)


def _proxy(
    options: ProxyOptions, prefill: Sequence[Address], decode: Sequence[Address], port: int, log: Path
) -> ServerProcess:
    command = [
        *(sys.executable, "-m", "tidal_connector.cli", "proxy", "--listen", f"127.0.0.1:{port}"),
        *("--policy", options.policy),
        *(word for item in prefill for word in ("--prefill", f"{item.engine}={item.url},{item.control}")),
        *(word for item in decode for word in ("--decode", f"{item.engine}={item.url},{item.control}")),
    ]
    return ServerProcess("proxy", command, child_environment(), f"http://127.0.0.1:{port}", log)
