# SPDX-License-Identifier: Apache-2.0
"""What the native copy stream owes to its threads: stealing, deadlines, order under stress, many callers, forks."""

from __future__ import annotations

import os
import threading
import warnings

import numpy as np
import numpy.typing as npt
import pytest

from tidal_connector.errors import NativeOpMissing
from tidal_connector.ops import CopyStream, Implementation, Move, Waited, native

Rows = npt.NDArray[np.uint8]

try:
    native.load()
    pytestmark = pytest.mark.native
except NativeOpMissing as error:
    pytestmark = [pytest.mark.native, pytest.mark.skip(reason=str(error))]


def open_stream(threads: int) -> CopyStream:
    return CopyStream(threads, implementation=Implementation.NATIVE)


def random_rows(seed: int, *shape: int) -> Rows:
    return np.random.default_rng(seed).integers(1, 256, shape).astype(np.uint8)


def test_whoever_waits_does_what_nobody_has_begun() -> None:
    pool = random_rows(1, 32, 656)
    caches = [np.zeros((32, 656), np.uint8) for _ in range(4)]
    with open_stream(0) as stream:
        moves = stream.prepare([Move(pool, cache) for cache in caches])
        first = stream.submit(moves, np.arange(32), np.arange(32))
        assert stream.wait(first + 2, 10) is Waited.RAN
        assert [stream.done(first + i) for i in range(4)] == [False, False, True, False]
        assert [bool(cache.any()) for cache in caches] == [False, False, True, False]
        assert stream.statistics().stolen_seconds > 0
        assert stream.statistics().busy_seconds == 0
        assert stream.statistics().late == 1


def test_whoever_waits_does_first_what_has_to_come_before() -> None:
    staging, pool, cache = random_rows(1, 8, 64), np.zeros((8, 64), np.uint8), np.zeros((8, 64), np.uint8)
    with open_stream(0) as stream:
        back = stream.prepare([Move(staging, pool), Move(staging, np.zeros_like(pool))])
        fetch = stream.prepare([Move(pool, cache)])
        written = stream.submit(back, np.arange(8), np.arange(8)) + 1
        unrelated = stream.submit(back, np.arange(8), np.arange(8), count=1)
        fetched = stream.submit(fetch, np.arange(8), np.arange(8), after=written)
        assert stream.wait(fetched, 10) is Waited.RAN
        assert (cache == staging).all()
        assert stream.done(written)
        assert not stream.done(unrelated)


def test_a_wait_ends_at_its_deadline_and_the_copy_goes_on() -> None:
    pool, cache = random_rows(1, 8, 64), np.zeros((8, 64), np.uint8)
    with open_stream(0) as stream:
        moves = stream.prepare([Move(pool, cache)])
        ticket = stream.submit(moves, np.arange(8), np.arange(8))
        assert stream.wait(ticket, 0) is Waited.TIMEOUT
        assert stream.settle(ticket, 0) is Waited.TIMEOUT
        assert not cache.any()
        assert stream.settle(ticket, 10) is Waited.RAN
        assert (cache == pool).all()


def test_no_thread_is_woken_for_what_is_not_worth_it() -> None:
    pool, caches = random_rows(1, 64, 656), [np.zeros((64, 656), np.uint8) for _ in range(2)]
    with open_stream(1) as stream:
        moves = stream.prepare([Move(pool, cache) for cache in caches])
        some, slept = np.arange(64), threading.Event()
        stream.settle(stream.submit(moves, some, some, count=1), 10)
        for _ in range(50):
            slept.wait(0.05)  # a thread that is still awake takes what is there; sooner or later it sleeps
            ticket = stream.submit(moves, some, some, first=1, wake=False)
            slept.wait(0.02)
            if not stream.done(ticket):
                break
        assert stream.wait(ticket, 10) is Waited.RAN
        assert [bool((cache == pool).all()) for cache in caches] == [True, True]


def test_the_streams_own_thread_works_without_anybody_waiting() -> None:
    pool, cache = random_rows(1, 2048, 1152), np.zeros((2048, 1152), np.uint8)
    with open_stream(1) as stream:
        ticket = stream.submit(stream.prepare([Move(pool, cache)]), np.arange(2048), np.arange(2048))
        slept = threading.Event()
        for _ in range(10_000):
            if stream.done(ticket):
                break
            slept.wait(0.001)
        assert stream.wait(ticket, 0) is Waited.READY
        assert stream.statistics().busy_seconds > 0
        assert stream.statistics().stolen_seconds == 0
        assert stream.statistics().late == 0
    assert (cache == pool).all()


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_random_moves_agree_with_numpy(threads: int) -> None:
    """Every job reads what all before it wrote: a chain over three arrays, waited for at random."""
    rng = np.random.default_rng(threads)
    arrays = [random_rows(i, 300, 72) for i in range(3)]
    expected = [array.copy() for array in arrays]
    with open_stream(threads) as stream:
        moves = stream.prepare([Move(arrays[i], arrays[j]) for i in range(3) for j in range(3) if i != j])
        pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
        last = 0
        for _ in range(600):
            count = int(rng.integers(0, 300))
            rows, places = rng.integers(-1, 300, count), rng.permutation(300)[:count]
            places[rng.random(count) < 0.1] = -1
            which = int(rng.integers(len(pairs)))
            last = stream.submit(moves, rows, places, first=which, count=1, after=last)
            source, destination = expected[pairs[which][0]], expected[pairs[which][1]]
            kept = places >= 0
            destination[places[kept]] = np.where(rows[kept, None] >= 0, source[rows[kept]], 0)
            if rng.random() < 0.2:
                assert stream.wait(int(rng.integers(1, last + 1)), 10) is not Waited.TIMEOUT
        assert stream.settle(last, 30) is not Waited.TIMEOUT
        assert stream.statistics().jobs == 600
    assert all((array == right).all() for array, right in zip(arrays, expected, strict=True))


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_many_callers_lose_nothing(threads: int) -> None:
    pool = random_rows(1, 256, 656)
    faults: list[str] = []
    with open_stream(threads) as stream:

        def call(seed: int) -> None:
            rng = np.random.default_rng(seed)
            staging, own = np.zeros((40, 656), np.uint8), np.zeros((256, 656), np.uint8)
            cache = np.zeros((40, 656), np.uint8)
            moves = stream.prepare([Move(pool, staging), Move(staging, own), Move(own, cache)])
            dense = np.arange(40)
            for _ in range(100):
                rows = rng.permutation(256)[:40]
                got = stream.submit(moves, rows, dense, count=1)
                written = stream.submit(moves, dense, rows, first=1, count=1, after=got)
                fetched = stream.submit(moves, rows, dense, first=2, after=written)
                if stream.wait(fetched, 30) is Waited.TIMEOUT or not (cache == pool[rows]).all():
                    faults.append(f"caller {seed}")

        callers = [threading.Thread(target=call, args=(seed,)) for seed in range(6)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert stream.statistics().jobs == 6 * 300
    assert not faults


def test_a_wait_and_a_close_at_once() -> None:
    pool, caches = random_rows(1, 2048, 656), np.zeros((5, 2048, 656), np.uint8)
    for _ in range(20):
        stream = open_stream(1)
        moves = stream.prepare([Move(pool, cache) for cache in caches])
        last = stream.submit(moves, np.arange(2048), np.arange(2048)) + 4
        outcomes: list[Waited] = []

        def wait(stream: CopyStream = stream, last: int = last, outcomes: list[Waited] = outcomes) -> None:
            outcomes.append(stream.wait(last, 30))

        waiters = [threading.Thread(target=wait) for _ in range(2)]
        closers = [threading.Thread(target=stream.close) for _ in range(2)]
        for each in (*waiters, *closers):
            each.start()
        for each in (*waiters, *closers):
            each.join()
        assert len(outcomes) == 2
        assert Waited.TIMEOUT not in outcomes
        assert stream.statistics().jobs == 5


def test_a_stream_that_is_dropped_finishes_first() -> None:
    pool, caches = random_rows(1, 2048, 656), np.zeros((3, 2048, 656), np.uint8)
    stream = open_stream(1)
    moves = stream.prepare([Move(pool, cache) for cache in caches])
    stream.submit(moves, np.arange(2048), np.arange(2048))
    del stream
    assert (caches == pool).all()


def test_a_forked_child_is_told_and_can_make_its_own() -> None:
    pool, cache = random_rows(1, 2048, 656), np.zeros((2048, 656), np.uint8)
    everything = np.arange(2048)
    native.copy_rows(pool[None], everything, cache[None], everything, threads=2)  # starts the threads that help
    cache[:] = 0
    with open_stream(1) as stream:
        moves = stream.prepare([Move(pool, cache)])
        ticket = stream.submit(moves, everything, everything)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what is tested
            child = os.fork()
        if child == 0:
            os._exit(fork_story(stream, ticket))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert stream.wait(ticket, 10) is not Waited.TIMEOUT
    assert (cache == pool).all()


def fork_story(inherited: CopyStream, ticket: int) -> int:
    """Return 0 if all is as it should be; runs in the child."""
    try:
        inherited.wait(ticket, 10)
        return 1
    except RuntimeError as error:
        if "only the process that made it" not in str(error):
            return 2
    pool, cache = random_rows(2, 2048, 656), np.zeros((2048, 656), np.uint8)
    with open_stream(1) as own:
        own.submit(own.prepare([Move(pool, cache)]), np.arange(2048), np.arange(2048))
    if not (cache == pool).all():
        return 3
    native.copy_rows(pool[None], np.arange(2048)[::-1].copy(), cache[None], np.arange(2048), threads=2)
    del inherited
    return 0 if (cache == pool[::-1]).all() else 4
