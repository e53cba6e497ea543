# SPDX-License-Identifier: Apache-2.0
"""What the self-test found, as a value, as tables and as JSON. Pure, but for printing."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from tidal_connector.cli.bench.figures import MachineFacts


class OperatorCase(msgspec.Struct, frozen=True):
    """One shape of calls of one operator, compared with its definition.

    Attributes:
        operator: its name.
        case: the shape.
        calls: that were made.
        hits, misses, moved: ids that were there, that were read from the pool, and that changed their slot, as the
            definition counts them; of GatherMissRows only misses.
        bytes: of the misses' rows.
        wrong: what differed first, with the call; empty if nothing did.
    """

    operator: str
    case: str
    calls: int
    hits: int
    misses: int
    moved: int
    bytes: int
    wrong: str = ""


class BandwidthCase(msgspec.Struct, frozen=True):
    """Random rows gathered from the pool into device memory, beside a plain copy of as many bytes.

    Attributes:
        lists, rows: of one call, and rows in each list.
        bytes: that one call moves.
        gather_gb_s, copy_gb_s: medians over the rounds.
        ratio: median of the rounds' ratios.
        wrong: rows that did not arrive as they were in the pool.
    """

    lists: int
    rows: int
    bytes: int
    gather_gb_s: float
    copy_gb_s: float
    ratio: float
    wrong: int


class AnswerCase(msgspec.Struct, frozen=True):
    """One prompt, answered by an engine with its latents in the pool and by one without.

    Attributes:
        length: tokens of the prompt.
        at_once: requests under way.
        tokens_equal: both gave the same.
        logprob_diff: largest difference up to the first different token, in nats.
    """

    length: int
    at_once: int
    tokens_equal: bool
    logprob_diff: float


class Part(msgspec.Struct, frozen=True):
    """How one part ended.

    Attributes:
        name: ``operators``, ``bandwidth`` or ``answers``.
        seconds: that it took.
        error: why it could not be done, or be done to its end; empty if it was.
        faults: what is not as it must be, one line each.
    """

    name: str
    seconds: float
    error: str = ""
    faults: tuple[str, ...] = ()


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole; its fields are the JSON's keys.

    Attributes:
        device: what it ran on.
        pool: which pages, and how they were registered; empty where no pool was opened.
        parts: that were asked for.
        operators, bandwidth, answers: the figures.
        rows_fetched: from the pool, by the engine that has one.
        logprob_bound: of the answers.
        seed: of everything random.
        stuck: the device did not come back from a call, so that the process has to be left without it.
        seconds: in all.
        machine: processor and versions.
    """

    device: str
    pool: str = ""
    parts: tuple[Part, ...] = ()
    operators: tuple[OperatorCase, ...] = ()
    bandwidth: tuple[BandwidthCase, ...] = ()
    answers: tuple[AnswerCase, ...] = ()
    rows_fetched: int = 0
    logprob_bound: float = 0.0
    seed: int = 0
    stuck: bool = False
    seconds: float = 0.0
    machine: MachineFacts | None = None

    @property
    def passed(self) -> bool:
        """Whether every part was done and nothing is wrong."""
        return all(not part.error and not part.faults for part in self.parts)


def show(found: SelfTest, console: Console) -> None:
    """Print what was found as tables and one closing line."""
    if found.operators:
        _show_operators(found, console)
    if found.bandwidth:
        _show_bandwidth(found, console)
    if found.answers:
        _show_answers(found, console)
    for part in found.parts:
        for line in part.faults:
            console.print(f"[red]not as it must be:[/] {part.name}: {line}")
        if part.error:
            console.print(f"[red]not done:[/] {part.name}: {part.error}")
    verdict = "[green]passed[/]" if found.passed else "[red]failed[/]"
    console.print(f"{verdict}: {', '.join(part.name for part in found.parts)} on {found.device}, {found.seconds:.0f} s")


def _show_operators(found: SelfTest, console: Console) -> None:
    table = Table(title="Operators against their definition, call by call")
    for name in ("operator", "case"):
        table.add_column(name, no_wrap=True)
    for name in ("calls", "hits", "misses", "moved", "bytes of misses", ""):
        table.add_column(name, justify="right")
    for case in found.operators:
        counts = (f"{value:,}" for value in (case.calls, case.hits, case.misses, case.moved, case.bytes))
        table.add_row(case.operator, case.case, *counts, "[red]DIFFERENT[/]" if case.wrong else "[green]equal[/]")
    console.print(table)


def _show_bandwidth(found: SelfTest, console: Console) -> None:
    table = Table(title="Random rows from the host pool, beside a plain copy of as many bytes")
    for name in ("lists x rows", "MB", "gather GB/s", "copy GB/s", "gather / copy", "rows wrong"):
        table.add_column(name, justify="right")
    for case in found.bandwidth:
        table.add_row(
            f"{case.lists} x {case.rows:,}",
            f"{case.bytes / 1e6:,.1f}",
            f"{case.gather_gb_s:.1f}",
            f"{case.copy_gb_s:.1f}",
            f"{case.ratio:.2f} x",
            f"{case.wrong:,}",
        )
    console.print(table)
    console.print(f"pool: {found.pool}", highlight=False)


def _show_answers(found: SelfTest, console: Console) -> None:
    table = Table(title="Latents in the host pool, beside all on the device")
    for name in ("prompt tokens", "at once", "tokens", "largest logprob difference"):
        table.add_column(name, justify="right")
    for case in found.answers:
        verdict = "[green]equal[/]" if case.tokens_equal else "different"
        table.add_row(f"{case.length:,}", str(case.at_once), verdict, f"{case.logprob_diff:.2g}")
    console.print(table)
    console.print(f"{found.rows_fetched:,} rows were fetched from the pool", highlight=False)
