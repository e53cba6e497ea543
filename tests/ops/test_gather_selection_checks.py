# SPDX-License-Identifier: Apache-2.0
"""What gather_selection_kv_cache refuses, in which words, and that it has written nothing then."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.ops.selection_world import Array, Mood, Operator, Sizes, World
from tests.ops.test_gather_selection import every
from tidal_connector.ops import Implementation, SelectionTraffic, gather_selection_kv_cache

BLOCKS = Sizes(requests=2, queries=2, topk=6, block=4, selection_page=2, longest=64)
TOKENS = Sizes(requests=2, queries=2, topk=40, rope_dim=None)


def world_of(sizes: Sizes) -> World:
    world = World(sizes, seed=2)
    world.lengths[:] = sizes.longest - 20
    world.advance(Mood.GROW)
    return world


def changed(array: Array, at: Any, value: int) -> Array:
    copy = array.copy()
    copy[at] = value
    return copy


def refuse(world: World, operator: Operator, arguments: dict[str, Array], error: type[Exception], text: str) -> None:
    """The call has to fail in one line, with every array as it was."""
    before = {name: array.copy() for name, array in arguments.items()}
    traffic = SelectionTraffic()
    with pytest.raises(error, match=text) as raised:
        operator(**arguments, selection_topk_block_size=world.sizes.block, traffic=traffic)
    assert "\n" not in str(raised.value)
    assert traffic == SelectionTraffic()
    assert all(np.array_equal(array, before[name]) for name, array in arguments.items())


@every
@pytest.mark.parametrize("sizes", [BLOCKS, TOKENS])
@pytest.mark.parametrize("page", [-1, 1 << 20, -(2**31), 2**31 - 1])
def test_a_page_outside_the_full_pool(operator: Operator, sizes: Sizes, page: int) -> None:
    world = world_of(sizes)
    x = world.valid(2)[-1]  # the last miss of row 2 (request 1), so that all others have been planned
    column = x * sizes.block // sizes.full_page_tokens
    table = changed(world.arguments["full_kv_block_table"], (1, column), page)
    text = rf"full_kv_block_table\[1, {column}\] = {page}: expected a page in \[0, \d+\) for id \d+ of row 2"
    refuse(world, operator, {**world.arguments, "full_kv_block_table": table}, IndexError, text)


@every
def test_the_first_wrong_id_of_a_row_is_named_the_same_by_all(operator: Operator) -> None:
    world = world_of(TOKENS)
    table = np.full_like(world.arguments["full_kv_block_table"], -7)
    text = f"for id {world.valid(0)[0]} of row 0$"
    refuse(world, operator, {**world.arguments, "full_kv_block_table": table}, IndexError, text)


@every
def test_a_page_that_is_not_read_may_be_anything(operator: Operator) -> None:
    world = world_of(TOKENS)
    used = {x // TOKENS.full_page_tokens for row in range(4) for x in world.valid(row)}
    table = world.arguments["full_kv_block_table"]
    unused = [column for column in range(table.shape[1]) if column not in used]
    assert unused
    table[:, unused] = -1
    assert world.call(operator).any()


@every
@pytest.mark.parametrize("page", [-1, 1 << 20])
def test_a_page_outside_the_selection_cache(operator: Operator, page: int) -> None:
    world = world_of(BLOCKS)
    table = changed(world.arguments["selection_kv_block_table"], (3, 2), page)
    text = rf"selection_kv_block_table\[3, 2\] = {page}: expected a page in \[0, \d+\)"
    refuse(world, operator, {**world.arguments, "selection_kv_block_table": table}, IndexError, text)


@every
def test_a_page_in_two_rows(operator: Operator) -> None:
    world = world_of(BLOCKS)
    table = world.arguments["selection_kv_block_table"]
    table = changed(table, (3, 1), table[0, 2])
    text = rf"selection_kv_block_table\[3, 1\] = {table[0, 2]}: expected a page of its own; \[0, 2\] has it too"
    refuse(world, operator, {**world.arguments, "selection_kv_block_table": table}, IndexError, text)


@every
def test_rows_that_see_no_token_need_no_pages(operator: Operator) -> None:
    world = world_of(BLOCKS)
    world.arguments["full_kv_actual_seq"][1] = 0
    world.arguments["selection_kv_block_table"][2:] = -1
    world.arguments["full_kv_block_table"][1] = -1
    actual = world.call(operator)
    assert actual[:2].all()
    assert not actual[2:].any()


def strided(array: Array) -> Array:
    wide = np.zeros((*array.shape[:-1], array.shape[-1] * 2), array.dtype)
    return wide[..., ::2]


def frozen(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


# The name of an argument, what becomes of it, the error, and what its line says after the name.
REFUSED = [
    ("selection_topk_indices", np.ndarray.tolist, TypeError, ": list: expected a numpy array or a torch tensor"),
    ("selection_topk_indices", np.int64, TypeError, ": dtype int64: expected int32"),
    ("selection_kv_block_table", np.int64, TypeError, ": dtype int64: expected int32"),
    ("selection_kv_block_status", np.int64, TypeError, ": dtype int64: expected int32"),
    ("full_kv_block_table", np.uint32, TypeError, ": dtype uint32: expected int32"),
    ("full_kv_actual_seq", np.int64, TypeError, ": dtype int64: expected int32"),
    ("full_q_actual_seq", np.int64, TypeError, ": dtype int64: expected int32"),
    (
        "full_kv_cache",
        np.float32,
        TypeError,
        ": dtype float32: expected one of float16, int16, uint16, int8, uint8, bfloat16",
    ),
    ("selection_kv_cache", np.int16, TypeError, ": dtype int16: expected uint16, that of full_kv_cache"),
    ("full_k_rope", np.int8, TypeError, ": dtype int8: expected uint16, that of full_kv_cache"),
    ("selection_kv_cache", lambda a: a[0], ValueError, r": shape \(8, 5\): expected \[blocks, block size, 1 to 656"),
    ("full_kv_cache", lambda a: np.tile(a, 132), ValueError, r": shape .*, 660\): expected \[blocks"),
    ("selection_kv_cache", lambda a: a[..., :4], ValueError, ": rows of 8 bytes: expected 10, those of full_kv_cache"),
    ("selection_k_rope", lambda a: a[..., :2], ValueError, ": rows of 4 bytes: expected 6, those of full_k_rope"),
    ("selection_k_rope", lambda a: a[:0, 0, 0], ValueError, ": rows of 0 bytes: expected 6, those of full_k_rope"),
    ("full_k_rope", lambda a: a[1:], ValueError, r": shape .*: expected \[\d+, 8\] and elements, or \(0,\) for none"),
    ("selection_kv_cache", strided, ValueError, r": strides .*: expected rows of contiguous elements"),
    ("selection_kv_cache", frozen, ValueError, ": read-only"),
    ("selection_k_rope", frozen, ValueError, ": read-only"),
    ("selection_kv_block_status", frozen, ValueError, ": read-only"),
    ("selection_topk_indices", strided, ValueError, ": strides .*: expected a contiguous array"),
    ("selection_kv_block_status", strided, ValueError, ": strides .*: expected a contiguous array"),
    ("selection_topk_indices", lambda a: a[0, 0], ValueError, r": shape \(1, 6\): expected rank 3 or 4"),
    ("selection_kv_block_status", lambda a: a[..., :6].copy(), ValueError, r": shape .*: expected \(2, 2, 1, 7\)"),
    ("selection_kv_block_status", lambda a: a.reshape(4, 1, 7), ValueError, r": shape .*: expected \(2, 2, 1, 7\)"),
    ("selection_kv_block_table", lambda a: a[0], ValueError, ": shape .*: expected rank 2"),
    ("selection_kv_block_table", lambda a: a[:3], ValueError, r": shape .*: expected at least \(4, 3\)"),
    ("selection_kv_block_table", lambda a: a[:, :2].copy(), ValueError, r": shape .*: expected at least \(4, 3\)"),
    (
        "selection_kv_block_table",
        lambda a: np.tile(a, 3),
        ValueError,
        "selection_kv_cache: 1. blocks: expected at least",
    ),
    ("full_kv_block_table", lambda a: a[:1], ValueError, ": 1 rows: expected 2, one for each request"),
    ("full_kv_actual_seq", lambda a: a[:1], ValueError, ": length 1: expected 2, one for each request"),
    ("full_q_actual_seq", lambda a: a[:1], ValueError, ": length 1: expected 2, one for each request"),
    ("full_kv_actual_seq", lambda a: a + 1000, ValueError, r"\[0\] = 10\d\d: expected at most 64, the tokens in a row"),
]


@pytest.mark.parametrize(("name", "change", "error", "text"), REFUSED)
def test_an_argument_that_does_not_fit(name: str, change: Any, error: type[Exception], text: str) -> None:
    world = world_of(BLOCKS)
    value = world.arguments[name]
    value = value.astype(change) if isinstance(change, type) else change(value)
    before = world.copy()
    with pytest.raises(error, match=text if text.startswith("selection") else re.escape(name) + text):
        gather_selection_kv_cache(**{**world.arguments, name: value}, selection_topk_block_size=4)
    assert all(np.array_equal(array, before[name]) for name, array in world.arguments.items())


def batch(*shape: int) -> dict[str, Array]:
    """Ids and status of another shape."""
    return {
        "selection_topk_indices": np.zeros(shape, np.int32),
        "selection_kv_block_status": np.zeros((*shape[:-1], shape[-1] + 1), np.int32),
    }


@pytest.mark.parametrize(
    ("more", "block", "text"),
    [
        (
            batch(3, 1, 6),
            4,
            "selection_topk_indices: 3 tokens: expected a multiple of 2, the rows of full_kv_block_table",
        ),
        (batch(16, 1, 6), 4, "selection_topk_indices: 8 tokens for each request: expected at most 7"),
        (batch(2, 2, 2, 6), 4, "selection_topk_indices: 2 heads: expected 1"),
        (batch(2, 2, 1, 0), 4, "selection_topk_indices: 0 ids in a row: expected 1 to 2048"),
        (batch(2, 2, 1, 2049), 1, "selection_topk_indices: 2049 ids in a row: expected 1 to 2048"),
        (batch(2, 2, 1, 33), 4, r"selection_topk_block_size = 4: expected 1 for more than 32 ids in a row \(33\)"),
        ({}, 3, "selection_kv_cache: block size 8: expected a multiple of 3 tokens"),
        ({}, None, "selection_kv_cache: block size 8: expected a multiple of 64 tokens"),
        ({}, 0, "selection_kv_cache: block size 8: expected a multiple of 64 tokens"),
    ],
)
def test_sizes_that_the_operator_does_not_take(more: dict[str, Array], block: int | None, text: str) -> None:
    world = world_of(BLOCKS)
    with pytest.raises(ValueError, match=text):
        gather_selection_kv_cache(**{**world.arguments, **more}, selection_topk_block_size=block)


def test_the_block_size_of_the_full_pool() -> None:
    world = world_of(Sizes(block=4, full_page=1, rope_dim=None))
    odd = np.concatenate([world.arguments["full_kv_cache"]] * 2, axis=1)[:, :6]
    with pytest.raises(ValueError, match="full_kv_cache: block size 6: expected a multiple of 4 tokens"):
        gather_selection_kv_cache(**{**world.arguments, "full_kv_cache": odd}, selection_topk_block_size=4)


def test_no_workers() -> None:
    with pytest.raises(ValueError, match="threads = 0: expected at least 1"):
        gather_selection_kv_cache(**world_of(BLOCKS).arguments, selection_topk_block_size=4, threads=0)


@pytest.mark.parametrize("implementation", Implementation)
def test_a_batch_of_no_requests(implementation: Implementation) -> None:
    world = World(Sizes(rope_dim=None))
    nothing = {
        **{name: array[:0] for name, array in world.arguments.items() if "kv_cache" not in name},
        "selection_k_rope": world.arguments["selection_k_rope"],
        "full_k_rope": world.arguments["full_k_rope"],
        "selection_kv_cache": world.arguments["selection_kv_cache"],
        "full_kv_cache": world.arguments["full_kv_cache"],
    }
    actual = gather_selection_kv_cache(**nothing, selection_topk_block_size=1, implementation=implementation)
    assert actual.shape == (0,)
