# SPDX-License-Identifier: Apache-2.0
"""One test body for every implementation of gather_rows."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.paths import every_way
from tidal_connector.errors import NativeOpMissing
from tidal_connector.ops import Implementation, gather_rows, native, reference

Array = npt.NDArray[np.uint8]
Gather = Callable[[Array, npt.NDArray[np.int64], Array], int]


every = every_way("gather", reference.gather_rows, native.gather_rows)


def pool_of(pages: int, page_tokens: int, row_bytes: int, page_gap: int = 0, row_gap: int = 0) -> Array:
    """Random rows; the gaps between rows and pages are part of the memory but not of the pool."""
    noise = np.random.default_rng(pages * 7 + row_bytes).integers(
        1, 256, size=(pages, page_tokens + page_gap, row_bytes + row_gap)
    )
    return noise.astype(np.uint8)[:, :page_tokens, :row_bytes]


def expected(pool: Array, slots: npt.NDArray[np.int64]) -> Array:
    flat = [
        pool[slot // pool.shape[1], slot % pool.shape[1]] if slot >= 0 else np.zeros(pool.shape[2], np.uint8)
        for slot in slots
    ]
    return np.array(flat, np.uint8).reshape(len(slots), pool.shape[2])


@every
@pytest.mark.parametrize("row_bytes", [1, 31, 32, 63, 64, 65, 132, 584, 656, 1024, 1152])
@pytest.mark.parametrize(("pages", "page_tokens"), [(1, 100), (13, 16), (7, 1)])
def test_rows_of_every_size_and_paging(gather: Gather, row_bytes: int, pages: int, page_tokens: int) -> None:
    pool = pool_of(pages, page_tokens, row_bytes)
    slots = np.random.default_rng(3).integers(-1, pages * page_tokens, 200)
    out = np.full((200, row_bytes), 0xEE, np.uint8)
    assert gather(pool, slots, out) == -1
    assert (out == expected(pool, slots)).all()


@every
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_gaps_between_pages_and_rows_on_both_sides(gather: Gather, data: st.DataObject) -> None:
    small = st.integers(0, 5)
    pool = pool_of(
        data.draw(st.integers(1, 5)),
        data.draw(st.integers(1, 5)),
        data.draw(st.integers(1, 130)),
        data.draw(small),
        data.draw(small),
    )
    slots = np.array(data.draw(st.lists(st.integers(-1, pool.shape[0] * pool.shape[1] - 1), max_size=20)), np.int64)
    gap = data.draw(small)
    wide = np.full((len(slots), pool.shape[2] + gap), 0xEE, np.uint8)
    out = wide[:, : pool.shape[2]]
    assert gather(pool, slots, out) == -1
    assert (out == expected(pool, slots)).all()
    assert (wide[:, pool.shape[2] :] == 0xEE).all()


@every
def test_fr_30_padding_reads_nothing_and_gives_zeros(gather: Gather) -> None:
    out = np.full((3, 16), 0xEE, np.uint8)
    assert gather(pool_of(1, 2, 16), np.full(3, -1), out) == -1
    assert not out.any()


@every
@pytest.mark.parametrize("bad", [-2, 8, 1 << 40, -(1 << 62)])
def test_a_slot_outside_the_pool_is_found_before_anything_is_written(gather: Gather, bad: int) -> None:
    out = np.full((3, 16), 0xEE, np.uint8)
    assert gather(pool_of(2, 4, 16), np.array([0, bad, bad]), out) == 1
    assert (out == 0xEE).all()


@every
def test_no_slots_and_an_output_large_enough_to_stream(gather: Gather) -> None:
    assert gather(pool_of(1, 4, 64), np.empty(0, np.int64), np.empty((0, 64), np.uint8)) == -1
    pool = pool_of(4, 64, 1152)
    slots = np.random.default_rng(5).integers(-1, 256, 6000)
    raw = np.zeros(6000 * 1152 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    for shift in (0, 1):  # aligned for streaming stores, and not
        out = raw[start + shift : start + shift + 5999 * 1152].reshape(5999, 1152)
        assert gather(pool, slots[:5999], out) == -1
        assert (out == expected(pool, slots[:5999])).all()


@pytest.mark.native
def test_many_threads_may_gather_at_once() -> None:
    pool, slots = pool_of(4, 64, 656), np.random.default_rng(5).integers(-1, 256, 4000)
    outs = [np.empty((4000, 656), np.uint8) for _ in range(4)]
    workers = [threading.Thread(target=gather_rows, args=(pool, slots, out), kwargs={"threads": 2}) for out in outs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all((out == expected(pool, slots)).all() for out in outs)


@pytest.mark.parametrize("implementation", list(Implementation))
def test_the_public_operator_takes_flat_and_paged_pools(implementation: Implementation) -> None:
    pool = pool_of(3, 4, 24)
    slots = np.array([11, -1, 0, 5])
    for view in (pool, pool.reshape(12, 24)):
        out = np.empty((4, 24), np.uint8)
        gather_rows(view, slots, out, implementation=implementation)
        assert (out == expected(pool, slots)).all()


def test_the_public_operator_names_the_slot() -> None:
    with pytest.raises(IndexError, match=r"slots\[1\] = 12: expected -1 or a row in \[0, 12\)"):
        gather_rows(pool_of(3, 4, 24), np.array([0, 12]), np.empty((2, 24), np.uint8))


def frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"pool": [[1]]}, TypeError, "pool: expected a numpy array of uint8, got list"),
        ({"slots": np.zeros(2, np.int32)}, TypeError, "slots: expected a numpy array of int64, got int32"),
        ({"out": np.zeros((2, 24), np.int8)}, TypeError, "out: expected a numpy array of uint8, got int8"),
        ({"pool": np.zeros(24, np.uint8)}, ValueError, "expected .rows, row_bytes."),
        ({"out": np.zeros((2, 23), np.uint8)}, ValueError, r"expected \(2, 24\)"),
        ({"out": np.zeros((3, 24), np.uint8)}, ValueError, r"expected \(2, 24\)"),
        ({"out": np.zeros((24, 2), np.uint8).T}, ValueError, "contiguous"),
        ({"pool": np.zeros((12, 48), np.uint8)[:, ::2]}, ValueError, "contiguous"),
        ({"slots": np.zeros(4, np.int64)[::2]}, ValueError, "slots: expected a contiguous"),
        ({"out": frozen(np.zeros((2, 24), np.uint8))}, ValueError, "writable"),
        ({"threads": 0}, ValueError, "threads = 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], error: type[Exception], text: str) -> None:
    fine: dict[str, object] = {
        "pool": pool_of(3, 4, 24),
        "slots": np.zeros(2, np.int64),
        "out": np.zeros((2, 24), np.uint8),
    }
    with pytest.raises(error, match=text):
        gather_rows(**{**fine, **change})  # type: ignore[arg-type]


def test_without_the_native_module_numpy_does_it_and_says_so_once(
    no_native: None, caplog: pytest.LogCaptureFixture
) -> None:
    pool, slots = pool_of(3, 4, 24), np.array([1, 2])
    for _ in range(3):
        out = np.empty((2, 24), np.uint8)
        gather_rows(pool, slots, out)
        assert (out == expected(pool, slots)).all()
    assert sum("gathering with numpy" in record.message for record in caplog.records) == 1


def test_asking_for_the_native_module_that_is_not_there_is_an_error(no_native: None) -> None:
    with pytest.raises(NativeOpMissing, match=r"TIDAL_NATIVE = 'missing.so' cannot be loaded"):
        gather_rows(pool_of(3, 4, 24), np.array([1]), np.empty((1, 24), np.uint8), implementation=Implementation.NATIVE)
