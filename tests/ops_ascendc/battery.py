# SPDX-License-Identifier: Apache-2.0
"""Everything that the tests ask of the kernels, in short: a program of its own, for builds that may crash or hang.

``python -m tests.ops_ascendc.battery LIBRARY HISTORIES`` runs each kind of test on a build of the kernels, and ends
with 0 if all of them passed. Its last line says how many steps that were, or what was wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tests.ops.selection_world import Mood, Sizes, World
from tests.ops_ascendc import stops
from tests.ops_ascendc.histories import exchanges, play, random_history, step
from tests.ops_ascendc.kernels import Kernels, Machine, RefusedByHost, Stopped
from tests.ops_ascendc.misses import Lists, random_misses, run_misses
from tests.ops_ascendc.tally import Tally

BLOCKS = Sizes(requests=2, queries=3, topk=6, block=4, longest=96, selection_page=2)
SIZES = (Sizes(topk=6, block=2), Sizes(topk=40))


def selection_histories(kernels: Kernels, tally: Tally, histories: int) -> None:
    """Random histories of both keys, now on a strict machine, now on a plain one."""
    for seed in range(histories):
        for key in (1, 2):
            random_history(kernels, key, seed, 8, tally, lazy_dma=seed % 3 != 0, scalar_cache=seed % 2 == 0)


def long_lists(kernels: Kernels, tally: Tally) -> None:
    """More than a tile of a list, of counts, and of a table; ids that a float cannot tell apart."""
    kernels.machine = Machine(cores=2, lazy_dma=True, scalar_cache=True)
    line = tally.line("long lists")
    run_misses(kernels, Lists(1, 1100, (50, 2), (1100, 1), kv_dim=2, rope_dim=None, least=1100), 1, line)
    run_misses(kernels, Lists(300, 3, (50, 2), (1000, 1), kv_dim=2, rope_dim=None), 1, line)
    world = World(Sizes(requests=1, topk=40, full_page=4096, longest=4096, kv_dim=1, rope_dim=None))
    world.arguments["full_kv_block_table"] = np.zeros((1, 4100), np.int32)
    world.arguments["full_kv_actual_seq"][:] = (1 << 24) + 100
    for shift in (0, 1):
        first = (1 << 24) + shift
        world.arguments["selection_topk_indices"].reshape(-1)[:] = np.arange(first, first + 40)
        step(kernels, world, line)


def main(library: str, histories: str) -> int:
    """Run all; return the exit status."""
    kernels, tally = Kernels(Path(library)), Tally()
    try:
        for sizes in SIZES:
            for wrong in stops.OF_SELECTION:
                kernels.machine = Machine(cores=2)
                stops.check_selection(kernels, sizes, wrong)
        for wrong in stops.OF_MISSES:
            stops.check_misses(kernels, wrong)
        random_misses(kernels, 7, 10, tally.line("misses"), lazy_dma=True, scalar_cache=True)
        exchanges(kernels, tally.line("exchanges"), 2)
        long_lists(kernels, tally)
        # Rows of the earlier queries hold parts of blocks that are whole, and written for good, at the next call.
        play(kernels, BLOCKS, 11, [Mood.GROW, Mood.REJECT, Mood.FEW, Mood.GROW] * 5, tally.line("blocks"), False)
        selection_histories(kernels, tally, int(histories))
    except (AssertionError, RefusedByHost, Stopped) as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0])
        return 1
    print(f"{sum(line.steps for line in tally.lines.values())} steps passed")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
