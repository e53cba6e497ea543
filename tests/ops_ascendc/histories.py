# SPDX-License-Identifier: Apache-2.0
"""Random histories of gather_selection_kv_cache: each step of a kernel compared with the definition, bit for bit.

Takes kernels and a seed. The world, its moods and the judge are those of the CPU operator's tests.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tests.ops.selection_world import Mood, Sizes, World, judge
from tests.ops_ascendc.kernels import Array, Kernels, Machine
from tests.ops_ascendc.tally import Line, Tally
from tidal_connector.ops import Implementation, gather_selection_kv_cache

REFERENCE = partial(gather_selection_kv_cache, implementation=Implementation.REFERENCE)
MOODS = tuple(Mood)
STRICT = {"lazy_dma": {"lazy_dma": True}, "scalar_cache": {"scalar_cache": True}}


def random_sizes(rng: np.random.Generator, key: int) -> Sizes:
    """Draw a small shape for one of the two tiling keys."""
    topk = int(rng.choice([1, 2, 5, 8, 31, 32] if key == 1 else [33, 34, 40, 65, 96]))
    block = int(rng.choice([1, 2, 64])) if key == 1 else 1
    quantized = bool(rng.random() < 0.3)
    return Sizes(
        requests=int(rng.integers(1, 4)),
        queries=int(rng.integers(1, 5)),
        topk=topk if block < 64 else min(topk, 8),
        block=block,
        selection_page=int(rng.integers(1, 5)),
        full_page=int(rng.integers(1, 4)),
        longest=int(rng.choice([24, 96])) * (8 if block == 64 else block),
        dtype="int8" if quantized else str(rng.choice(["uint16", "int16", "int8"])),  # float16, bfloat16, int8
        kv_dim=int(rng.integers(1, 40)),
        rope_dim=None if quantized else int(rng.integers(1, 5)),
        tnd=bool(rng.random() < 0.5),
    )


def random_mood(rng: np.random.Generator) -> Mood:
    """Draw what the next step is like; growing and shrinking come most often."""
    return Mood.GROW if rng.random() < 0.3 else Mood.FEW if rng.random() < 0.2 else MOODS[rng.integers(len(MOODS))]


def step(kernels: Kernels, world: World, line: Line, judged: bool = False, **more: Any) -> Array:
    """Run one call on both sides; every array, the lengths and the bytes read from the pool have to agree."""
    arguments, block = world.arguments, world.sizes.block
    before, memory = world.copy(), world.copy()
    actual = kernels.gather_selection_kv_cache(**arguments, selection_topk_block_size=block, **more)
    world.arguments = before
    defined = world.call(REFERENCE)
    world.arguments = arguments
    assert np.array_equal(actual, defined), f"selection_kv_actual_seq: {actual} instead of {defined}"
    for name, array in arguments.items():
        assert np.array_equal(array, before[name]), f"{name} differs"
    traffic, report = world.traffic, kernels.report
    assert report.pool_bytes == traffic.fetched_bytes, f"{report.pool_bytes} bytes read: {traffic.fetched_bytes} missed"
    assert report.scalar_read["full_kv_cache"] == report.scalar_read["full_k_rope"] == 0, "scalar reads of the pool"
    assert report.barriers == 1, f"{report.barriers} barriers: expected 1"
    if judged:
        judge(world, memory, actual)
    line.add(Line(0, 1, traffic.hits, traffic.fetched, traffic.moved, report.pool_bytes, traffic.fetched_bytes))
    return actual


def play(kernels: Kernels, sizes: Sizes, seed: int, moods: list[Mood], line: Line, judged: bool = True) -> None:
    """Run one history."""
    line.cases += 1
    world = World(sizes, seed)
    for mood in moods:
        world.advance(mood)
        step(kernels, world, line, judged)


def random_history(
    kernels: Kernels, key: int, seed: int, steps: int, tally: Tally, judged: bool = False, **strict: bool
) -> None:
    """Run a random history on a machine of 1 to 8 cores.

    Args:
        kernels: their machine is replaced.
        key: the tiling key, 1 for few ids of any block size, 2 for many single tokens.
        seed: of everything.
        steps: calls.
        tally: takes what happened.
        judged: whether the judge looks at each step, too.
        strict: fields of Machine.
    """
    rng = np.random.default_rng([seed, key])
    sizes = random_sizes(rng, key)
    kernels.machine = replace(Machine(), cores=int(rng.integers(1, 9)), seed=seed, **strict)
    moods = [random_mood(rng) for _ in range(steps)]
    # Named by what tells the lines of the summary apart.
    name = f"key {key}, {'+'.join(strict) or 'plain'}"
    play(kernels, sizes, seed, moods, tally.line(name), judged)
    assert kernels.report.tiling_key == key


# Ids of consecutive calls. Each last call makes the largest id change places with one that stayed, ...
EXCHANGES = {
    "both stayed": [[5, 1, 0, 9], [5, 1, 0]],
    "the largest stayed, the other is fetched": [[5, 1, 0, 9], [5, 1, 2]],
    "the largest is fetched, the other stayed": [[5, 1, 0, 9], [11, 1, 0]],
    "the largest moves, the other stayed": [[5, 1, 0, 9], [9, 1, 0]],
    "the largest stayed, the other moves": [[5, 1, 0, 2, 9], [5, 1, 2]],
}


def exchanges(kernels: Kernels, line: Line, block: int, dtype: str = "uint16", kv_dim: int = 5) -> None:
    """Run each of them on blocks; with rows of a real size, a block is more than one piece."""
    for calls in EXCHANGES.values():
        line.cases += 1
        world = World(Sizes(requests=1, topk=6, block=block, longest=16 * block, dtype=dtype, kv_dim=kv_dim))
        world.lengths[0] = 12 * block - 1
        for chosen in calls:
            world.advance(Mood.GROW)
            ids = world.arguments["selection_topk_indices"].reshape(-1)
            ids[:] = -1
            ids[: len(chosen)] = chosen
            step(kernels, world, line)
