# SPDX-License-Identifier: Apache-2.0
"""The picture of ``tidal bench decode``: time per token of each engine, and what a step fetches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tidal_connector.cli.bench.decode_report import BatchCase, Decode, ModelCase
from tidal_connector.cli.bench.plot import FOURTH, INK, OTHER, OURS, grouped_bars, write_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 1 << 20


def draw(found: Decode, file: Path | None) -> None:
    """Write the picture; nothing where no file was asked for.

    Raises:
        ConfigError: the file cannot be written.
    """
    title = f"Latents in the host pool: at most {found.tpot_on_over_off:.2f} x the time per token of all on the device"
    footer = f"off: {found.off}. {found.machine.line()}. Medians of interleaved rounds."
    write_plot(file, title, footer, [lambda axes: _times(found, axes), lambda axes: _moves(found, axes)], (1.35, 1))


def _cases(found: Decode) -> list[tuple[ModelCase, BatchCase]]:
    return [(model, case) for model in found.models for case in model.cases]


def _labels(found: Decode) -> list[str]:
    return [f"{model.arch}\nbatch {case.batch}" for model, case in _cases(found)]


def _times(found: Decode, axes: Axes) -> None:
    cases = [case for _, case in _cases(found)]
    axes.set_title(f"Time per output token, contexts of {found.context:,} tokens")
    axes.set_ylabel("ms")
    series = [
        ("all on the device", OTHER, [case.tpot_off_ms.median for case in cases]),
        ("latents in the pool", OURS, [case.tpot_on_ms.median for case in cases]),
    ]
    if any(case.tpot_no_prefetch_ms for case in cases):
        without = [case.tpot_no_prefetch_ms.median if case.tpot_no_prefetch_ms else float("nan") for case in cases]
        series.append(("pool, no prefetch", FOURTH, without))
    labels = [
        f"{label}\n{case.tpot_on_over_off.median:.2f} x" for label, case in zip(_labels(found), cases, strict=True)
    ]
    grouped_bars(axes, labels, series)


def _moves(found: Decode, axes: Axes) -> None:
    cases = [case for _, case in _cases(found)]
    places = range(len(cases))
    sizes = [case.moved.bytes_per_step / _MIB for case in cases]
    hidden = [size * case.moved.prefetched_share for size, case in zip(sizes, cases, strict=True)]
    axes.set_title("Bytes that a step fetches from the pool")
    axes.set_ylabel("MiB per step, all layers")
    axes.bar(places, hidden, 0.6, color=OURS, label="for layers that follow: ahead of need, in time")
    rest = [size - part for size, part in zip(sizes, hidden, strict=True)]
    axes.bar(places, rest, 0.6, bottom=hidden, color=OTHER, label="as soon as the layer has selected")
    for place, (size, case) in enumerate(zip(sizes, cases, strict=True)):
        axes.annotate(
            f"{case.moved.hit_rate:.0%} hits\n{case.moved.hidden_share:.0%} hidden",
            (place, size),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            color=INK,
            fontsize=11,
        )
    axes.set_xticks(list(places), _labels(found))
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.28)
    axes.legend(loc="upper left", fontsize=12)
