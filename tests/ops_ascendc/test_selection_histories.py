# SPDX-License-Identifier: Apache-2.0
"""The kernel gather_selection_kv_cache against its definition, over more than 10,000 random steps (some 40 s)."""

from __future__ import annotations

import pytest

from tests.ops.selection_world import Mood, Sizes
from tests.ops_ascendc.histories import STRICT, play, random_history
from tests.ops_ascendc.kernels import Kernels, Machine
from tests.ops_ascendc.tally import Tally

STEPS = 14
CASES = 40  # in one test; 2 keys x 10 tests make 11,200 steps
keys = pytest.mark.parametrize("key", [1, 2])


@keys
@pytest.mark.parametrize("part", range(10))
def test_random_histories(kernels: Kernels, tally: Tally, key: int, part: int) -> None:
    for case in range(CASES):
        random_history(kernels, key, part * CASES + case, STEPS, tally, judged=case % 4 == 0)


@keys
@pytest.mark.parametrize("mode", [*STRICT, "both"])
def test_random_histories_on_a_strict_machine(kernels: Kernels, tally: Tally, key: int, mode: str) -> None:
    """A DMA runs late, and scalar access has a cache on each core: what is not ordered shows."""
    strict = STRICT.get(mode) or {"lazy_dma": True, "scalar_cache": True}
    for case in range(20):
        random_history(kernels, key, 10_000 + case, 10, tally, **strict)


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("cores", [1, 8, 48])
def test_real_geometry(kernels: Kernels, tally: Tally, queries: int, cores: int) -> None:
    """V3.2 in bfloat16: 2,048 ids, rows of 512 + 64 elements, pages of 128 tokens."""
    sizes = Sizes(
        requests=1, queries=queries, topk=2048, selection_page=128, full_page=128, longest=8192, dtype="int16",
        kv_dim=512, rope_dim=64,
    )  # fmt: skip
    kernels.machine = Machine(cores=cores)
    moods = [Mood.GROW, Mood.GROW, Mood.REJECT, Mood.FEW, Mood.GROW]
    play(kernels, sizes, cores, moods, tally.line("2,048 ids of 512 + 64"), judged=False)
    assert kernels.report.cores == cores


def test_blocks_of_real_models(kernels: Kernels, tally: Tally) -> None:
    """A block of 64 rows is carried in pieces, which several cores share."""
    for dtype, kv_dim, rope_dim in (("int16", 512, 64), ("int8", 656, None), ("uint16", 512, None)):
        sizes = Sizes(2, 2, 6, 64, selection_page=2, full_page=2, longest=1024, dtype=dtype, kv_dim=kv_dim,
                      rope_dim=rope_dim)  # fmt: skip
        kernels.machine = Machine(cores=8)
        moods = [Mood.GROW, Mood.FEW, Mood.GROW, Mood.REJECT, Mood.GROW]
        play(kernels, sizes, 5, moods, tally.line("blocks of 64 real rows"))


def test_the_random_steps_were_enough_and_of_every_kind(tally: Tally) -> None:
    """Runs last in this file: both keys found, fetched and moved, and together they ran the 10,000 steps."""
    if sum(line.cases for name, line in tally.lines.items() if "plain" in name) < 2 * 10 * CASES:
        pytest.skip("only a part of the histories was asked for")
    plain = [tally.line(f"key {key}, plain") for key in (1, 2)]
    assert sum(line.steps for line in plain) >= 10_000
    for line in plain:
        assert min(line.hits, line.misses, line.moves) > 1_000
        assert line.bytes_read == line.bytes_missed
