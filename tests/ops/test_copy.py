# SPDX-License-Identifier: Apache-2.0
"""One test body for every implementation of copy_rows."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.paths import every_way
from tidal_connector.ops import Implementation, copy_rows, native, reference

Rows = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]
Copy = Callable[[Rows, Indices, Rows, Indices], int]


every = every_way("copy", reference.copy_rows, native.copy_rows)


def rows_of(seed: int, pages: int, page_tokens: int, row_bytes: int, page_gap: int = 0, row_gap: int = 0) -> Rows:
    """Random rows; the gaps between rows and pages are part of the memory but not of the array."""
    noise = np.random.default_rng(seed).integers(1, 256, size=(pages, page_tokens + page_gap, row_bytes + row_gap))
    return noise.astype(np.uint8)[:, :page_tokens, :row_bytes]


def one_by_one(source: Rows, source_rows: Indices, destination: Rows, destination_rows: Indices) -> Rows:
    """The memory behind the destination as it has to be afterwards."""
    result = destination.copy()
    for row, place in zip(source_rows.tolist(), destination_rows.tolist(), strict=True):
        if place >= 0:
            result[place // result.shape[1], place % result.shape[1]] = (
                source[row // source.shape[1], row % source.shape[1]] if row >= 0 else 0
            )
    return result


@every
@pytest.mark.parametrize("row_bytes", [1, 31, 32, 63, 64, 65, 132, 584, 656, 1024, 1152])
@pytest.mark.parametrize(("pages", "page_tokens"), [(1, 100), (13, 16), (7, 1), (5, 12)])
def test_rows_of_every_size_and_paging(copy: Copy, row_bytes: int, pages: int, page_tokens: int) -> None:
    source, destination = rows_of(1, pages, page_tokens, row_bytes), rows_of(2, 20, 15, row_bytes)
    rng = np.random.default_rng(3)
    source_rows = rng.integers(-1, pages * page_tokens, 200)
    destination_rows = rng.permutation(300)[:200]
    destination_rows[rng.random(200) < 0.1] = -1
    expected = one_by_one(source, source_rows, destination, destination_rows)
    assert copy(source, source_rows, destination, destination_rows) == -1
    assert (destination == expected).all()


@st.composite
def copies(draw: st.DrawFn) -> tuple[Rows, Indices, Rows, Indices, Rows]:
    """Two arrays with gaps, row numbers with -1 and with repeated sources, and the memory behind the destination."""
    extent, gap = st.integers(1, 6), st.integers(0, 4)
    row_bytes = draw(st.integers(1, 200))
    source = rows_of(draw(st.integers(0, 9)), draw(extent), draw(extent), row_bytes, draw(gap), draw(gap))
    pages, page_tokens, page_gap, row_gap = draw(extent), draw(extent), draw(gap), draw(gap)
    memory = np.full((pages, page_tokens + page_gap, row_bytes + row_gap), 0xEE, np.uint8)
    places = draw(st.permutations(range(pages * page_tokens)))
    places = [draw(st.sampled_from([place, place, place, -1])) for place in places]
    places = places[: draw(st.integers(0, len(places)))]
    rows = st.integers(-1, source.shape[0] * source.shape[1] - 1)
    source_rows = draw(st.lists(rows, min_size=len(places), max_size=len(places)))
    destination = memory[:, :page_tokens, :row_bytes]
    return source, np.array(source_rows, np.int64), destination, np.array(places, np.int64), memory


@every
@settings(max_examples=100, deadline=None)
@given(case=copies())
def test_gaps_padding_skips_and_repeated_sources(copy: Copy, case: tuple[Rows, Indices, Rows, Indices, Rows]) -> None:
    source, source_rows, destination, destination_rows, memory = case
    expected = memory.copy()
    expected[:, : destination.shape[1], : destination.shape[2]] = one_by_one(
        source, source_rows, destination, destination_rows
    )
    assert copy(source, source_rows, destination, destination_rows) == -1
    assert (memory == expected).all()


@every
@pytest.mark.parametrize("shift", [0, 1, 16])
@pytest.mark.parametrize("row_bytes", [1152, 656])
def test_copies_large_enough_to_stream(copy: Copy, row_bytes: int, shift: int) -> None:
    count = 9000
    source = rows_of(1, 4, 64, row_bytes)
    memory = np.full(count * row_bytes + 128, 0xEE, np.uint8)
    start = -memory.ctypes.data % 64 + shift
    destination = memory[start : start + count * row_bytes].reshape(1, count, row_bytes)
    rng = np.random.default_rng(5)
    source_rows, destination_rows = rng.integers(-1, 256, count), rng.permutation(count)
    destination_rows[::7] = -1
    expected = one_by_one(source, source_rows, destination, destination_rows)
    assert copy(source, source_rows, destination, destination_rows) == -1
    assert (destination == expected).all()
    assert (memory[:start] == 0xEE).all()
    assert (memory[start + count * row_bytes :] == 0xEE).all()


@every
@pytest.mark.parametrize("bad", [-2, 8, 1 << 40, -(1 << 63), (1 << 63) - 1])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_an_index_outside_is_found_before_anything_is_written(copy: Copy, side: str, bad: int) -> None:
    destination = np.full((2, 4, 16), 0xEE, np.uint8)
    rows = {"source": np.array([0, 1, 2]), "destination": np.array([0, 1, 2])}
    rows[side][1:] = bad
    wrong = copy(rows_of(1, 2, 4, 16), rows["source"], destination, rows["destination"])
    assert wrong == (1 if side == "source" else 4)
    assert (destination == 0xEE).all()


@every
@pytest.mark.parametrize("shape", [(0, 4, 16), (4, 0, 16), (0, 0, 16), (2, 4, 0)])
def test_nothing_to_copy(copy: Copy, shape: tuple[int, int, int]) -> None:
    none = np.empty(0, np.int64)
    empty, some = np.zeros(shape, np.uint8), np.full((2, 4, shape[2]), 0xEE, np.uint8)
    assert copy(empty, none, some, none) == -1
    assert copy(some, none, empty, none) == -1
    assert copy(empty, np.array([-1]), some, np.array([-1])) == -1
    assert (some == 0xEE).all()


@pytest.mark.native
def test_many_threads_may_copy_at_once() -> None:
    source = rows_of(1, 4, 64, 656)
    rng = np.random.default_rng(5)
    source_rows, places = rng.integers(-1, 256, 4000), rng.permutation(4000)
    destinations = [np.zeros((1, 4000, 656), np.uint8) for _ in range(4)]

    def copy_often(destination: Rows, threads: int) -> None:
        for _ in range(20):
            copy_rows(source, source_rows, destination, places, threads=threads)

    workers = [threading.Thread(target=copy_often, args=(each, 2 + i)) for i, each in enumerate(destinations)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    expected = one_by_one(source, source_rows, destinations[0], places)
    assert all((destination == expected).all() for destination in destinations)


@pytest.mark.parametrize("implementation", list(Implementation))
def test_the_public_operator_takes_flat_and_paged_rows(implementation: Implementation) -> None:
    source, rows, places = rows_of(1, 3, 4, 24), np.array([11, -1, 0, 5]), np.array([3, 1, -1, 2])
    for view in (source, source.reshape(12, 24)):
        paged = np.full((2, 2, 24), 0xEE, np.uint8)
        flat = np.full((4, 24), 0xEE, np.uint8)
        expected = one_by_one(source, rows, paged, places)
        copy_rows(view, rows, paged, places, implementation=implementation)
        copy_rows(view, rows, flat, places, implementation=implementation)
        assert (paged == expected).all()
        assert (flat == expected.reshape(4, 24)).all()


@pytest.mark.parametrize("implementation", list(Implementation))
def test_the_public_operator_names_the_index(implementation: Implementation) -> None:
    source, fine = rows_of(1, 3, 4, 24), np.array([0, 1])
    destination = np.zeros((5, 24), np.uint8)
    with pytest.raises(IndexError, match=r"^source_rows\[1\] = 12: expected -1 or a row in \[0, 12\)"):
        copy_rows(source, np.array([0, 12]), destination, fine, implementation=implementation)
    with pytest.raises(IndexError, match=r"^destination_rows\[0\] = -2: expected -1 or a row in \[0, 5\)"):
        copy_rows(source, fine, destination, np.array([-2, 7]), implementation=implementation)


def frozen(array: Rows) -> Rows:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"source": [[1]]}, TypeError, "source: expected a numpy array of uint8, got list"),
        ({"destination": np.zeros((2, 24), np.int8)}, TypeError, "destination: .* uint8, got int8"),
        ({"source_rows": np.zeros(2, np.int32)}, TypeError, "source_rows: .* int64, got int32"),
        ({"destination_rows": np.zeros(2, np.int32)}, TypeError, "destination_rows: .* int64, got int32"),
        ({"source": np.zeros(24, np.uint8)}, ValueError, "source .24,.: expected .rows, row_bytes."),
        ({"destination": np.zeros((2, 23), np.uint8)}, ValueError, "expected rows of one size"),
        ({"source_rows": np.zeros(3, np.int64)}, ValueError, "expected one length"),
        ({"source_rows": np.zeros((2, 1), np.int64)}, ValueError, "source_rows .2, 1.: expected .n."),
        ({"destination_rows": np.zeros(4, np.int64)[::2]}, ValueError, "destination_rows: expected a contiguous"),
        ({"source": np.zeros((12, 48), np.uint8)[:, ::2]}, ValueError, "source: the bytes of a row"),
        ({"destination": frozen(np.zeros((2, 24), np.uint8))}, ValueError, "destination: expected a writable"),
        ({"threads": 0}, ValueError, "threads = 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], error: type[Exception], text: str) -> None:
    fine: dict[str, object] = {
        "source": rows_of(1, 3, 4, 24),
        "source_rows": np.zeros(2, np.int64),
        "destination": np.zeros((2, 24), np.uint8),
        "destination_rows": np.arange(2),
    }
    with pytest.raises(error, match=text):
        copy_rows(**{**fine, **change})  # type: ignore[arg-type]
