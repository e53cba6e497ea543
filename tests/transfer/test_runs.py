# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidal_connector.errors import LayoutMismatch
from tidal_connector.layout import Home, Region, RegionKind
from tidal_connector.transfer.runs import Run, plan_runs, split_runs


def region(
    page_tokens: int, pages: int, *, base: int = 1 << 20, row_bytes: int = 12, pad: int = 0, layer: int = 3
) -> Region:
    stride = page_tokens * row_bytes + pad
    return Region(RegionKind.LATENT, layer, row_bytes, Home.HOST, base, stride, page_tokens, pages)


def row_of(where: Region, pages: list[int], token: int, first: int = 0) -> int:
    page, row = divmod(token - first, where.page_tokens)
    return where.address(pages[page], row)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Region, Region, list[int], list[int], int, int, int]:
    source = region(draw(st.integers(1, 9)), 40, pad=draw(st.sampled_from([0, 5])))
    destination = region(draw(st.integers(1, 9)), 40, base=1 << 30, pad=draw(st.sampled_from([0, 7])))
    end = draw(st.integers(0, 40))
    first = draw(st.integers(0, end))
    destination_first = first // destination.page_tokens * destination.page_tokens
    shuffle = random.Random(draw(st.integers(0, 5)))
    ordered = draw(st.booleans())
    source_pages = list(range(40)) if ordered else shuffle.sample(range(40), 40)
    destination_pages = list(range(40)) if ordered else shuffle.sample(range(40), 40)
    covered = -(-(end - destination_first) // destination.page_tokens)
    return (
        source,
        destination,
        source_pages[: -(-end // source.page_tokens)],
        destination_pages[:covered],
        first,
        end,
        destination_first,
    )


@given(plans())
def test_every_row_goes_to_its_place_and_nothing_else_moves(plan: tuple) -> None:
    source, destination, source_pages, destination_pages, first, end, destination_first = plan
    runs = plan_runs(source, destination, source_pages, destination_pages, first, end, destination_first)
    moved = {run.destination + byte: run.source + byte for run in runs for byte in range(run.length)}
    expected = {
        row_of(destination, destination_pages, token, destination_first) + byte: row_of(source, source_pages, token)
        + byte
        for token in range(first, end)
        for byte in range(source.row_bytes)
    }
    assert moved == expected
    assert sum(run.length for run in runs) == (end - first) * source.row_bytes


@given(plans())
def test_no_two_neighbouring_runs_could_be_one(plan: tuple) -> None:
    runs = plan_runs(*plan)
    for left, right in itertools.pairwise(runs):
        assert (left.source + left.length, left.destination + left.length) != (
            right.source,
            right.destination,
        )


def test_contiguous_pages_on_both_sides_are_one_run() -> None:
    runs = plan_runs(region(4, 8), region(4, 8, base=1 << 30), [2, 3, 4], [5, 6, 7], 1, 11)
    assert runs == [Run((1 << 20) + 2 * 48 + 12, (1 << 30) + 5 * 48 + 12, 120)]


def test_padded_pages_are_not_joined() -> None:
    runs = plan_runs(region(4, 8, pad=16), region(4, 8, base=1 << 30, pad=16), [0, 1], [0, 1], 0, 8)
    assert [run.length for run in runs] == [48, 48]


def test_an_empty_range_needs_no_pages() -> None:
    assert plan_runs(region(4, 8), region(4, 8), [], [], 0, 0) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"source_pages": [0]}, "token 4 of"),
        ({"destination_pages": [0]}, "token 4 of"),
        ({"source_pages": [0, 8]}, "page 8 row 0"),
        ({"destination_pages": [0, -1]}, "page -1 row 0"),
        ({"end": -1}, "first <= end"),
        ({"destination_first": 2}, "page of 4 tokens"),
        ({"first": 1, "destination_first": 4}, "4 <= first"),
        ({"destination": region(4, 8, row_bytes=16)}, "regions differ"),
        ({"destination": region(4, 8, layer=4)}, "regions differ"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, text: str) -> None:
    given_arguments = {
        "source": region(4, 8),
        "destination": region(4, 8),
        "source_pages": [0, 1],
        "destination_pages": [0, 1],
        "first": 0,
        "end": 8,
    }
    with pytest.raises(LayoutMismatch, match=text):
        plan_runs(**{**given_arguments, **change})


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(1, 9))
def test_split_keeps_every_byte_within_its_run(lengths: list[int], largest: int) -> None:
    runs = [Run(1000 * n + 7, 5000 * n + 3, length) for n, length in enumerate(lengths, 1)]
    pieces = list(split_runs(runs, largest))
    assert all(0 < piece.length <= largest for piece in pieces)
    moved = [(piece.source + byte, piece.destination + byte) for piece in pieces for byte in range(piece.length)]
    assert moved == [(run.source + byte, run.destination + byte) for run in runs for byte in range(run.length)]


def test_split_refuses_descriptors_of_nothing() -> None:
    with pytest.raises(ValueError, match="largest = 0"):
        list(split_runs([Run(1, 1, 1)], 0))
