# SPDX-License-Identifier: Apache-2.0
"""``tidal bench rollout``: a cluster is changed, broken and mended under load, and no client may notice.

Starts etcd, two agents, a proxy and engines (stand-ins, or vLLM with ``--real``); clients ask without a pause.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from tidal_connector.cli.bench.figures import machine_facts
from tidal_connector.cli.bench.rollout_bed import Bench, RolloutOptions
from tidal_connector.cli.bench.rollout_report import RolloutResult, Scenario, show
from tidal_connector.cli.interrupts import sigterm_interrupts
from tidal_connector.cluster.rollout_records import Status
from tidal_connector.errors import ConfigError


def run_rollout(options: RolloutOptions, console: Console) -> RolloutResult:
    """Run the scenarios, print the table, and return the result.

    Raises:
        ConfigError: an option cannot be used.
        TidalError: the cluster did not come up.
        KeyboardInterrupt: Ctrl-C or SIGTERM; everything is undone.
    """
    unknown = set(options.only) - set(SCENARIOS)
    if unknown or options.engines < 1 or options.clients < 1:
        raise ConfigError(f"--only: expected any of {', '.join(SCENARIOS)}; --engines and --clients from 1 on")
    machine = machine_facts()
    with contextlib.ExitStack() as stack:
        stack.enter_context(sigterm_interrupts())
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidal-rollout-")))
        bench = Bench(options, folder, console)
        with console.status("starting"):
            stack.enter_context(bench)
        chosen = [name for name in SCENARIOS if name in (options.only or _default(options.real))]
        found: list[Scenario] = []
        for name in chosen:
            with console.status(f"{name} ..."):
                found += SCENARIOS[name](bench)
        registry = "a private etcd" if bench.cluster.etcd is not None else "a folder as the registry"
        started = bench.start_seconds
        stack.enter_context(console.status("ending the processes"))
    result = RolloutResult(
        requests=sum(item.requests for item in found),
        failed=sum(item.failed for item in found),
        wrong=sum(item.wrong for item in found),
        seconds=round(sum(item.seconds for item in found), 1),
        engines="vLLM engines" if options.real else "stand-ins",
        prefill=options.engines,
        decode=options.engines,
        clients=options.clients,
        registry=registry,
        start_seconds=started,
        scenarios=tuple(found),
        machine=machine,
    )
    show(result, console)
    return result


def _apply_and_undo(bench: Bench) -> list[Scenario]:
    return [
        bench.scenario("apply", bench.apply(bench.spec("b"))),
        bench.scenario("undo", bench.undo),
    ]


def _agent(bench: Bench) -> list[Scenario]:
    return [
        bench.scenario("apply, conducting agent killed -9", bench.apply(bench.spec("c")), midway=bench.kill_conductor),
        bench.scenario("undo, conducting agent killed -9", bench.undo, midway=bench.kill_conductor),
    ]


def _etcd(bench: Bench) -> list[Scenario]:
    return [
        bench.scenario("apply, etcd killed -9", bench.apply(bench.spec("d")), midway=bench.restart_etcd),
        bench.scenario("undo, etcd killed -9", bench.undo, midway=bench.restart_etcd),
    ]


def _mixed(bench: Bench) -> list[Scenario]:
    return [
        bench.scenario("apply, conducting agent killed -9", bench.apply(bench.spec("h")), midway=bench.kill_conductor),
        bench.scenario("undo, etcd killed -9", bench.undo, midway=bench.restart_etcd),
    ]


def _never_ready(bench: Bench) -> list[Scenario]:
    more = ["--no-such-option"] if bench.options.real else ["--never-ready"]
    spec = bench.spec("e", more=more, ready_s=None if bench.options.real else 8.0)
    return [
        bench.scenario("apply what never becomes ready", bench.apply(spec), Status.HALTED),
        bench.scenario("undo it", bench.undo),
    ]


def _wrong(bench: Bench) -> list[Scenario]:
    spec = bench.spec("f", more=["--wrong-rate", "1"])
    return [
        bench.scenario("apply what answers wrongly", bench.apply(spec), Status.HALTED),
        bench.scenario("undo it", bench.undo),
    ]


def _layout(bench: Bench) -> list[Scenario]:
    return [
        bench.scenario("apply another layout", bench.apply(bench.spec("g", layout="v2"))),
        bench.scenario("undo it", bench.undo),
    ]


SCENARIOS: dict[str, Callable[[Bench], list[Scenario]]] = {
    "apply": _apply_and_undo,
    "agent": _agent,
    "etcd": _etcd,
    "mixed": _mixed,
    "never-ready": _never_ready,
    "wrong": _wrong,
    "layout": _layout,
}


def _default(real: bool) -> Sequence[str]:
    return ("apply",) if real else tuple(name for name in SCENARIOS if name != "mixed")
