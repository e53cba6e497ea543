# SPDX-License-Identifier: Apache-2.0
"""The picture of ``tidal bench gather``: speed beside memcpy and torch, and the time of a plan over the context."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tidal_connector.cli.bench.gather_report import FLATNESS_BOUND, Gather, context_text
from tidal_connector.cli.bench.plot import FAINT, INK, OTHER, OURS, THIRD, grouped_bars, write_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(found: Gather, file: Path | None) -> None:
    """Write the picture; nothing where no file was asked for.

    Raises:
        ConfigError: the file cannot be written.
    """
    title = (
        f"{found.top_k:,} missed rows per request: {found.gather_over_memcpy:.2f} of memcpy at least; "
        f"planned in {found.resolve_us_per_row.median:.1f} µs at any context"
    )
    footer = f"{found.pool}. {found.machine.line()}. Medians of {found.repetitions} interleaved rounds."
    write_plot(file, title, footer, [lambda axes: _speeds(found, axes), lambda axes: _times(found, axes)], (1.9, 1))


def _speeds(found: Gather, axes: Axes) -> None:
    axes.set_title("Rows from the host pool into random slots, all of them missed")
    axes.set_ylabel("GB/s")
    grouped_bars(
        axes,
        [case.label() for case in found.copies],
        [
            ("memcpy of as many bytes", OTHER, [case.memcpy_gb_per_s.median for case in found.copies]),
            ("gather", OURS, [case.gather_gb_per_s.median for case in found.copies]),
            (
                "torch: index_select, index_copy_",
                THIRD,
                [case.index_select_to_slots_gb_per_s.median for case in found.copies],
            ),
        ],
    )


def _times(found: Gather, axes: Axes) -> None:
    places = [point.context for point in found.contexts]
    times = [point.us_per_row for point in found.contexts]
    least = min(time.median for time in times)
    axes.set_title(f"Plan of {found.top_k:,} positions at {found.hit_rate:.0%} hits")
    axes.set_ylabel("µs per row, one thread")
    axes.set_xlabel("context, tokens")
    axes.set_xscale("log", base=2)
    axes.axhspan(least, least * FLATNESS_BOUND, color=FAINT, zorder=0)
    axes.fill_between(places, [t.min for t in times], [t.max for t in times], color=OURS, alpha=0.15, linewidth=0)
    axes.plot(places, [time.median for time in times], color=OURS, marker="o", linewidth=2.5)
    axes.set_xticks(places, [context_text(place) for place in places])
    axes.minorticks_off()
    axes.set_ylim(0, max(2.2 * least, 1.1 * max(time.median for time in times)))
    axes.annotate(
        f"within {FLATNESS_BOUND} x of the fastest (measured: {found.resolve_flatness:.2f} x)",
        (0.5, least * FLATNESS_BOUND),
        xycoords=("axes fraction", "data"),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
        fontsize=11,
        color=INK,
    )
