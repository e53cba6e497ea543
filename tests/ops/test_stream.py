# SPDX-License-Identifier: Apache-2.0
"""One test body for every implementation of CopyStream; what only threads can do is in test_stream_threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from tidal_connector.errors import NativeOpMissing
from tidal_connector.ops import CopyStream, Implementation, Move, Waited, native

Rows = npt.NDArray[np.uint8]
NONE = np.empty(0, np.int64)


def random_rows(seed: int, *shape: int) -> Rows:
    return np.random.default_rng(seed).integers(1, 256, shape).astype(np.uint8)


def implementations() -> list[object]:
    try:
        native.load()
        marks = [pytest.mark.native]
    except NativeOpMissing as error:
        marks = [pytest.mark.native, pytest.mark.skip(reason=str(error))]
    found: list[object] = [pytest.param((Implementation.REFERENCE, 1), id="reference")]
    found += [
        pytest.param((Implementation.NATIVE, threads), id=f"native-{threads}", marks=marks) for threads in (0, 1, 3)
    ]
    return found


@pytest.fixture(params=implementations())
def stream(request: pytest.FixtureRequest) -> Iterator[CopyStream]:
    implementation, threads = request.param
    with CopyStream(threads, implementation=implementation) as stream:
        yield stream


def test_rows_arrive_and_tickets_rise(stream: CopyStream) -> None:
    pools = [random_rows(i, 3, 16, 40 + 8 * i) for i in range(4)]
    caches = [np.zeros((20, 40 + 8 * i), np.uint8) for i in range(4)]
    moves = stream.prepare([Move(pool, cache) for pool, cache in zip(pools, caches, strict=True)])
    rows, places = np.array([47, -1, 0, 5]), np.array([3, 19, -1, 0])
    first = stream.submit(moves, rows, places)
    assert first == 1
    for ticket in range(first, first + 4):
        assert stream.wait(ticket, 10) in {Waited.READY, Waited.WAITED, Waited.RAN}
        assert stream.done(ticket)
        assert stream.wait(ticket, 0) is Waited.READY
    assert stream.submit(moves, NONE, NONE) == 5
    for pool, cache in zip(pools, caches, strict=True):
        expected = np.zeros_like(cache)
        expected[[3, 0]] = pool.reshape(48, -1)[[47, 5]]
        assert (cache == expected).all()


def test_a_part_of_the_moves(stream: CopyStream) -> None:
    pool, caches = random_rows(1, 4, 8), [np.zeros((4, 8), np.uint8) for _ in range(5)]
    moves = stream.prepare([Move(pool, cache) for cache in caches])
    everything = np.arange(4)
    assert stream.submit(moves, everything, everything, first=1, count=2) == 1
    assert stream.submit(moves, everything, everything, first=4) == 3
    assert stream.settle(3, 10) is not Waited.TIMEOUT
    assert [bool(cache.any()) for cache in caches] == [False, True, True, False, True]


def test_the_row_numbers_are_copied(stream: CopyStream) -> None:
    pool, cache = random_rows(1, 64, 8), np.zeros((64, 8), np.uint8)
    moves = stream.prepare([Move(pool, cache)])
    rows, places = np.arange(64), np.arange(64)[::-1].copy()
    ticket = stream.submit(moves, rows, places)
    rows[:] = places[:] = 1 << 40
    assert stream.wait(ticket, 10) is not Waited.TIMEOUT
    assert (cache == pool[::-1]).all()


def test_what_comes_after_a_write_back_reads_the_new_rows(stream: CopyStream) -> None:
    """Every wait is for the newest fetch alone, which the waiter would run first if nothing forbade it."""
    staging, cache = np.zeros((16, 656), np.uint8), np.zeros((16, 656), np.uint8)
    pools = np.zeros((3, 4, 64, 656), np.uint8)
    back = stream.prepare([Move(staging, pool) for pool in pools])
    fetch = stream.prepare([Move(pools[0], cache)])
    rng = np.random.default_rng(2)
    for step in range(1, 200):
        staging[:] = step % 256
        rows = rng.permutation(256)[:16]
        written = stream.submit(back, np.arange(16), rows) + 2
        ticket = stream.submit(fetch, rows, np.arange(16), after=written)
        assert stream.wait(ticket, 10) is not Waited.TIMEOUT
        assert (cache == step % 256).all()
        assert stream.done(written)


def test_settling_is_for_all_tickets_up_to_one(stream: CopyStream) -> None:
    pool = random_rows(1, 512, 656)
    caches = [np.zeros((512, 656), np.uint8) for _ in range(6)]
    moves = stream.prepare([Move(pool, cache) for cache in caches])
    everything = np.arange(512)
    last = stream.submit(moves, everything, everything) + 5
    assert stream.wait(last, 10) is not Waited.TIMEOUT
    assert stream.settle(last, 10) is not Waited.TIMEOUT
    assert all((cache == pool).all() for cache in caches)
    assert stream.settle(last, 0) is Waited.READY


def test_closing_finishes_what_was_submitted(stream: CopyStream) -> None:
    pool = random_rows(1, 512, 656)
    caches = [np.zeros((512, 656), np.uint8) for _ in range(6)]
    moves = stream.prepare([Move(pool, cache) for cache in caches])
    everything = np.arange(512)
    ticket = stream.submit(moves, everything, everything)
    stream.submit(moves, everything, everything[::-1].copy(), after=ticket + 5)
    stream.close()
    assert all((cache == pool[::-1]).all() for cache in caches)
    stream.close()
    assert stream.done(ticket)
    assert stream.wait(ticket + 11, 0) is Waited.READY
    with pytest.raises(RuntimeError, match="closed"):
        stream.submit(moves, everything, everything)


def test_statistics_count_what_was_written(stream: CopyStream) -> None:
    pool, cache = random_rows(1, 8, 24), np.zeros((8, 24), np.uint8)
    moves = stream.prepare([Move(pool, cache), Move(pool, np.zeros_like(cache))])
    ticket = stream.submit(moves, np.array([1, -1, 3]), np.array([0, 1, -1]))
    stream.settle(ticket + 1, 10)
    counted = stream.statistics()
    assert (counted.jobs, counted.bytes) == (2, 2 * 2 * 24)
    assert counted.busy_seconds + counted.stolen_seconds > 0
    assert counted.waited_seconds >= 0
    assert 0 <= counted.late <= 1


def test_an_index_outside_any_of_the_moves_queues_nothing(stream: CopyStream) -> None:
    small, large = random_rows(1, 4, 8), random_rows(1, 3, 4, 8)
    caches = [np.zeros((5, 8), np.uint8), np.zeros((3, 8), np.uint8)]
    moves = stream.prepare([Move(large, caches[0]), Move(small, caches[0]), Move(large, caches[1])])
    with pytest.raises(IndexError, match=r"^source_rows\[1\] = 4: expected -1 or a row in \[0, 4\)"):
        stream.submit(moves, np.array([0, 4]), np.array([0, 1]))
    with pytest.raises(IndexError, match=r"^destination_rows\[0\] = 3: expected -1 or a row in \[0, 3\)"):
        stream.submit(moves, np.array([0, 1]), np.array([3, -2]), first=1)
    assert not any(cache.any() for cache in caches)
    assert stream.submit(moves, np.array([11]), np.array([4]), count=1) == 1


def test_tickets_that_were_not_issued_are_refused(stream: CopyStream) -> None:
    cache = np.zeros((4, 8), np.uint8)
    moves = stream.prepare([Move(random_rows(1, 4, 8), cache)])
    assert stream.done(0)
    assert stream.wait(0, 0) is Waited.READY
    stream.submit(moves, NONE, NONE)
    for ask in (stream.done, lambda ticket: stream.wait(ticket, 0), lambda ticket: stream.settle(ticket, 0)):
        for ticket in (-1, 2):
            with pytest.raises(ValueError, match=f"ticket {ticket}: expected at least 0, at most 1"):
                ask(ticket)
    with pytest.raises(ValueError, match="ticket 2: expected at least 0, at most 1"):
        stream.submit(moves, NONE, NONE, after=2)


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), float("inf")])
def test_every_wait_has_a_deadline(stream: CopyStream, timeout_s: float) -> None:
    for wait in (stream.wait, stream.settle):
        with pytest.raises(ValueError, match=r"timeout_s = .*: expected a finite number of seconds"):
            wait(0, timeout_s)


def submit_with(**change: object) -> Callable[[CopyStream], object]:
    def submit(stream: CopyStream) -> object:
        moves = stream.prepare([Move(random_rows(1, 4, 8), np.zeros((4, 8), np.uint8)) for _ in range(3)])
        fine: dict[str, object] = {"source_rows": np.arange(2), "destination_rows": np.arange(2)}
        return stream.submit(moves, **{**fine, **change})  # type: ignore[arg-type]

    return submit


def prepare_with(source: Rows, destination: Rows) -> Callable[[CopyStream], object]:
    return lambda stream: stream.prepare([Move(source, destination)])


@pytest.mark.parametrize(
    ("act", "error", "text"),
    [
        (submit_with(source_rows=np.arange(2, dtype=np.int32)), TypeError, "source_rows: .* int64, got int32"),
        (submit_with(destination_rows=np.arange(4)[::2]), ValueError, "destination_rows: expected a contiguous"),
        (submit_with(source_rows=np.arange(3)), ValueError, "expected one length"),
        (submit_with(first=3), ValueError, "first = 3, count = 0: expected a part of 3 moves"),
        (submit_with(first=-1, count=1), ValueError, "first = -1"),
        (submit_with(first=1, count=3), ValueError, "first = 1, count = 3"),
        (submit_with(count=0), ValueError, "count = 0"),
        (lambda stream: stream.prepare([]), ValueError, "moves: expected at least one"),
        (prepare_with(np.zeros((4, 8), np.int8), np.zeros((4, 8), np.uint8)), TypeError, r"moves\[0\].source: "),
        (prepare_with(np.zeros((4, 8), np.uint8), np.zeros(8, np.uint8)), ValueError, r"moves\[0\].destination "),
        (prepare_with(np.zeros((4, 8), np.uint8), np.zeros((4, 9), np.uint8)), ValueError, "rows of one size"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    stream: CopyStream, act: Callable[[CopyStream], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        act(stream)
    assert stream.statistics().jobs == 0


def test_a_negative_number_of_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="threads = -1: expected at least 0"):
        CopyStream(-1)


def test_without_the_native_module_the_reference_does_it_and_says_so(
    no_native: None, caplog: pytest.LogCaptureFixture
) -> None:
    cache, pool = np.zeros((4, 8), np.uint8), random_rows(1, 4, 8)
    with CopyStream() as stream:
        stream.submit(stream.prepare([Move(pool, cache)]), np.arange(4), np.arange(4))
        assert (cache == pool).all()
    assert sum("moving rows with numpy" in record.message for record in caplog.records) == 1
    with pytest.raises(NativeOpMissing):
        CopyStream(implementation=Implementation.NATIVE)
