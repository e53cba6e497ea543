# SPDX-License-Identifier: Apache-2.0
"""The self-test from the first line to the verdict.

One part's failure does not keep the next from being tried, but for a device that no longer answers: nothing more is
asked of that. Every wait has a deadline. Called from the main thread.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console

from tidal_connector.cli.bench.figures import machine_facts
from tidal_connector.cli.demo.report import logprob_bound
from tidal_connector.cli.interrupts import sigterm_interrupts
from tidal_connector.cli.selftest.answers import compare_answers
from tidal_connector.cli.selftest.bandwidth import QUICK_SIZES, SIZES, least_pool, measure_bandwidth
from tidal_connector.cli.selftest.device import TestDevice
from tidal_connector.cli.selftest.operators import check_operators
from tidal_connector.cli.selftest.report import AnswerCase, BandwidthCase, OperatorCase, Part, SelfTest, show
from tidal_connector.cli.selftest.worker import Stuck, Worker
from tidal_connector.config import parse_bytes
from tidal_connector.errors import ConfigError, TidalError
from tidal_connector.modelmaker.report import tolerance_of

PARTS = ("operators", "bandwidth", "answers")

_OPEN_S = 180.0  # torch_npu, CANN and the first context take tens of seconds on a cold machine
_ROUNDS, _QUICK_ROUNDS = 30, 5


class SelfTestOptions(msgspec.Struct, frozen=True):
    """What the command was asked for; its help says what each means."""

    only: tuple[str, ...] = PARTS
    pool: str = "4GiB"
    engine_pool: str = "1GiB"
    seed: int = 7
    quick: bool = False
    keep_logs: Path | None = None


def run_selftest(options: SelfTestOptions, open_device: Callable[[], TestDevice], console: Console) -> SelfTest:
    """Run the parts that were asked for, print the tables, and return the result.

    Args:
        options: what was asked for.
        open_device: returns the device; called on a thread of its own, from which it is used.
        console: where tables and progress go.

    Raises:
        TidalError: there is no device to test, or an option is no size.
        Stuck: opening it took too long.
        KeyboardInterrupt: Ctrl-C or SIGTERM; everything is undone.
    """
    sizes = {name: parse_bytes(f"--{name}", value) for name, value in _pools(options).items()}
    needed = least_pool(_gathers(options))
    if "bandwidth" in options.only and sizes["pool"] < needed:
        raise ConfigError(f"--pool {options.pool}: expected at least {needed} bytes, the rows of one call")
    with contextlib.ExitStack() as stack:
        stack.enter_context(sigterm_interrupts())
        worker = stack.enter_context(Worker())
        status = stack.enter_context(console.status("opening the device"))
        device = worker.run("opening the device", _OPEN_S, open_device)
        run = _Run(options, sizes, device, worker, status.update)
        found = run.result()
    show(found, console)
    return found


def _gathers(options: SelfTestOptions) -> tuple[tuple[int, int], ...]:
    return QUICK_SIZES if options.quick else SIZES


def _pools(options: SelfTestOptions) -> dict[str, str]:
    return {"pool": options.pool, "engine-pool": options.engine_pool}


class _Run:
    """The parts in order, and what they found."""

    def __init__(
        self,
        options: SelfTestOptions,
        sizes: dict[str, int],
        device: TestDevice,
        worker: Worker,
        tell: Callable[[str], None],
    ) -> None:
        self._options, self._sizes, self._device, self._worker, self._tell = options, sizes, device, worker, tell
        self._pool = ""
        self._operators: list[OperatorCase] = []
        self._bandwidth: list[BandwidthCase] = []
        self._answers: list[AnswerCase] = []
        self._fetched = 0

    def result(self) -> SelfTest:
        began = time.monotonic()
        machine = machine_facts()
        work = {"operators": self._check, "bandwidth": self._measure, "answers": self._compare}
        parts = tuple(self._part(name, work[name]) for name in PARTS if name in self._options.only)
        return SelfTest(
            device=self._device.name,
            pool=self._pool,
            parts=parts,
            operators=tuple(self._operators),
            bandwidth=tuple(self._bandwidth),
            answers=tuple(self._answers),
            rows_fetched=self._fetched,
            logprob_bound=logprob_bound(self._device.engine.dtype),
            seed=self._options.seed,
            stuck=self._worker.stuck,
            seconds=round(time.monotonic() - began, 1),
            machine=machine,
        )

    def _part(self, name: str, work: Callable[[], list[str]]) -> Part:
        began, error, faults = time.monotonic(), "", list[str]()
        try:
            faults = work()
        except Stuck as stuck:
            error = str(stuck)
        except (TidalError, RuntimeError, ValueError, TypeError) as raised:  # torch raises all but the first
            error = " ".join(f"{type(raised).__name__}: {raised}".split())
        return Part(name, round(time.monotonic() - began, 1), error, tuple(faults))

    def _check(self) -> list[str]:
        options = self._options
        for case in check_operators(self._device, self._worker, options.seed, options.quick, self._tell):
            self._operators.append(case)
        return [f"{case.operator}, {case.case}: {case.wrong}" for case in self._operators if case.wrong]

    def _measure(self) -> list[str]:
        options, size = self._options, self._sizes["pool"]
        rounds = _QUICK_ROUNDS if options.quick else _ROUNDS
        for found in measure_bandwidth(
            self._device, self._worker, size, _gathers(options), rounds, options.seed, self._tell
        ):
            if isinstance(found, str):
                self._pool = found
            else:
                self._bandwidth.append(found)
        return [
            f"{case.wrong:,} of {case.lists * case.rows:,} rows did not arrive as they are in the pool"
            for case in self._bandwidth
            if case.wrong
        ]

    def _compare(self) -> list[str]:
        if self._worker.stuck:
            raise Stuck("not tried: an earlier call has not come back")
        needs, options = self._device.engine, self._options
        with tempfile.TemporaryDirectory(prefix="tidal-selftest-") as folder:
            cases, self._fetched = compare_answers(
                needs,
                Path(folder),
                options.keep_logs or Path(folder) / "logs",
                self._sizes["engine-pool"],
                options.seed,
                options.quick,
                self._tell,
            )
        self._answers += cases
        bound, faults = logprob_bound(needs.dtype), []
        if not self._fetched:
            faults.append("the engine with the pool fetched no row from it, so the comparison proves nothing")
        different = sum(not case.tokens_equal for case in self._answers)
        furthest = max(case.logprob_diff for case in self._answers)
        if different and tolerance_of(needs.dtype).equal_tokens:
            faults.append(f"{different} of {len(self._answers)} answers differ")
        if furthest > bound:
            faults.append(f"logprobs differ by up to {furthest:.4g}, more than {bound:g}")
        return faults
