# SPDX-License-Identifier: Apache-2.0
"""Time per output token with the latents in the host pool and on the device, as a value, a table and JSON. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from tidal_connector.cli.bench.figures import MachineFacts, Spread, spread

TPOT_BOUND = 1.05
"""Largest time per output token with the latents in the host pool, as a multiple of that with all on the device."""

_MS = 1e3
_KIB = 1 << 10
_PREFIX, _SUFFIX = "tidal:", "_total"


class Moved(msgspec.Struct, frozen=True):
    """What decode steps of a full batch moved, by the engine's own counters.

    Attributes:
        steps: steps that were counted.
        hit_rate: share of the selected rows that were in their slots already.
        bytes_per_step: bytes from the host pool to the slots, over all layers.
        prefetched_share: share of these bytes that were fetched for layers which share a selection, ahead of need, and
            had arrived when they were needed.
        hidden_share: share of the copying time, write-back included, that attention did not wait for.
        prefetches_per_step: layers per step whose rows were fetched ahead of need.
        late_share: share of those layers that had to wait.
        wait_ms_per_step: milliseconds for which attention waited for rows, over all layers.
        resolve_ms_per_step: milliseconds of planning.
        gather_ms_per_step: milliseconds of copying, by whichever thread.
    """

    steps: float
    hit_rate: float
    bytes_per_step: float
    prefetched_share: float
    hidden_share: float
    prefetches_per_step: float
    late_share: float
    wait_ms_per_step: float
    resolve_ms_per_step: float
    gather_ms_per_step: float


def moved(before: Mapping[str, float], after: Mapping[str, float], selected_per_step: int) -> Moved:
    """Return what lies between two readings of an engine's ``tidal:`` counters.

    Args:
        before, after: the readings.
        selected_per_step: rows that one step selects, over the batch and the index groups; the counters then say how
            many steps were counted, also where the last one is not reported yet.
    """

    def gain(name: str) -> float:
        series = f"{_PREFIX}{name}{_SUFFIX}"
        return after.get(series, 0.0) - before.get(series, 0.0)

    selected = gain("selection_hits") + gain("selection_misses")
    steps = selected / selected_per_step
    size, ahead = gain("bytes_gathered"), gain("prefetches")
    copying, waiting = gain("gather_seconds"), gain("prefetch_wait_seconds")

    def per_step(value: float) -> float:
        return value / steps if steps else 0.0

    return Moved(
        steps=steps,
        hit_rate=gain("selection_hits") / selected if selected else 0.0,
        bytes_per_step=per_step(size),
        prefetched_share=gain("prefetch_bytes") / size if size else 0.0,
        hidden_share=max(0.0, 1 - waiting / copying) if copying else 0.0,
        prefetches_per_step=per_step(ahead),
        late_share=gain("prefetches_late") / ahead if ahead else 0.0,
        wait_ms_per_step=per_step(waiting * _MS),
        resolve_ms_per_step=per_step(gain("resolve_seconds") * _MS),
        gather_ms_per_step=per_step(copying * _MS),
    )


class BatchCase(msgspec.Struct, frozen=True):
    """One batch size of one model.

    Attributes:
        batch: requests that decode at once.
        rounds: answers of each engine that were timed.
        tpot_on_ms: milliseconds per output token, latents in the host pool: the medians of the repetitions.
        tpot_off_ms: the same engine with all latents on the device.
        tpot_on_over_off: of two repetitions that ran one after the other; median of the pairs.
        engine_tpot_on_over_off: the same by the engines' own clocks, from means.
        tpot_no_prefetch_ms: with prefetch switched off; None where the model shares no selection between layers.
        prefetch_on_over_off: time with prefetch over time without.
        moved: what was fetched for it.
    """

    batch: int
    rounds: int
    tpot_on_ms: Spread
    tpot_off_ms: Spread
    tpot_on_over_off: Spread
    engine_tpot_on_over_off: Spread
    tpot_no_prefetch_ms: Spread | None
    prefetch_on_over_off: Spread | None
    moved: Moved


class Round(msgspec.Struct, frozen=True):
    """One answer of a batch by one engine.

    Attributes:
        seconds: between successive tokens, as they arrived here.
        engine_seconds: the same by the engine's own clock, their mean.
    """

    seconds: tuple[float, ...]
    engine_seconds: float


def batch_case(batch: int, rounds: Mapping[str, Sequence[Round]], found: Moved) -> BatchCase:
    """Turn token times into a case.

    Args:
        batch: requests at once.
        rounds: for each engine (``on``, ``off``, and perhaps ``no prefetch``) its repetitions.
        found: what was fetched.
    """
    medians = {name: [statistics.median(each.seconds) * _MS for each in done] for name, done in rounds.items()}

    def over(name: str) -> Spread | None:
        other = medians.get(name)
        return None if other is None else spread(a / b for a, b in zip(medians["on"], other, strict=True))

    ratio = over("off")
    assert ratio is not None
    return BatchCase(
        batch=batch,
        rounds=len(medians["on"]),
        tpot_on_ms=spread(medians["on"]),
        tpot_off_ms=spread(medians["off"]),
        tpot_on_over_off=ratio,
        engine_tpot_on_over_off=spread(
            mine.engine_seconds / theirs.engine_seconds
            for mine, theirs in zip(rounds["on"], rounds["off"], strict=True)
        ),
        tpot_no_prefetch_ms=spread(medians["no prefetch"]) if "no prefetch" in medians else None,
        prefetch_on_over_off=over("no prefetch"),
        moved=found,
    )


class ModelCase(msgspec.Struct, frozen=True):
    """One model at all batch sizes.

    Attributes:
        arch: architecture of the checkpoint.
        layers, groups: decoder layers, and how many of them select for themselves.
        top_k: rows that a query selects.
        slots: slots of a request.
        row_bytes: bytes of a latent row of one layer.
        context: tokens of each prompt.
        cases: one for each batch size.
    """

    arch: str
    layers: int
    groups: int
    top_k: int
    slots: int
    row_bytes: int
    context: int
    cases: tuple[BatchCase, ...]


class Decode(msgspec.Struct, frozen=True):
    """Everything that was found; its fields are the JSON's keys.

    Attributes:
        tpot_on_over_off: the largest median of all models and batch sizes.
        prefetch_on_over_off: median of all pairs of the models that share selections; None where none ran.
        bound: of ``tpot_on_over_off``.
        context, tokens: tokens of each prompt and of each answer.
        repetitions: rounds of each engine at batch sizes of 8 and more; small ones are done sooner and get up to three
            times as many.
        off: what ``off`` is.
        threads: compute threads of each engine.
    """

    tpot_on_over_off: float
    prefetch_on_over_off: float | None
    bound: float
    context: int
    tokens: int
    repetitions: int
    dtype: str
    off: str
    threads: str
    machine: MachineFacts
    models: tuple[ModelCase, ...]

    def shortcomings(self) -> list[str]:
        """Return what is not as it must be, one line each; empty if all is well."""
        found = []
        for model in self.models:
            for case in model.cases:
                ratio = case.tpot_on_over_off.median
                if ratio > self.bound:
                    found.append(
                        f"{model.arch}, batch {case.batch}: a token takes {ratio:.3f} x as long as with all latents on "
                        f"the device; expected at most {self.bound}"
                    )
        if self.prefetch_on_over_off is not None and self.prefetch_on_over_off >= 1:
            found.append(f"prefetch makes a token take {self.prefetch_on_over_off:.3f} x as long; expected below 1")
        return found


def worst(models: Iterable[ModelCase]) -> float:
    """Return the largest median ratio of all cases."""
    return max(case.tpot_on_over_off.median for model in models for case in model.cases)


def prefetch_gain(models: Iterable[ModelCase]) -> float | None:
    """Return the median over the batch sizes of the time with prefetch over that without; None where none was timed."""
    found = [
        case.prefetch_on_over_off.median
        for model in models
        for case in model.cases
        if case.prefetch_on_over_off is not None
    ]
    return statistics.median(found) if found else None


def show_model(model: ModelCase, console: Console) -> None:
    """Print the tables of one model."""
    console.print(_times(model))
    console.print(_moves(model))


def show(found: Decode, console: Console) -> None:
    """Print the machine and the verdict, after the tables of the models."""
    console.print(f"off: {found.off}. {found.machine.line()}.", style="dim")
    for line in found.shortcomings():
        console.print(f"[bold red]not as it must be:[/] {line}")
    if not found.shortcomings():
        console.print(f"[bold green]within the bound[/]: {found.tpot_on_over_off:.3f} <= {found.bound}")


def _times(model: ModelCase) -> Table:
    table = Table(
        title=f"{model.arch}, {model.layers} layers, top-k {model.top_k}, contexts of {model.context:,}: ms per output "
        "token",
        caption="pool: latents in the host pool; device: all on the device; by engine: the ratio by their own clocks; "
        "ratios: median of the pairs (min to max).",
    )
    for heading in ("batch", "rounds", "pool", "device", "ratio", "by engine", "no prefetch", "ratio"):
        table.add_column(heading, justify="right")
    for case in model.cases:
        without, gain = case.tpot_no_prefetch_ms, case.prefetch_on_over_off
        table.add_row(
            str(case.batch),
            str(case.rounds),
            f"{case.tpot_on_ms.median:.1f}",
            f"{case.tpot_off_ms.median:.1f}",
            case.tpot_on_over_off.text(2),
            f"{case.engine_tpot_on_over_off.median:.2f}",
            "-" if without is None else f"{without.median:.1f}",
            "-" if gain is None else gain.text(2),
        )
    return table


def _moves(model: ModelCase) -> Table:
    table = Table(
        title=f"what a step fetches, {model.slots} slots per request, rows of {model.row_bytes:,} B",
        caption="ahead: share of the bytes that came for followers, in time; hidden: share of the copying that "
        "attention did not wait for.",
    )
    for heading in ("batch", "hits", "KiB", "ahead", "late", "resolve ms", "copy ms", "wait ms", "hidden"):
        table.add_column(heading, justify="right")
    for case in model.cases:
        step = case.moved
        table.add_row(
            str(case.batch),
            f"{step.hit_rate:.1%}",
            f"{step.bytes_per_step / _KIB:,.0f}",
            f"{step.prefetched_share:.0%}",
            f"{step.late_share:.0%}",
            f"{step.resolve_ms_per_step:.2f}",
            f"{step.gather_ms_per_step:.2f}",
            f"{step.wait_ms_per_step:.2f}",
            f"{step.hidden_share:.0%}",
        )
    return table
