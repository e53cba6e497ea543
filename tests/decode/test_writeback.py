# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tidal_connector.decode.writeback import WriteBack
from tidal_connector.metrics import Counters
from tidal_connector.ops import CopyStream

LAYERS, ROWS, CAPACITY, BYTES = 3, 40, 8, 24


# With no thread of its own a stream copies only what somebody waits for, so that nothing is there by luck.
@pytest.fixture(params=[0, 1])
def stream(request: pytest.FixtureRequest) -> Iterator[CopyStream]:
    with CopyStream(threads=request.param) as made:
        yield made


def pools() -> list[np.ndarray]:
    return [np.zeros((ROWS, BYTES), np.uint8) for _ in range(LAYERS)]


def fill(back: WriteBack, layers: range, count: int, mark: int) -> None:
    for layer in layers:
        back.staging[layer][:count] = mark + layer
        back.staged(layer)


def test_all_layers_are_in_the_pool_once_settled(stream: CopyStream) -> None:
    counters, pool = Counters(), pools()
    back = WriteBack(pool, CAPACITY, stream, counters)
    back.begin(np.array([5, -1, 0], np.int64))
    fill(back, range(LAYERS), 3, mark=10)
    back.submit()
    back.settle()
    for layer in range(LAYERS):
        written = {row for row in range(ROWS) if pool[layer][row].any()}
        assert written == {0, 5}  # a row of -1 goes nowhere
        assert (pool[layer][[0, 5]] == 10 + layer).all()
    assert counters.snapshot()["bytes_written_back"] == LAYERS * 3 * BYTES


def test_a_second_pass_of_a_step_sends_the_first_off(stream: CopyStream) -> None:
    pool = pools()
    back = WriteBack(pool, CAPACITY, stream, Counters())
    back.begin(np.array([1], np.int64))
    fill(back, range(2), 1, mark=10)
    back.begin(np.array([2], np.int64))
    assert [int(pool[layer][1, 0]) for layer in range(LAYERS)] == [10, 11, 0]
    fill(back, range(2, 3), 1, mark=20)  # the drafter's layer comes after those of its target
    back.submit()
    back.settle()
    assert [int(pool[layer][2, 0]) for layer in range(LAYERS)] == [0, 0, 22]


def test_a_step_without_rows_writes_nothing(stream: CopyStream) -> None:
    counters, pool = Counters(), pools()
    back = WriteBack(pool, CAPACITY, stream, counters)
    back.submit()
    back.settle()
    back.begin(np.array([3], np.int64))
    back.submit()
    back.settle()
    assert not any(rows.any() for rows in pool)
    assert counters.snapshot()["bytes_written_back"] == 0
