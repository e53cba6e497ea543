# SPDX-License-Identifier: Apache-2.0
"""The host tiling of both operators: each check with its words, and the numbers that it hands to the kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.ops.selection_world import Mood, Sizes, World
from tests.ops_ascendc.histories import step
from tests.ops_ascendc.kernels import BFLOAT16, FLOAT16, INT32, OTHER, Array, Kernels, Machine, RefusedByHost
from tests.ops_ascendc.misses import Lists, miss_arguments
from tests.ops_ascendc.tally import Line

Arrays = dict[str, Array]
Spoil = Callable[[Arrays], object]
KV, ROPE, POOL, POOL_ROPE = "selection_kv_cache", "selection_k_rope", "full_kv_cache", "full_k_rope"
TABLE, STATUS, IDS = "selection_kv_block_table", "selection_kv_block_status", "selection_topk_indices"
POOL_TABLE, LENGTHS, QUERIES = "full_kv_block_table", "full_kv_actual_seq", "full_q_actual_seq"
ACTUAL = "selection_kv_actual_seq"


def shaped(name: str, *shape: int) -> Spoil:
    """Give an argument another shape; the memory is never looked at."""
    return lambda arrays: arrays.update({name: np.zeros(shape, arrays[name].dtype)})


def pages_of(name: str, tokens: int) -> Spoil:
    """Give both parts of a side another page size."""

    def spoil(arrays: Arrays) -> None:
        for part in ("kv_cache", "k_rope"):
            array = arrays[f"{name}_{part}"]
            arrays[f"{name}_{part}"] = np.zeros((array.shape[0], tokens, array.shape[2]), array.dtype)

    return spoil


# The world below has 2 requests of 2 queries, 8 ids of 4 tokens; pages of 8 tokens; rows of 5 + 3 elements.
SHAPES = [
    (shaped(KV, 4, 4), r"selection_kv_cache: shape \[4, 4\]: expected \[blocks, block size, 1 to 656 elements\]"),
    (shaped(KV, 20, 8, 657), r"selection_kv_cache: shape \[20, 8, 657\]: expected .* 1 to 656 elements"),
    (shaped(POOL, 20, 0, 5), r"full_kv_cache: shape \[20, 0, 5\]: expected"),
    (shaped(ROPE, 1), r"selection_k_rope: shape \[1\]: expected \[\d+, 8, 1 to 64 elements\] as selection_kv_cache"),
    (shaped(ROPE, 3, 8, 3), r"selection_k_rope: shape \[3, 8, 3\]: expected \[\d+, 8, 1 to 64 elements\]"),
    (shaped(ROPE, 0), r"selection_k_rope: shape \[0\]: expected rows of 3 elements as full_k_rope"),
    (shaped(POOL_ROPE, 0), r"selection_k_rope: shape \[\d+, 8, 3\]: expected \[0\], because full_k_rope is empty"),
    (shaped(POOL_ROPE, 14, 8, 65), r"full_k_rope: shape \[14, 8, 65\]: expected \[\d+, 8, 1 to 64 elements\]"),
    (pages_of("selection", 6), r"selection_kv_cache: shape \[\d+, 6, 5\]: expected a block size that is a multiple of"),
    (pages_of("full", 2), r"full_kv_cache: shape \[\d+, 2, 5\]: expected a block size that is a multiple of 4 tokens"),
    (shaped(IDS, 4, 8), r"selection_topk_indices: shape \[4, 8\]: expected \[requests, queries, 1, ids\] or"),
    (shaped(IDS, 3, 2, 1, 8), r"full_kv_block_table: shape \[2, \d+\]: expected 3 rows, one for each request"),
    (shaped(IDS, 5, 1, 8), r"selection_topk_indices: shape \[5, 1, 8\]: expected a multiple of 2 rows"),
    (shaped(POOL_TABLE, 0, 4), r"full_kv_block_table: shape \[0, 4\]: expected 2 rows"),
    (shaped(POOL_TABLE, 2), r"full_kv_block_table: shape \[2\]: expected \[requests, pages\]"),
    (shaped(IDS, 2, 8, 1, 8), r"selection_topk_indices: shape \[2, 8, 1, 8\]: expected at most 7 queries for each"),
    (shaped(IDS, 2, 2, 2, 8), r"selection_topk_indices: shape \[2, 2, 2, 8\]: expected 1 head"),
    (shaped(IDS, 2, 2, 1, 0), r"selection_topk_indices: shape \[2, 2, 1, 0\]: expected 1 to 2048 ids in a row"),
    (shaped(IDS, 2, 2, 1, 2049), r"selection_topk_indices: shape .*: expected 1 to 2048 ids in a row"),
    (shaped(IDS, 2, 2, 1, 33), r"selection_topk_block_size = 4: expected 1 for more than 32 ids in a row \(33\)"),
    (shaped(STATUS, 2, 2, 1, 8), r"selection_kv_block_status: shape \[2, 2, 1, 8\]: expected \[2, 2, 1, 9\]"),
    (shaped(STATUS, 4, 1, 9), r"selection_kv_block_status: shape \[4, 1, 9\]: expected \[2, 2, 1, 9\]"),
    (shaped(LENGTHS, 3), r"full_kv_actual_seq: shape \[3\]: expected \[2\], one for each request"),
    (shaped(QUERIES, 2, 1), r"full_q_actual_seq: shape \[2, 1\]: expected \[2\], one for each request"),
    (shaped(TABLE, 3, 4), r"selection_kv_block_table: shape \[3, 4\]: expected at least \[4, 4\] for 4 rows of 8 ids"),
    (shaped(TABLE, 4, 3), r"selection_kv_block_table: shape \[4, 3\]: expected at least \[4, 4\]"),
    (shaped(TABLE, 4, 99), r"selection_kv_cache: shape .*: expected at least 396 blocks, 99 for each of 4 rows"),
    (shaped(ACTUAL, 3), r"selection_kv_actual_seq: shape \[3\]: expected \[\d+\], one for each row of selection_kv_bl"),
]  # fmt: skip
TYPES = [
    ({KV: FLOAT16, POOL: OTHER}, r"full_kv_cache: another type: expected float16, bfloat16 or int8"),
    ({POOL: INT32}, r"full_kv_cache: int32: expected float16, bfloat16 or int8"),
    ({KV: BFLOAT16}, r"selection_kv_cache: bfloat16: expected float16, the type of full_kv_cache"),
    ({POOL_ROPE: BFLOAT16}, r"full_k_rope: bfloat16: expected float16, the type of full_kv_cache"),
    *(
        ({name: OTHER}, rf"{name}: another type: expected int32")
        for name in (TABLE, STATUS, IDS, POOL_TABLE, LENGTHS, QUERIES, ACTUAL)
    ),
]


def world() -> Arrays:
    arrays = dict(World(Sizes(queries=2, topk=8, block=4, selection_page=2, full_page=2)).arguments)
    return arrays | {ACTUAL: np.zeros(arrays[TABLE].shape[:1], np.int32)}


@pytest.mark.parametrize(("spoil", "said"), SHAPES, ids=[said.split(":")[0] for _, said in SHAPES])
def test_a_shape_that_does_not_fit_is_refused(kernels: Kernels, spoil: Spoil, said: str) -> None:
    arrays = world()
    spoil(arrays)
    with pytest.raises(RefusedByHost, match=said):
        kernels.gather_selection_kv_cache(**arrays, selection_topk_block_size=4)


def test_ids_that_end_inside_a_page_need_it(kernels: Kernels) -> None:
    """5 ids of 2 tokens fill two and a half pages of 4."""
    world = World(Sizes(requests=1, topk=5, block=2, selection_page=2))
    world.arguments[TABLE] = np.arange(3, dtype=np.int32).reshape(1, 3)
    world.lengths[0] = 40
    for _ in range(2):
        world.advance(Mood.GROW)
        step(kernels, world, Line())
    world.arguments[TABLE] = np.arange(2, dtype=np.int32).reshape(1, 2)
    with pytest.raises(RefusedByHost, match=r"selection_kv_block_table: shape \[1, 2\]: expected at least \[1, 3\]"):
        kernels.gather_selection_kv_cache(**world.arguments, selection_topk_block_size=2)


@pytest.mark.parametrize(("elements", "said"), TYPES, ids=[said.split(":")[0] for _, said in TYPES])
def test_a_type_that_does_not_fit_is_refused(kernels: Kernels, elements: dict[str, int], said: str) -> None:
    with pytest.raises(RefusedByHost, match=said):
        kernels.gather_selection_kv_cache(**world(), selection_topk_block_size=4, elements=elements)


def test_more_rows_than_an_int32_names_are_refused(kernels: Kernels) -> None:
    arrays = world()
    arrays[POOL] = np.broadcast_to(np.zeros((1, 1, 5), np.uint16), (1 << 30, 8, 5))
    arrays[POOL_ROPE] = np.broadcast_to(np.zeros((1, 1, 3), np.uint16), (1 << 30, 8, 3))
    with pytest.raises(RefusedByHost, match=r"full_kv_cache: shape .*: expected fewer than 2\^31 rows"):
        kernels.gather_selection_kv_cache(**arrays, selection_topk_block_size=4)


@pytest.mark.parametrize(
    ("sizes", "plan"),
    [
        (Sizes(queries=2, topk=8, block=4, selection_page=2, full_page=2), 0),
        # Of each id five words and three halves, and a word of each page that its row can need.
        (
            Sizes(requests=1, topk=2048, full_page=1, longest=4096, dtype="int8", kv_dim=656, rope_dim=None),
            2048 * (5 * 4 + 3 * 2) + (2048 + 4096) * 4,
        ),
    ],
    ids=["small", "large"],
)
def test_a_ub_too_small_is_refused_and_the_smallest_works(kernels: Kernels, sizes: Sizes, plan: int) -> None:
    world = World(sizes)
    world.advance(Mood.GROW)
    kernels.machine = Machine(ub_bytes=20_000)
    with pytest.raises(RefusedByHost, match=r"UB: 20000 bytes: expected at least \d+ for two buffers") as refusal:
        kernels.gather_selection_kv_cache(**world.arguments, selection_topk_block_size=sizes.block)
    least = int(str(refusal.value).split("at least ")[1].split()[0])
    assert least >= plan + 4 * sizes.row_bytes
    kernels.machine = Machine(ub_bytes=least - 64)
    with pytest.raises(RefusedByHost, match="UB"):
        kernels.gather_selection_kv_cache(**world.arguments, selection_topk_block_size=sizes.block)
    kernels.machine = Machine(ub_bytes=least)
    step(kernels, world, Line())


def test_the_buffers_of_rows_leave_the_plan_its_ub(kernels: Kernels) -> None:
    """Blocks of 2,752 bytes: 31 places in each of two buffers would fill UB, beside a plan with 4,096 pages."""
    sizes = Sizes(requests=1, topk=32, block=4, full_page=1, longest=16384, dtype="int8", kv_dim=656, rope_dim=32)
    world = World(sizes)
    for _ in range(2):
        world.advance(Mood.GROW)
        step(kernels, world, Line())


@pytest.mark.parametrize(
    ("topk", "queries", "cores", "key", "started"),
    [(1, 1, 48, 1, 1), (32, 1, 48, 1, 32), (33, 1, 48, 2, 33), (2048, 1, 48, 2, 48), (2048, 2, 40, 2, 40)],
)
def test_one_request_keeps_all_cores_busy(
    kernels: Kernels, topk: int, queries: int, cores: int, key: int, started: int
) -> None:
    kernels.machine = Machine(cores=cores)
    kernels.gather_selection_kv_cache(
        **World(Sizes(requests=1, queries=queries, topk=topk)).arguments, selection_topk_block_size=1
    )
    assert (kernels.report.tiling_key, kernels.report.cores) == (key, started)
    # Heads, statuses and two lists of each row, behind the system's 512 bytes.
    row = 64 + 4 * (-(-(topk + 1) // 8) * 8 + 2 * (-(-topk // 8) * 8))
    assert 512 + row * queries <= kernels.report.workspace_bytes <= 512 + row * queries + 5 * 64 + 128 * queries


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("miss_rows", (18,), r"miss_rows: shape \[18\]: expected \[rows, entries\]"),
        ("miss_slots", (2, 8), r"miss_slots: shape \[2, 8\]: expected \[2, 9\] as miss_rows"),
        ("miss_count", (3,), r"miss_count: shape \[3\]: expected \[2\], one for each row of miss_rows"),
        (KV, (16, 2, 6), r"selection_kv_cache: shape \[16, 2, 6\]: expected rows of 5 elements as full_kv_cache"),
    ],
)
def test_lists_that_do_not_fit_are_refused(kernels: Kernels, name: str, shape: tuple[int, ...], said: str) -> None:
    given = miss_arguments(Lists(), np.random.default_rng(0))
    given[name] = np.zeros(shape, given[name].dtype)
    with pytest.raises(RefusedByHost, match=said):
        kernels.gather_miss_rows(**given)


@pytest.mark.parametrize("name", ["miss_rows", "miss_slots", "miss_count"])
def test_lists_of_another_type_are_refused(kernels: Kernels, name: str) -> None:
    with pytest.raises(RefusedByHost, match=f"{name}: another type: expected int32"):
        kernels.gather_miss_rows(**miss_arguments(Lists(), np.random.default_rng(0)), elements={name: OTHER})
