# SPDX-License-Identifier: Apache-2.0
"""Rows that lie more than 4 GiB behind the begin of their cache, as most rows of a real pool do.

Each cache is a small one behind 4 GiB of address space that nobody touches. An offset that loses its upper half leads
there: zeros arrive, or a row does not.
"""

from __future__ import annotations

import math
import mmap

import numpy as np
import pytest

from tests.ops.selection_world import Mood, Sizes, World
from tests.ops_ascendc.histories import step
from tests.ops_ascendc.kernels import Array, Kernels
from tests.ops_ascendc.misses import Lists, defined, miss_arguments
from tests.ops_ascendc.tally import Tally

GAP = 1 << 32  # bytes
NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, for which Python has no name
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
WIDTH = 64  # elements of two bytes, of the kv part and of the rope part: both pass 4 GiB at the same row
GAP_ROWS = GAP // (2 * WIDTH)
CACHES = ("selection_kv_cache", "selection_k_rope", "full_kv_cache", "full_k_rope")


def behind_the_gap(cache: Array) -> Array:
    """Return a copy of the cache as the last pages of one that is 4 GiB longer."""
    pages = GAP // cache[0].nbytes
    shape = (pages + len(cache), *cache.shape[1:])
    memory = mmap.mmap(-1, math.prod(shape) * cache.itemsize, flags=PRIVATE)
    far = np.frombuffer(memory, cache.dtype).reshape(shape)
    far[pages:] = cache
    return far


def assert_same(far: dict[str, Array], near: dict[str, Array], *names: str) -> None:
    """Compare what is behind the gap with the small caches, and the other arrays as they are."""
    for name in (*CACHES, *names):
        assert np.array_equal(far[name][-len(near[name]) :], near[name]), f"{name} differs"


@pytest.mark.parametrize(("topk", "block"), [(6, 2), (40, 1)], ids=["blocks", "tokens"])
def test_selected_rows_beyond_4_gib(kernels: Kernels, tally: Tally, topk: int, block: int) -> None:
    """A history near by, which its definition judges, and each of its calls again far away."""
    world = World(Sizes(topk=topk, block=block, dtype="int16", kv_dim=WIDTH, rope_dim=WIDTH))
    line = tally.line("rows beyond 4 GiB")
    line.cases += 1
    fetched = moved = 0
    for mood in (Mood.GROW, Mood.GROW, Mood.FEW, Mood.GROW, Mood.FEW, Mood.FEW, Mood.GROW):
        world.advance(mood)
        far = world.copy()
        for side in ("selection", "full"):
            far[f"{side}_kv_block_table"] += GAP_ROWS // far[f"{side}_kv_cache"].shape[1]
        far |= {name: behind_the_gap(far[name]) for name in CACHES}
        actual = step(kernels, world, line)
        assert np.array_equal(kernels.gather_selection_kv_cache(**far, selection_topk_block_size=block), actual)
        assert_same(far, world.arguments, "selection_kv_block_status")
        fetched, moved = fetched + world.traffic.fetched, moved + world.traffic.moved
    assert min(fetched, moved) > 0


def test_missed_rows_beyond_4_gib(kernels: Kernels) -> None:
    lists = Lists(2, 40, (20, 4), (50, 2), "int16", WIDTH, WIDTH, least=40)
    near = miss_arguments(lists, np.random.default_rng(1))
    expected, copied = defined(near)
    far = near | {name: behind_the_gap(near[name]) for name in CACHES}
    for name in ("miss_rows", "miss_slots"):
        far[name] = np.where(near[name] < 0, near[name], near[name] + GAP_ROWS)
    kernels.gather_miss_rows(**far)
    assert copied > 50
    assert_same(far, expected)
