# SPDX-License-Identifier: Apache-2.0
"""The picture of ``tidal bench capacity``: requests at once over time, and the device memory behind them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tidal_connector.cli.bench.capacity_report import Capacity
from tidal_connector.cli.bench.plot import FOURTH, INK, OTHER, OURS, write_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 1 << 20
_NAMES = ("all on\nthe device", "latents in\nthe pool")


def draw(found: Capacity, file: Path | None) -> None:
    """Write the picture; nothing where no file was asked for.

    Raises:
        ConfigError: the file cannot be written.
    """
    title = (
        f"{found.concurrent_requests_on_over_off:.1f} x the requests at once, "
        f"{found.throughput_on_over_off:.1f} x the tokens per second, in the same device memory"
    )
    requests = f"{found.requests} requests of {found.prompt:,} + {found.output:,} tokens"
    model = f"{found.arch}, {found.layers} layers, top-k {found.top_k}, {found.slots} slots"
    footer = f"{requests}. {model}. {found.machine.line()}."
    panels = [lambda axes: _over_time(found, axes), lambda axes: _memory(found, axes), lambda axes: _speed(found, axes)]
    write_plot(file, title, footer, panels, (2.2, 1, 0.8))


def _over_time(found: Capacity, axes: Axes) -> None:
    axes.set_title("Requests that run at once")
    axes.set_xlabel("seconds since all were sent")
    for name, colour, run in (("latents in the pool", OURS, found.on), ("all on the device", OTHER, found.off)):
        at = [sample.at for sample in run.samples]
        running = [sample.running for sample in run.samples]
        axes.fill_between(at, running, step="post", color=colour, alpha=0.2, linewidth=0)
        axes.step(at, running, where="post", color=colour, linewidth=2.5, label=f"{name}: {run.seconds:.0f} s")
    limit = found.off.peak * found.bound
    axes.axhline(limit, color=INK, linewidth=1, linestyle=(0, (4, 4)))
    axes.annotate(
        f"by the layout: {found.bound:.1f} x",
        (0.99, limit),
        xycoords=("axes fraction", "data"),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right",
        fontsize=11,
    )
    axes.set_ylim(0, limit * 1.25)
    axes.set_xlim(left=0)
    axes.legend(loc="upper left", ncols=2, fontsize=12)


def _memory(found: Capacity, axes: Axes) -> None:
    axes.set_title("Device KV, allocated")
    axes.set_ylabel("MiB")
    on, off = found.on, found.off
    axes.bar([0], [off.device_kv_bytes / _MIB], 0.6, color=OTHER, label="latents and index keys")
    axes.bar([1], [on.index_bytes / _MIB], 0.6, color=OURS, label="index keys")
    axes.bar(
        [1], [on.selection_bytes / _MIB], 0.6, bottom=[on.index_bytes / _MIB], color=FOURTH, label="selection cache"
    )
    for place, run in enumerate((off, on)):
        axes.annotate(
            f"{run.peak} requests",
            (place, run.device_kv_bytes / _MIB),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=12,
            fontweight="bold",
        )
    axes.set_xticks([0, 1], _NAMES)
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.35)
    axes.legend(loc="upper left", fontsize=11)


def _speed(found: Capacity, axes: Axes) -> None:
    axes.set_title("Output tokens / s")
    bars = axes.bar([0, 1], [found.off.tokens_per_s, found.on.tokens_per_s], 0.6, color=[OTHER, OURS])
    axes.bar_label(bars, fmt="%.0f", padding=4, fontsize=12, fontweight="bold")
    axes.set_xticks([0, 1], _NAMES)
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.2)
