# SPDX-License-Identifier: Apache-2.0
"""What pushing costs the prefill, as a value, as a table and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from tidal_connector.cli.bench.figures import MachineFacts, Spread, spread

RATIO_BOUND = 1.10
"""Largest prefill time with the connector, as a multiple of the time without."""

BESIDE = (
    "plain engine timed: prefill and decode engines idle; prefill engine timed: the decode engine steps without tokens "
    "and receives, the plain engine is idle. All on the same cores."
)

_MIB = 1 << 20


class Pair(msgspec.Struct, frozen=True):
    """One prompt, once without the connector and once pushed while it is computed.

    Attributes:
        first: which ran first: ``plain`` or ``push``.
        plain_s, push_s: seconds from request to answer, with one new token.
        plain_engine_s, push_engine_s: the engines' own prefill seconds, from scheduling to the first token.
        plain_cpu_s, push_cpu_s: processor seconds of the timed engine's processes.
        decode_cpu_s: processor seconds of the decode engine's processes, which ran beside the push.
        decode_s: seconds of the decode leg.
        load: load average over one minute before the pair.
    """

    first: str
    plain_s: float
    push_s: float
    plain_engine_s: float
    push_engine_s: float
    plain_cpu_s: float
    push_cpu_s: float
    decode_cpu_s: float
    decode_s: float
    load: float


class Overhead(msgspec.Struct, frozen=True):
    """Everything that was found; its fields are the JSON's keys.

    Attributes:
        ratio: prefill time with the connector over without, by HTTP requests; median of the pairs.
        engine_ratio: the same by the engines' own clocks.
        plain_s, push_s, plain_engine_s, push_engine_s: seconds.
        plain_cpu_s, push_cpu_s, decode_cpu_s: processor seconds, as in :class:`Pair`.
        bytes_pushed: acknowledged in the timed pairs.
        bytes_expected: the same computed from the checkpoint.
        landed_before_prefill_end: share of the pushed bytes.
        threads: compute threads of each engine.
        beside: what else ran.
        pairs: every pair.
    """

    ratio: Spread
    engine_ratio: Spread
    bound: float
    plain_s: Spread
    push_s: Spread
    plain_engine_s: Spread
    push_engine_s: Spread
    plain_cpu_s: Spread
    push_cpu_s: Spread
    decode_cpu_s: Spread
    bytes_pushed: int
    bytes_expected: int
    landed_before_prefill_end: float
    tokens: int
    arch: str
    layers: int
    dtype: str
    block_size: int
    max_num_batched_tokens: int
    threads: str
    beside: str
    machine: MachineFacts
    pairs: tuple[Pair, ...]

    def shortcomings(self) -> list[str]:
        """Return what is not as it must be, one line each; empty if all is well."""
        found = []
        if self.ratio.median > self.bound:
            found.append(
                f"prefill takes {self.ratio.median:.3f} x as long with the connector; expected at most {self.bound}"
            )
        if self.bytes_pushed != self.bytes_expected:
            found.append(f"{self.bytes_pushed} bytes were pushed, {self.bytes_expected} are the prompts' rows")
        return found


def ratios(pairs: Sequence[Pair]) -> tuple[Spread, Spread]:
    """Return the spread of the pairs' own ratios, by HTTP and by the engines' clocks."""
    return (
        spread(pair.push_s / pair.plain_s for pair in pairs),
        spread(pair.push_engine_s / pair.plain_engine_s for pair in pairs),
    )


def show(found: Overhead, console: Console) -> None:
    """Print the table and the verdict."""
    table = Table(
        title=f"prefill of {found.tokens} tokens, median of {len(found.pairs)} interleaved pairs (min to max)",
        caption=f"{found.machine.line()}. {found.beside}",
    )
    table.add_column("figure")
    table.add_column("without connector", justify="right")
    table.add_column("while pushing", justify="right")
    table.add_column("ratio", justify="right")
    table.add_row("request to answer", found.plain_s.text(unit="s"), found.push_s.text(unit="s"), found.ratio.text())
    table.add_row(
        "engine's own prefill time",
        found.plain_engine_s.text(unit="s"),
        found.push_engine_s.text(unit="s"),
        found.engine_ratio.text(),
    )
    cpu = found.push_cpu_s.median / found.plain_cpu_s.median if found.plain_cpu_s.median else 0.0
    table.add_row(
        "processor time of the engine",
        found.plain_cpu_s.text(2, "s"),
        found.push_cpu_s.text(2, "s"),
        f"{cpu:.3f} of medians",
    )
    table.add_row("of the decode engine beside it", "", found.decode_cpu_s.text(2, "s"), "")
    table.add_section()
    table.add_row("bytes pushed", "", f"{found.bytes_pushed / _MIB:.1f} MiB", "")
    table.add_row("landed before prefill ended", "", f"{found.landed_before_prefill_end:.1%}", "")
    table.add_row("model", f"{found.arch}, {found.layers} layers", found.dtype, "")
    table.add_row("KV block, step", f"{found.block_size} tokens", f"{found.max_num_batched_tokens} tokens", "")
    table.add_row("compute threads per engine", found.threads, found.threads, "")
    console.print(table)
    for line in found.shortcomings():
        console.print(f"[bold red]not as it must be:[/] {line}")
    if not found.shortcomings():
        console.print(f"[bold green]within the bound[/]: {found.ratio.median:.3f} <= {found.bound}")
