# SPDX-License-Identifier: Apache-2.0
"""``tidal make-model``: options, table and exit status; the work is in ``modelmaker``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from tidal_connector.cli.ends import clear_ends
from tidal_connector.modelmaker.report import ModelReport


def make_model(
    directory: Annotated[Path, typer.Argument(help="Directory to write; new, empty or an earlier checkpoint.")],
    arch: Annotated[
        Literal["v32", "glm", "v3"],
        typer.Option(help="DeepSeek-V3.2, GLM-like (one index selection for four layers), or V3 with dense attention."),
    ] = "v32",
    layers: Annotated[int | None, typer.Option(help="Layers; 6 (glm: 8) where not said.")] = None,
    topk: Annotated[int, typer.Option(help="Rows that attention selects for each query.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of all weights; the same seed gives the same bytes.")] = 7,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of the weights and of the KV rows.")
    ] = "float32",
    measure: Annotated[bool, typer.Option(help="Measure noise and sensitivity on the engine (about 40 s).")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Write a small checkpoint that judges a KV path fairly, and measure that it does.

    Two figures are measured on the plain engine, in nats of logprob. Noise: the largest change over chunk sizes 64,
    512 and 2,048 and batches of 1 and 8. Sensitivity: the smallest change when one KV row that attention selected is
    wrong. A float32 checkpoint is refused (exit status 1, config and weights removed) when noise is above 0.01,
    sensitivity below 0.02, their ratio below 20, or any greedy token differs.

    Rounding hidden states to bfloat16 moves logprobs by 0.3 to 0.4 nats (measured), so a bfloat16 checkpoint is
    judged by wider bounds: noise up to 0.6, and a median change by a wrong row that is at least the noise. The bounds
    that were applied are "tolerance" in DIR/tidal_model.json.
    """
    from rich.console import Console

    from tidal_connector.modelmaker import api

    notes = Console(stderr=True)
    with clear_ends(), notes.status("writing and measuring" if measure else "writing"):
        report = api.make_model(directory, arch=arch, layers=layers, topk=topk, seed=seed, dtype=dtype, measure=measure)
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        _show(report, directory)
    for line in report.shortcomings:
        typer.echo(f"tidal: {directory} is refused: {line}", err=True)
    raise typer.Exit(1 if report.shortcomings else 0)


def _show(report: ModelReport, directory: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{directory}: {report.arch}, {report.layers} layers, seed {report.seed}, {report.dtype}")
    for heading in ("property", "value", "bound"):
        table.add_column(heading)
    table.add_row("weights", f"{report.parameters:,}", "")
    table.add_row("rows selected per query", f"{report.topk or 'all'}", "")
    table.add_row("bytes of a KV row", f"{report.kv_row_bytes:,}", "")
    measured = report.measurement
    if measured is None:
        table.add_row("noise, sensitivity", "not measured", "")
    else:
        noise, sense, bounds = measured.noise, measured.sensitivity, report.tolerance
        table.add_row("noise (nats)", f"{noise.largest:.2e}", f"<= {bounds.noise:g}")
        for name, value in noise.by_case.items():
            table.add_row(f"  {name}", f"{value:.2e}", "")
        table.add_row(
            "runs with equal tokens",
            f"{noise.sequences_with_equal_tokens} of {noise.sequences}",
            "all" if bounds.equal_tokens else "",
        )
        table.add_row("smallest greedy margin (nats)", f"{noise.smallest_greedy_margin:.3g}", "")
        table.add_row("sensitivity (nats)", f"{sense.smallest:.3g}", f">= {bounds.sensitivity:g}")
        for name, value in sense.by_kind.items():
            table.add_row(f"  row {name}", f"{value:.3g}", "")
        table.add_row("  median of all probes", f"{sense.median:.3g}", "")
        table.add_row("sensitivity / noise", _ratio(measured.gap), f">= {bounds.gap:g}" if bounds.gap else "")
        table.add_row("median / noise", _ratio(measured.typical_gap), f">= {bounds.typical_gap:g}")
        reach = measured.reach
        table.add_row(
            f"outputs after one ending of {reach.shared_ending_tokens} tokens",
            f"{reach.distinct_outputs} of {reach.prompts} differ",
            "all",
        )
        table.add_row("engine start, measurement (s)", f"{measured.engine_start_s:g}, {measured.measured_s:g}", "")
    Console().print(table)


def _ratio(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"
