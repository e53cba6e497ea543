# SPDX-License-Identifier: Apache-2.0
"""The tables and the verdict of ``tidal bench gather``. Pure but for printing."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tidal_connector.cli.bench.gather_report import Gather, context_text


def show(found: Gather, console: Console) -> None:
    """Print the tables and the verdict."""
    console.print(_copies(found))
    console.print(_resolves(found))
    console.print(_contexts(found))
    for line in found.shortcomings():
        console.print(f"[bold red]not as it must be:[/] {line}")
    if not found.shortcomings():
        console.print(
            f"[bold green]within the bounds[/]: {found.gather_over_memcpy:.2f} of memcpy, "
            f"{found.gather_over_torch_index_select:.1f} x torch, resolve {found.resolve_over_numpy:.1f} x "
            f"numpy, contexts within {found.resolve_flatness:.2f} x"
        )


def _copies(found: Gather) -> Table:
    table = Table(
        title=f"gather of {found.top_k:,} missed rows per request into random slots",
        caption=f"GB/s, medians of {found.repetitions} rounds (min to max); each ratio is the gather over what stands "
        f"before it. to slots: index_select, then index_copy_. {found.pool}. {found.machine.line()}.",
    )
    for heading in (
        "row B",
        "batch",
        "threads",
        "gather",
        "memcpy",
        "ratio",
        "copy_",
        "ratio",
        "to slots",
        "ratio",
        "index_select",
        "ratio",
    ):
        table.add_column(heading.replace("_", "_\n"), justify="right")
    for case in found.copies:
        table.add_row(
            f"{case.row_bytes:,}",
            str(case.batch),
            str(case.threads),
            f"{case.gather_gb_per_s.median:.1f}",
            f"{case.memcpy_gb_per_s.median:.1f}",
            case.gather_over_memcpy.text(2),
            f"{case.torch_copy_gb_per_s.median:.1f}",
            f"{case.gather_over_torch_copy.median:.2f}",
            f"{case.index_select_to_slots_gb_per_s.median:.1f}",
            f"{case.gather_over_torch_index_select.median:.1f}",
            f"{case.index_select_gb_per_s.median:.1f}",
            f"{case.gather_over_torch_index_select_dense.median:.1f}",
        )
    return table


def _resolves(found: Gather) -> Table:
    table = Table(
        title=f"resolve of {found.top_k:,} positions, {found.slots:,} slots, {found.hit_rate:.0%} hits: µs per row",
        caption="Parts by what is left out. call: no rows; scan: a row that selects nothing; find: one that hits "
        "throughout; replace: its misses. map: numpy with an entry for every position of the context.",
    )
    for heading in ("batch", "threads", "resolve", "call", "scan", "find", "replace", "numpy", "ratio", "map", "ratio"):
        table.add_column(heading, justify="right")
    for case in found.resolves:
        table.add_row(
            str(case.batch),
            str(case.threads),
            case.us_per_row.text(1),
            f"{case.split.call:.1f}",
            f"{case.split.scan:.1f}",
            f"{case.split.find:.1f}",
            f"{case.split.replace:.1f}",
            f"{case.numpy_us_per_row.median:.0f}",
            f"{case.resolve_over_numpy.median:.1f}",
            f"{case.numpy_map_us_per_row.median:.0f}",
            f"{case.resolve_over_numpy_map.median:.1f}",
        )
    return table


def _contexts(found: Gather) -> Table:
    table = Table(title=f"resolve over the context: slowest over fastest {found.resolve_flatness:.2f}")
    table.add_column("context", justify="right")
    table.add_column("µs per row", justify="right")
    for point in found.contexts:
        table.add_row(context_text(point.context), point.us_per_row.text(1))
    return table
