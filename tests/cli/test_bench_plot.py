# SPDX-License-Identifier: Apache-2.0
"""Pictures of the benchmarks: they open, have their size and show both sides; what cannot be drawn is refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.cli import canned
from tidal_connector.cli.bench import capacity_plot, decode_plot, gather_plot, plot
from tidal_connector.errors import ConfigError, TidalError

DRAWN: list[tuple[str, Callable[[Any, Path | None], None], Any]] = [
    ("gather", gather_plot.draw, canned.gather()),
    ("decode", decode_plot.draw, canned.decode()),
    ("capacity", capacity_plot.draw, canned.capacity()),
]


@pytest.mark.parametrize(("name", "draw", "found"), DRAWN, ids=[name for name, _, _ in DRAWN])
def test_a_picture_opens_and_shows_both_sides(
    name: str, draw: Callable[[Any, Path | None], None], found: Any, tmp_path: Path
) -> None:
    file = tmp_path / f"{name}.png"
    draw(found, file)
    with Image.open(file) as image:
        assert (image.format, image.size) == ("PNG", (plot.WIDTH, plot.HEIGHT))
        colours = {colour: count for count, colour in image.convert("RGB").getcolors(1 << 20)}
    for colour in (plot.OURS, plot.OTHER):
        assert colours.get(tuple(bytes.fromhex(colour[1:])), 0) > 2000, colour
    assert colours[255, 255, 255] > plot.WIDTH * plot.HEIGHT / 3


@pytest.mark.parametrize(("name", "draw", "found"), DRAWN, ids=[name for name, _, _ in DRAWN])
def test_words_of_a_picture_stay_inside_it(
    name: str, draw: Callable[[Any, Path | None], None], found: Any, tmp_path: Path
) -> None:
    file = tmp_path / f"{name}.png"
    draw(found, file)
    with Image.open(file) as image:
        grey = image.convert("L")
        for edge in (grey.crop((plot.WIDTH - 4, 0, plot.WIDTH, plot.HEIGHT)), grey.crop((0, 0, plot.WIDTH, 4))):
            assert edge.getextrema() == (255, 255)


@pytest.mark.parametrize("ending", ["svg", "pdf"])
def test_other_formats_are_chosen_by_the_ending(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"out.{ending}"
    plot.check_plot_file(file)
    gather_plot.draw(canned.gather(), file)
    assert file.read_bytes()[:5] == {"svg": b"<?xml", "pdf": b"%PDF-"}[ending]


def test_no_file_means_no_picture_and_no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    plot.check_plot_file(None)
    gather_plot.draw(canned.gather(), None)


def test_a_missing_matplotlib_is_said_in_one_line_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TidalError, match="--plot needs matplotlib; install it with: pip install matplotlib"):
        plot.check_plot_file(tmp_path / "out.png")


@pytest.mark.parametrize("name", ["nowhere/out.png", "out.jpeg", "out", ""])
def test_a_file_that_cannot_be_drawn_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a file in a folder that exists, ending in \.png"):
        plot.check_plot_file(tmp_path / name)
