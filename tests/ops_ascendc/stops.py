# SPDX-License-Identifier: Apache-2.0
"""Numbers that only the kernels can see to be wrong: what they say, and that nothing was written before they stop."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.ops.selection_world import Mood, Sizes, World
from tests.ops_ascendc.kernels import GARBAGE, Kernels, Stopped
from tests.ops_ascendc.misses import Lists, miss_arguments


@dataclass(frozen=True)
class Wrong:
    """A number in a tensor, and what the kernel says of it."""

    name: str
    value: int
    said: str
    pages_of: str = ""  # the cache whose number of pages is added to the value


OF_SELECTION = (
    Wrong("selection_kv_block_table", -1, r"selection_kv_block_table\[0, \d+\] = -1: expected a page in \[0, \d+\)"),
    Wrong("selection_kv_block_table", 10**6, r"selection_kv_block_table\[0, \d+\] = 1000000: expected a page in"),
    Wrong("full_kv_block_table", -1, r"full_kv_block_table\[0, \d+\] = -1: expected a page in .* for id \d+ of row 0"),
    Wrong("full_kv_block_table", 10**6, r"full_kv_block_table\[0, \d+\] = 1000000: expected a page in"),
    Wrong("selection_kv_block_table", 0, r"selection_kv_block_table\[0, \d+\] = (\d+): expected a page in \[0, \1\)",
          "selection_kv_cache"),
    Wrong("full_kv_block_table", 0, r"full_kv_block_table\[0, \d+\] = (\d+): expected a page in \[0, \1\) for id",
          "full_kv_cache"),
    Wrong("full_kv_actual_seq", 10**6, r"full_kv_actual_seq\[0\] = 1000000: expected at most \d+, the tokens in a row"),
)  # fmt: skip
OF_MISSES = (
    Wrong("miss_rows", 48, r"miss_rows: row 48: expected one below 48"),
    Wrong("miss_slots", 32, r"miss_slots: row 32: expected one below 32"),
    Wrong("miss_count", 10, r"miss_count\[1\] = 10: expected at most 9"),
)


def check_selection(kernels: Kernels, sizes: Sizes, wrong: Wrong) -> None:
    """Assert that the number stops gather_selection_kv_cache, and that no tensor has changed then."""
    world = World(sizes)
    world.lengths[:] = 60
    world.advance(Mood.GROW)
    value = wrong.value + (len(world.arguments[wrong.pages_of]) if wrong.pages_of else 0)
    world.arguments[wrong.name].reshape(len(world.arguments[wrong.name]), -1)[0] = value
    before = world.copy()
    actual = np.full(world.arguments["selection_kv_block_table"].shape[:1], GARBAGE, np.int32)
    arguments = world.arguments | {"selection_kv_actual_seq": actual}
    said = _said(lambda: kernels.gather_selection_kv_cache(**arguments, selection_topk_block_size=sizes.block))
    assert re.search(wrong.said, said), said
    for each, array in before.items():
        assert np.array_equal(array, world.arguments[each]), f"{each} was written"
    assert (actual == GARBAGE).all(), "selection_kv_actual_seq was written"


def check_misses(kernels: Kernels, wrong: Wrong) -> None:
    """Assert that the number stops gather_miss_rows."""
    given = miss_arguments(Lists(), np.random.default_rng(0))
    given["miss_count"][:] = 9
    for each in ("miss_rows", "miss_slots"):
        given[each][:] = np.arange(18).reshape(2, 9)
    given[wrong.name][1, ...] = wrong.value
    said = _said(lambda: kernels.gather_miss_rows(**given))
    assert re.search(wrong.said, said), said


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except Stopped as error:
        return str(error)
    return "it did not stop"
