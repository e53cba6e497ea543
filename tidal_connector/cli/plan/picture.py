# SPDX-License-Identifier: Apache-2.0
"""The picture of ``tidal plan``: which limit binds along the context, and what copying costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tidal_connector.cli.bench.plot import FOURTH, INK, OTHER, OURS, THIRD, write_plot
from tidal_connector.cli.plan.planned import Plan
from tidal_connector.cli.plan.report import context_text, requests_text
from tidal_connector.memory.report import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FLOOR = 0.5  # of a logarithmic axis on which nothing fits, too


def draw(plan: Plan, file: Path | None) -> None:
    """Write the picture; nothing where no file was asked for.

    Raises:
        ConfigError: the file cannot be written.
    """
    gain = f"{plan.room.ratio:.1f} x as many as on the device alone" if plan.room.ratio else "none on the device alone"
    title = f"{plan.model}: {requests_text(plan.room.fit)} of {context_text(plan.context)} tokens at once, {gain}"
    footer = (
        f"Planned, not measured. {size_text(plan.device.budget)} of device memory for KV, {size_text(plan.pool.room)} "
        f"of host memory, {plan.copy_speed / 1e9:.3g} GB/s for scattered rows, {plan.hit_rate:.0%} hits, "
        f"{plan.tpot_s * 1e3:g} ms per token, {plan.device.slots:,} slots."
    )
    write_plot(file, title, footer, [lambda axes: _limits(plan, axes), lambda axes: _copying(plan, axes)], (2, 1))


def _limits(plan: Plan, axes: Axes) -> None:
    places = [room.context for room in plan.curve]
    axes.set_title("Requests at once, by what limits them")
    axes.set_xlabel("context, tokens")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    corners = [(room.context, room.fit) for room in plan.curve]
    for knee in plan.knees:  # the line bends where the limit changes, not at the next doubling
        corners += [(knee.context - 1, knee.requests_before), (knee.context, knee.requests)]
    bends, fit = zip(*sorted((at, max(value, _FLOOR)) for at, value in set(corners)), strict=True)
    axes.fill_between(bends, fit, _FLOOR, color=OURS, alpha=0.12, linewidth=0)
    lines = (
        ("host pool", THIRD, [room.pool for room in plan.curve]),
        ("device: index keys and slots", FOURTH, [room.device for room in plan.curve]),
        ("copying within the time per token", INK, [room.copying for room in plan.curve]),
    )
    for name, colour, values in lines:
        known = [(at, value) for at, value in zip(places, values, strict=True) if value]
        axes.plot(*zip(*known, strict=True), color=colour, linewidth=1.8, linestyle=(0, (5, 3)), label=name)
    axes.plot(bends, fit, color=OURS, linewidth=3, label="fit")
    off = [(room.context, room.off) for room in plan.curve if room.off]
    if off:
        axes.plot(*zip(*off, strict=True), color=OTHER, marker="o", linewidth=3, label="all KV on the device")
    for knee in plan.knees:
        late = knee.context > places[-1] / 2
        axes.axvline(knee.context, color=INK, linewidth=0.8, linestyle=":")
        axes.annotate(
            f"{knee.after.value}\nfrom {knee.context:,}",
            (knee.context, 0.98),
            xycoords=("data", "axes fraction"),
            xytext=(-5 if late else 5, 0),
            textcoords="offset points",
            ha="right" if late else "left",
            va="top",
            fontsize=11,
        )
    axes.set_xticks(places, [context_text(place) for place in places])
    axes.minorticks_off()
    axes.set_ylim(_FLOOR, 4 * max(room.pool for room in plan.curve))
    axes.legend(loc="lower left", fontsize=12)


def _copying(plan: Plan, axes: Axes) -> None:
    axes.set_title(f"Copying per step, {requests_text(plan.device.requests)}")
    axes.set_ylabel("ms per step, at least")
    axes.set_xlabel("selected rows that are on the device already")
    floors = [line.floor_s * 1e3 for line in plan.gather]
    colours = [OURS if line.hit_rate == plan.hit_rate else OTHER for line in plan.gather]
    bars = axes.bar(range(len(floors)), floors, 0.6, color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=4, fontsize=12)
    axes.axhline(plan.tpot_s * 1e3, color=THIRD, linewidth=1.5, linestyle=(0, (4, 4)))
    axes.annotate(
        f"{plan.tpot_s * 1e3:g} ms wanted",
        (0.99, plan.tpot_s * 1e3),
        xycoords=("axes fraction", "data"),
        xytext=(0, 6),
        textcoords="offset points",
        ha="right",
        fontsize=11,
    )
    axes.set_xticks(range(len(floors)), [f"{line.hit_rate:.0%}" for line in plan.gather])
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.15)
