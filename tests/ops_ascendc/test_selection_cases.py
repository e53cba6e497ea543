# SPDX-License-Identifier: Apache-2.0
"""The kernel gather_selection_kv_cache where random histories seldom go, and where it has to stop."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.selection_world import Mood, Sizes, World
from tests.ops_ascendc import stops
from tests.ops_ascendc.histories import exchanges, play, step
from tests.ops_ascendc.kernels import BFLOAT16, FLOAT16, INT8, Kernels, Machine
from tests.ops_ascendc.tally import Line, Tally

GROW, FEW = Mood.GROW, Mood.FEW
both_keys = pytest.mark.parametrize("sizes", [Sizes(topk=6, block=2), Sizes(topk=40)], ids=["blocks", "tokens"])


@pytest.fixture
def line(tally: Tally) -> Line:
    return tally.line("special cases")


@pytest.mark.parametrize("topk", [31, 32, 33])
@pytest.mark.parametrize("cores", [1, 2, 3, 7, 48])
def test_around_the_border_of_the_keys(kernels: Kernels, line: Line, topk: int, cores: int) -> None:
    kernels.machine = Machine(cores=cores)
    moods = [GROW, GROW, Mood.REJECT, Mood.HOLES, FEW, Mood.PAUSE, Mood.REPLACE, Mood.PERMUTE, Mood.NONE, GROW, FEW]
    play(kernels, Sizes(requests=2, queries=3, topk=topk), topk, moods, line)
    assert kernels.report.tiling_key == (1 if topk <= 32 else 2)
    assert kernels.report.cores == min(cores, 2 * 3 * topk)


def test_ids_that_a_float_cannot_tell_apart(kernels: Kernels, line: Line) -> None:
    """From 2^24 on, neighbours are one number in float32; and so long a table is not kept in UB as a whole."""
    world = World(Sizes(requests=1, topk=40, longest=64))
    big, table = 1 << 24, np.zeros((1, (1 << 23) + 64), np.int32)
    table[0, big // 2 :] = np.arange(64) % len(world.arguments["full_kv_cache"])
    world.arguments["full_kv_block_table"] = table
    world.arguments["full_kv_actual_seq"][:] = big + 100
    ids = world.arguments["selection_topk_indices"].reshape(-1)
    for shift in (0, 1):
        ids[:] = np.arange(big + shift, big + shift + 40)
        step(kernels, world, line)
        assert world.traffic.fetched == (40 if shift == 0 else 1)
        assert kernels.report.scalar_read["full_kv_block_table"] == 4 * world.traffic.fetched


def test_the_longest_request(kernels: Kernels, line: Line) -> None:
    """As many tokens as an int32 can say; ids whose tokens would lie past them do not count."""
    world = World(Sizes(requests=1, topk=8, block=64, full_page=1, longest=4096))
    longest = 2**31 - 1
    pages = -(-longest // 64)
    world.arguments["full_kv_block_table"] = np.zeros((1, pages), np.int32)
    world.arguments["full_kv_actual_seq"][:] = longest
    world.arguments["selection_topk_indices"].reshape(-1)[:] = [pages - 1, pages - 2, 0, longest, pages, 5, -1, 3]
    for fetched in (4, 1):
        step(kernels, world, line)
        assert sorted(world.status[0, :4]) == [0, 5, pages - 2, pages - 1]
        assert world.status[0, 8] == 3 * 64 + 63
        assert world.traffic.fetched == fetched


@pytest.mark.parametrize(("topk", "block"), [(8, 2), (40, 1)])
def test_an_id_given_twice_is_held_twice(kernels: Kernels, line: Line, topk: int, block: int) -> None:
    world = World(Sizes(requests=1, topk=topk, block=block, longest=96))
    world.lengths[0] = 90
    world.advance(GROW)
    ids = world.arguments["selection_topk_indices"].reshape(-1)
    last = (int(world.arguments["full_kv_actual_seq"][0]) - 1) // block
    for given in ([3, 5, 3, 7], [3, 5, 3, 7], [3, 5], [last, 3, last], [3, last]):
        ids[:] = -1
        ids[: len(given)] = given
        step(kernels, world, line)
        assert sorted(world.status[0, : len(given)]) == sorted(given)


@pytest.mark.parametrize("cores", [1, 8])
def test_two_blocks_change_places(kernels: Kernels, line: Line, cores: int) -> None:
    kernels.machine = Machine(cores=cores)
    exchanges(kernels, line, 2)
    exchanges(kernels, line, 64, "int16", 512)


@both_keys
def test_garbage_in_status_is_no_hit(kernels: Kernels, line: Line, sizes: Sizes) -> None:
    world = World(sizes)
    world.lengths[:] = 40
    world.advance(GROW)
    world.status[:] = np.random.default_rng(1).choice([-(2**31), -7, 2**31 - 1, 1 << 24], world.status.shape)
    step(kernels, world, line)
    assert world.traffic.hits == 0


@both_keys
def test_every_slot_holds_the_same_id(kernels: Kernels, line: Line, sizes: Sizes) -> None:
    world = World(sizes)
    world.lengths[:] = 60
    world.advance(GROW)
    world.status[:] = 2
    world.status[:, -1] = sizes.topk * sizes.block
    step(kernels, world, line)


def test_a_batch_of_nothing(kernels: Kernels, line: Line) -> None:
    """No request, but a table with rows: their lengths are 0, not what memory held."""
    world = World(Sizes(requests=1, topk=40))
    arguments = world.arguments
    for name in ("selection_topk_indices", "selection_kv_block_status"):
        arguments[name] = arguments[name][:0]
    for name in ("full_kv_block_table", "full_kv_actual_seq", "full_q_actual_seq"):
        arguments[name] = arguments[name][:0]
    actual = kernels.gather_selection_kv_cache(**arguments, selection_topk_block_size=1)
    assert not actual.any()
    assert kernels.report.cores == 1


def test_more_rows_than_a_tile_of_counts(kernels: Kernels, line: Line) -> None:
    for topk in (2, 33):
        sizes = Sizes(requests=100, queries=3, topk=topk, longest=40, selection_page=topk)
        kernels.machine = Machine(cores=5)
        play(kernels, sizes, 1, [GROW, FEW, Mood.PAUSE, GROW], line, judged=False)


@both_keys
def test_query_lengths_have_no_effect(kernels: Kernels, line: Line, sizes: Sizes) -> None:
    """The operator that this one stands for refuses more than one query here."""
    world = World(sizes)
    for wrong in (0, 7, -1):
        world.advance(GROW)
        world.arguments["full_q_actual_seq"][:] = wrong
        step(kernels, world, line)


@pytest.mark.parametrize("element", [FLOAT16, BFLOAT16, INT8])
def test_rows_are_bytes_of_any_type(kernels: Kernels, line: Line, element: int) -> None:
    caches = ("selection_k_rope", "selection_kv_cache", "full_k_rope", "full_kv_cache")
    world = World(Sizes(topk=40, dtype="int8" if element == INT8 else "uint16"))
    for mood in (GROW, GROW, FEW):
        world.advance(mood)
        step(kernels, world, line, elements=dict.fromkeys(caches, element))


def test_default_block_size(kernels: Kernels, line: Line) -> None:
    """An attribute below 1 stands for 64."""
    world = World(Sizes(topk=6, block=64, longest=640))
    for given in (64, 0, -5):
        world.advance(GROW)
        before = world.copy()
        kernels.gather_selection_kv_cache(**before, selection_topk_block_size=given)
        step(kernels, world, line)
        assert np.array_equal(before["selection_kv_block_status"], world.arguments["selection_kv_block_status"])


@both_keys
@pytest.mark.parametrize("wrong", stops.OF_SELECTION)
@pytest.mark.parametrize("cores", [1, 4])
def test_a_wrong_number_stops_the_kernel_before_it_writes(
    kernels: Kernels, sizes: Sizes, wrong: stops.Wrong, cores: int
) -> None:
    kernels.machine = Machine(cores=cores)
    stops.check_selection(kernels, sizes, wrong)


@both_keys
def test_a_wrong_page_that_no_id_needs_does_no_harm(kernels: Kernels, line: Line, sizes: Sizes) -> None:
    world = World(sizes)
    world.lengths[:] = 60
    world.advance(GROW)
    world.arguments["full_kv_block_table"][:, -1] = -1
    step(kernels, world, line)
