# SPDX-License-Identifier: Apache-2.0
"""A plan as tables and as the lines to copy: settings, hugepages. Printed with rich, imported late."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidal_connector.cli.plan.planned import GatherLine, Plan
from tidal_connector.memory.report import size_text

if TYPE_CHECKING:
    from rich.console import Console


def show(plan: Plan, console: Console) -> None:
    """Print everything."""
    _formats(plan, console)
    _memory(plan, console)
    _curve(plan, console)
    _transfers(plan, console)
    _gather(plan, console)
    _settings(plan, console)
    for note in plan.notes:
        console.print(f"[yellow]note[/]  {note}", highlight=False)
    verdict = "[bold green]fits[/]" if plan.fits else "[bold red]does not fit[/]"
    console.print(f"{verdict}: {requests_text(plan.concurrency)} of {plan.context:,} tokens", highlight=False)


def requests_text(count: int) -> str:
    """Return a number of requests with its noun."""
    return f"{count:,} request{'' if count == 1 else 's'}"


def context_text(tokens: int) -> str:
    """Return tokens in K or M where they are whole ones."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return f"{tokens:,}"


def _formats(plan: Plan, console: Console) -> None:
    unit = "token" if plan.row_tokens == 1 else f"entry of {plan.row_tokens} tokens"
    title = (
        f"{plan.model}: {plan.layers} layers, {plan.groups} select; top-k {plan.top_k:,}; bytes per {unit} and layer"
    )
    table = _table(title, "format", "latent", "index", "a token, all layers", "on device", "")
    for line in plan.formats:
        table.add_row(
            line.latent_format,
            f"{line.latent_bytes:,}",
            f"{line.index_bytes:,}",
            f"{line.bytes_per_token:,.0f}",
            f"{line.device_bytes_per_token:,.0f}",
            "planned" if line.planned else "",
            style="bold" if line.planned else "",
        )
    console.print(table)


def _memory(plan: Plan, console: Console) -> None:
    device, pool = plan.device, plan.pool
    table = _table(f"Memory, for {requests_text(device.requests)} of {plan.context:,} tokens", "what", "size", "is")
    table.add_row("host pool", size_text(pool.bytes), f"{pool.blocks:,} blocks; asked: {size_text(pool.asked)}")
    table.add_row("  host gives", size_text(pool.room), "--dram x --dram-share / --engines")
    table.add_row("  hugepages", f"{pool.hugepages_1g:,} x 1 GiB", f"or {pool.hugepages_2m:,} x 2 MiB, all engines")
    table.add_row("device, for KV", size_text(device.budget), "--hbm x --utilization - --weights")
    table.add_row("  index keys", size_text(device.index_bytes), "grow with the context")
    table.add_row(
        "  selection cache",
        size_text(device.selection_bytes),
        f"{device.slots:,} slots: {size_text(device.seat_bytes)} each",
    )
    console.print(table)


def _curve(plan: Plan, console: Console) -> None:
    title = f"Requests at once, by limit and without a pool ({plan.hit_rate:.0%} hits, {plan.tpot_s * 1e3:g} ms)"
    table = _table(title, "context", "pool", "device", "copying", "fit", "limit", "without", "gain")
    for room in plan.curve:
        style = "bold" if room.context == plan.context else ""
        table.add_row(
            context_text(room.context),
            f"{room.pool:,}",
            f"{room.device:,}",
            "-" if room.copying is None else f"{room.copying:,}",
            f"{room.fit:,}",
            room.binds.value,
            f"{room.off:,}",
            "-" if room.ratio is None else f"{room.ratio:.1f} x",
            style=style,
        )
    console.print(table)
    for knee in plan.knees:
        console.print(
            f"  from {knee.context:,} tokens on: {knee.after.value} ({requests_text(knee.requests)}); before: "
            f"{knee.before.value}",
            highlight=False,
        )
    known = {"device": plan.room.device, "copying": plan.room.copying, "host pool": plan.room.pool}
    ordered = sorted((value, name) for name, value in known.items() if value is not None)
    console.print(
        f"  at {plan.context:,} tokens: {', then '.join(f'{name} at {value:,}' for value, name in ordered)}",
        highlight=False,
    )


def _transfers(plan: Plan, console: Console) -> None:
    title = f"Hand-over of {plan.context:,} tokens: {size_text(plan.transfer_bytes)}"
    table = _table(title, "link", "seconds", "prompt tokens / s")
    for line in plan.transfers:
        table.add_row(f"{line.gbit_per_s} Gb/s", f"{line.seconds:.3g}", f"{line.tokens_per_s:,.0f}")
    console.print(table)
    console.print(
        f"  {plan.descriptors:,} descriptors if no two pages are neighbours: {plan.descriptor_s:.2g} s over TCP "
        "on any link",
        highlight=False,
    )


def _gather(plan: Plan, console: Console) -> None:
    who = requests_text(plan.device.requests)
    title = f"Copying per step, {who}, {plan.copy_speed / 1e9:.3g} GB/s for scattered rows"
    table = _table(title, "hits", "a request", "a step", "GB/s needed", "TPOT floor", "requests in time")
    for line in plan.gather:
        table.add_row(
            f"{line.hit_rate:.0%}",
            size_text(line.request_bytes),
            size_text(line.step_bytes),
            f"{line.bytes_per_s / 1e9:.1f}",
            f"{line.floor_s * 1e3:.1f} ms",
            _most(line),
            style="bold" if line.hit_rate == plan.hit_rate else "",
        )
    console.print(table)


def _most(line: GatherLine) -> str:
    return "-" if line.requests is None else f"{line.requests:,}"


def _settings(plan: Plan, console: Console) -> None:
    gib = plan.pool.bytes >> 30
    size = f"{gib}GiB" if plan.pool.bytes == gib << 30 else f"{plan.pool.bytes >> 20}MiB"
    lines = [
        f'decode.toml     [tidal.pool] bytes = "{size}"',
        f"vLLM            --max-num-seqs {plan.device.requests} --max-model-len {plan.context}",
        f"kernel, at boot {plan.pool.boot_line}",
        f"or now          {plan.pool.reserve_line}",
    ]
    if plan.device.set_selection_bytes:
        lines.insert(1, f"                [tidal.selection] bytes = {plan.device.selection_bytes}")
    for line in lines:
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def _table(title: str, *headings: str):  # noqa: ANN202  rich is imported late
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for number, heading in enumerate(headings):
        left = number == 0 or heading in ("is", "limit", "")
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "is")
    return table
