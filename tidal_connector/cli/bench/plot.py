# SPDX-License-Identifier: Apache-2.0
"""Pictures of the benchmarks: one look for all of them, drawn without a display. matplotlib is imported late.

Takes a title and a function that draws on axes; hands on a file. No state is kept outside a figure. Any thread.
"""

from __future__ import annotations

import contextlib
import importlib.util
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidal_connector.errors import ConfigError, TidalError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 1600, 900
"""Pixels of a picture."""

OURS, OTHER, THIRD, FOURTH = "#0b7a75", "#9aa5b1", "#d1495b", "#edae49"
"""What is measured, what it is compared with, and two more."""
INK, FAINT = "#1f2933", "#e4e7eb"

_DPI = 100
_FOOTER_LETTERS = 210
_ENDINGS = (".png", ".svg", ".pdf")
_STYLE: dict[Any, Any] = {
    "font.size": 13,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#7b8794",
    "axes.titlesize": 15,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.hashsalt": "tidal",
}


def check_plot_file(file: Path | None) -> None:
    """Refuse a picture that could not be made, before the work of minutes is done for it.

    Raises:
        ConfigError: its folder does not exist, or its ending is not that of a picture.
        TidalError: matplotlib is not installed.
    """
    if file is None:
        return
    if file.is_dir() or not file.parent.is_dir() or file.suffix.lower() not in _ENDINGS:
        raise ConfigError(f"--plot {file}: expected a file in a folder that exists, ending in {', '.join(_ENDINGS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise TidalError("--plot needs matplotlib; install it with: pip install matplotlib")


def write_plot(
    file: Path | None,
    title: str,
    footer: str,
    panels: Sequence[Callable[[Axes], None]],
    widths: Sequence[float] | None = None,
) -> None:
    """Draw panels side by side and write them as one picture; nothing where no file was asked for.

    Args:
        file: where to; its ending chooses the format.
        title: one line at the top: what was found.
        footer: one line at the bottom: on what machine.
        panels: each draws on axes of its own.
        widths: of the panels, in proportion; all the same where not said.

    Raises:
        ConfigError: the file cannot be written.
    """
    if file is None:
        return
    with _figure() as figure:
        figure.suptitle(title, x=0.02, y=0.965, ha="left", va="center", fontsize=19, fontweight="bold")
        lines = textwrap.fill(footer, _FOOTER_LETTERS)
        figure.text(0.02, 0.012, lines, fontsize=10, color="#616e7c", ha="left", va="bottom")
        for axes, draw in zip(
            figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0], panels, strict=True
        ):
            draw(axes)
        try:
            figure.savefig(file, dpi=_DPI)
        except OSError as error:
            raise ConfigError(f"--plot {file}: {error.strerror}") from None


@contextlib.contextmanager
def _figure() -> Iterator[Figure]:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH / _DPI, HEIGHT / _DPI), layout="constrained")
        figure.get_layout_engine().set(rect=(0.01, 0.065, 0.98, 0.86), w_pad=0.15)  # type: ignore[union-attr,call-arg]
        FigureCanvasAgg(figure)
        yield figure


def grouped_bars(
    axes: Axes, labels: Sequence[str], series: Sequence[tuple[str, str, Sequence[float]]], digits: int = 1
) -> list[list[float]]:
    """Draw bars in groups, each with its value above it; return where the bars of each series stand.

    Args:
        axes: where.
        labels: one for each group.
        series: name, colour and the values, one for each group.
        digits: of the values after the point.
    """
    width = 0.8 / len(series)
    found = []
    for number, (name, colour, values) in enumerate(series):
        places = [at + (number - (len(series) - 1) / 2) * width for at in range(len(labels))]
        bars = axes.bar(places, values, width * 0.92, color=colour, label=name)
        axes.bar_label(bars, fmt=f"%.{digits}f", padding=3, fontsize=10 if len(labels) * len(series) < 14 else 9)
        found.append(places)
    axes.set_xticks(range(len(labels)), labels)
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.2)
    axes.legend(loc="upper left", ncols=len(series), fontsize=12)
    return found
