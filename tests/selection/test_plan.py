# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidal_connector.errors import LayoutMismatch, PoolExhausted
from tidal_connector.selection.fetch import fetch
from tidal_connector.selection.plan import choose, pool_rows
from tidal_connector.selection.residency import StepBuffer


@given(
    lengths=st.lists(st.sampled_from([1, 7, 8, 9, 63, 64, 65]), min_size=1, max_size=4),
    page_tokens=st.sampled_from([8, 16]),
    k=st.sampled_from([1, 8, 64]),
    seed=st.integers(0, 2**16),
)
def test_fr_30_every_fetched_row_is_the_selected_one(lengths: list[int], page_tokens: int, k: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    width = -(-max(lengths) // page_tokens)
    pages = random.permutation(len(lengths) * width + 3).astype(np.int64)
    table = pages[: len(lengths) * width].reshape(len(lengths), width)
    pool = np.zeros(((len(pages)) * page_tokens, 16), np.uint8)
    selected = np.full((len(lengths), k), -1, np.int32)
    for request, length in enumerate(lengths):
        for position in range(length):
            row = table[request, position // page_tokens] * page_tokens + position % page_tokens
            pool[row, :2] = request + 1, position
        count = min(k, length)
        selected[request, :count] = random.choice(length, count, replace=False)

    rows = pool_rows(selected, table, np.arange(len(lengths)), page_tokens)
    buffer = StepBuffer(selected.size)
    plan = choose(rows, buffer)
    device = np.full((selected.size, 16), 0x7E, np.uint8)
    moved = fetch(pool, plan, device, buffer)
    buffer.check()

    assert moved == 16 * int((selected >= 0).sum())
    assert (device[buffer.resident :] == 0x7E).all()
    assert ((plan.slots >= 0) == (selected >= 0)).all()
    for request, column in np.argwhere(selected >= 0):
        assert tuple(device[plan.slots[request, column], :2]) == (request + 1, selected[request, column])


def test_a_row_that_two_queries_select_is_moved_once() -> None:
    plan = choose(np.array([[5, 9], [9, -1]]), StepBuffer(4))
    assert plan.misses.tolist() == [5, 9]
    assert plan.slots.tolist() == [[0, 1], [1, -1]]


@given(rows=st.lists(st.lists(st.integers(-1, 9), min_size=3, max_size=3), min_size=1, max_size=6))
def test_slots_follow_the_order_in_which_rows_first_occur(rows: list[list[int]]) -> None:
    buffer = StepBuffer(18)
    for _ in range(2):  # what is left in the buffer's working memory from before changes nothing
        buffer.release()
        plan = choose(np.array(rows), buffer)
        assert plan.misses.tolist() == list(dict.fromkeys(row for each in rows for row in each if row >= 0))
        found = np.where(plan.slots >= 0, np.append(plan.misses, -1)[plan.slots], -1)
        assert found.tolist() == rows


def test_nothing_selected_moves_nothing() -> None:
    buffer = StepBuffer(0)
    plan = choose(np.full((2, 3), -1), buffer)
    assert fetch(np.zeros((4, 16), np.uint8), plan, np.zeros((0, 16), np.uint8), buffer) == 0
    assert (plan.slots == -1).all()


def test_a_position_beyond_the_pages_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="position 16 lies beyond 1 pages of 16"):
        pool_rows(np.array([[16]], np.int32), np.array([[3]]), np.array([0]), 16)


def test_slots_are_bounded_and_come_back() -> None:
    buffer = StepBuffer(2)
    choose(np.array([[1, 2]]), buffer)
    with pytest.raises(PoolExhausted, match="2 slots, 2 taken; 1 more"):
        choose(np.array([[3]]), buffer)
    assert buffer.resident == 0
    buffer.release()
    assert choose(np.array([[3]]), buffer).first_slot == 0
