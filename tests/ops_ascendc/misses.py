# SPDX-License-Identifier: Apache-2.0
"""Random lists for gather_miss_rows: each call of the kernel compared with a few lines of numpy.

Takes kernels and a seed. Targets are distinct, as the operator demands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tests.ops_ascendc.kernels import Array, Kernels, Machine
from tests.ops_ascendc.tally import Line


@dataclass(frozen=True)
class Lists:
    rows: int = 2
    pitch: int = 9
    pool: tuple[int, int] = (12, 4)
    arena: tuple[int, int] = (16, 2)
    dtype: str = "uint16"
    kv_dim: int = 5
    rope_dim: int | None = 3
    least: int = -1  # entries in a row


def miss_arguments(lists: Lists, rng: np.random.Generator) -> dict[str, Array]:
    """Draw caches and lists; targets are distinct, and what stands at or past a count is garbage."""

    def noise(*shape: int) -> Array:
        return rng.integers(0, 100, shape).astype(lists.dtype)

    def rope(pages: tuple[int, int]) -> Array:
        return np.empty(0, lists.dtype) if lists.rope_dim is None else noise(*pages, lists.rope_dim)

    shape = (lists.rows, lists.pitch)
    entries, arena = int(np.prod(shape)), int(np.prod(lists.arena))
    slots = rng.permutation(max(arena, entries))[:entries]
    slots[slots >= arena] = -1
    rows = rng.integers(0, int(np.prod(lists.pool)), entries)
    for each in (rows, slots):
        each[rng.random(entries) < 0.1] = -int(rng.integers(1, 9))
    rows, slots = (each.astype(np.int32).reshape(shape) for each in (rows, slots))
    count = rng.integers(lists.least, lists.pitch + 1, lists.rows).astype(np.int32)
    past = np.arange(lists.pitch) >= count[:, None]
    rows[past] = slots[past] = 2**31 - 1
    return {
        "selection_k_rope": rope(lists.arena),
        "selection_kv_cache": noise(*lists.arena, lists.kv_dim),
        "full_k_rope": rope(lists.pool),
        "full_kv_cache": noise(*lists.pool, lists.kv_dim),
        "miss_rows": rows,
        "miss_slots": slots,
        "miss_count": count,
    }


def defined(given: dict[str, Array]) -> tuple[dict[str, Array], int]:
    """Return what the operator leaves, and how many rows it copies."""
    result = {name: array.copy() for name, array in given.items()}
    there = np.arange(given["miss_rows"].shape[1]) < given["miss_count"][:, None]
    there &= (given["miss_rows"] >= 0) & (given["miss_slots"] >= 0)
    rows, slots = given["miss_rows"][there], given["miss_slots"][there]
    for part in ("kv_cache", "k_rope"):
        if given[f"full_{part}"].size:
            full, arena = given[f"full_{part}"], result[f"selection_{part}"]
            arena.reshape(-1, arena.shape[2])[slots] = full.reshape(-1, full.shape[2])[rows]
    return result, len(rows)


def run_misses(kernels: Kernels, lists: Lists, seed: int, line: Line) -> int:
    """Run one call, compare everything, and return how many rows were copied."""
    given = miss_arguments(lists, np.random.default_rng(seed))
    expected, copied = defined(given)
    kernels.gather_miss_rows(**given)
    for name, array in given.items():
        assert np.array_equal(array, expected[name]), f"{name} differs"
    row_bytes = (lists.kv_dim + (lists.rope_dim or 0)) * np.dtype(lists.dtype).itemsize
    assert kernels.report.pool_bytes == copied * row_bytes
    assert kernels.report.written["selection_kv_cache"] == copied * lists.kv_dim * np.dtype(lists.dtype).itemsize
    assert kernels.report.barriers == 0
    line.add(Line(1, 1, 0, copied, 0, kernels.report.pool_bytes, copied * row_bytes))
    return copied


def _random_lists(rng: np.random.Generator) -> Lists:
    rows = int(rng.choice([1, 2, 3, 7]))
    pitch = int(rng.choice([1, 2, 9, 40, 130]))
    return Lists(
        rows=rows,
        pitch=pitch,
        pool=(int(rng.integers(1, 20)), int(rng.integers(1, 9))),
        arena=(int(rng.integers(1, 2 + rows * pitch)), int(rng.integers(1, 4))),
        dtype=str(rng.choice(["uint16", "int16", "int8"])),
        kv_dim=int(rng.integers(1, 40)),
        rope_dim=None if rng.random() < 0.3 else int(rng.integers(1, 9)),
    )


def random_misses(kernels: Kernels, seed: int, calls: int, line: Line, **strict: bool) -> None:
    """Run calls of random shapes on machines of 1 to 8 cores."""
    rng = np.random.default_rng(seed)
    for call in range(calls):
        kernels.machine = replace(Machine(), cores=int(rng.integers(1, 9)), seed=call, **strict)
        run_misses(kernels, _random_lists(rng), seed * calls + call, line)
