# SPDX-License-Identifier: Apache-2.0
"""The kernel gather_miss_rows against numpy, over random lists, shapes and machines."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops_ascendc import stops
from tests.ops_ascendc.histories import STRICT
from tests.ops_ascendc.kernels import Kernels, Machine
from tests.ops_ascendc.misses import Lists, miss_arguments, random_misses, run_misses
from tests.ops_ascendc.tally import Tally


def test_random_lists(kernels: Kernels, tally: Tally) -> None:
    random_misses(kernels, 1, 1000, tally.line("miss rows"))


@pytest.mark.parametrize("mode", STRICT)
def test_random_lists_on_a_strict_machine(kernels: Kernels, tally: Tally, mode: str) -> None:
    random_misses(kernels, 2, 150, tally.line(f"miss rows, {mode}"), **STRICT[mode])


@pytest.mark.parametrize("cores", [1, 7, 48])
def test_lists_longer_than_a_tile(kernels: Kernels, tally: Tally, cores: int) -> None:
    """4 queries of 2,048 ids and their own new rows, for a request of real row size; alone, it keeps all cores busy."""
    lists = Lists(1, 4 * 2049, (64, 128), (72, 128), "int16", 512, 64, least=8000)
    kernels.machine = Machine(cores=cores)
    assert run_misses(kernels, lists, cores, tally.line("miss rows, real rows")) > 6000
    assert kernels.report.cores == cores


def test_more_rows_than_a_tile_of_counts(kernels: Kernels, tally: Tally) -> None:
    kernels.machine = Machine(cores=3)
    for seed in range(3):
        assert run_misses(kernels, Lists(600, 3, (50, 2), (1000, 2)), seed, tally.line("miss rows")) > 100


def test_shares_are_equal(kernels: Kernels) -> None:
    """Whatever the lists look like: 1 core takes as long as its list, 4 cores a quarter each, to one entry."""
    given = miss_arguments(Lists(3, 40, (50, 2), (130, 1), rope_dim=None), np.random.default_rng(3))
    given["miss_rows"][:] = np.arange(120).reshape(3, 40) % 100
    given["miss_slots"][:] = np.arange(120).reshape(3, 40)
    given["miss_count"][:] = [40, 1, 3]
    kernels.machine = Machine(cores=4)
    kernels.gather_miss_rows(**given)
    assert kernels.report.read["miss_rows"] == 4 * 44


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_no_lists(kernels: Kernels, shape: tuple[int, int]) -> None:
    given = miss_arguments(Lists(), np.random.default_rng(0))
    before = given["selection_kv_cache"].copy()
    given["miss_rows"], given["miss_slots"] = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    given["miss_count"] = np.zeros(shape[0], np.int32)
    kernels.gather_miss_rows(**given)
    assert np.array_equal(before, given["selection_kv_cache"])


@pytest.mark.parametrize("wrong", stops.OF_MISSES)
def test_a_number_out_of_range_stops_the_kernel(kernels: Kernels, wrong: stops.Wrong) -> None:
    stops.check_misses(kernels, wrong)
