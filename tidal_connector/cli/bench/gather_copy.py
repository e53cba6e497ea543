# SPDX-License-Identifier: Apache-2.0
"""Times the copy of missed rows into their slots, in turn with memcpy and with torch. One thread, and those it is told.

Every contender moves as many bytes out of the same pool into the same cache; rows and slots are drawn anew for each
timing, so that nothing of them is in the processor's caches.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from tidal_connector import ops
from tidal_connector.cli.bench.figures import spread
from tidal_connector.cli.bench.gather_report import CopyCase
from tidal_connector.cli.bench.rounds import Contender, interleaved
from tidal_connector.errors import TidalError

_GB = 1e9
_SETTLE_S = 0.01
_CONTIGUOUS = ("memcpy", "torch copy_")
_NATIVE = ops.Implementation.NATIVE

_memcpy = ctypes.CDLL(None).memcpy  # releases the interpreter, as the operators do
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class CopyBench:
    """One pool and one cache of slots, seen as rows of one size.

    Args:
        memory: the pool, flat uint8.
        row_bytes: bytes of a row.
        top_k: rows that each request misses.
        slots: slots of each request.
        batch: requests.
        seed: of the random rows.
    """

    def __init__(
        self, memory: npt.NDArray[np.uint8], row_bytes: int, top_k: int, slots: int, batch: int, seed: int
    ) -> None:
        self._generator = np.random.default_rng(seed)
        count = len(memory) // row_bytes
        self._pool = memory[: count * row_bytes].reshape(count, row_bytes)
        self._top_k, self._slots, self._batch = top_k, slots, batch
        self._rows = batch * top_k
        self._cache = torch.zeros((batch * slots, row_bytes), dtype=torch.uint8).numpy()
        self._dense = torch.zeros((self._rows, row_bytes), dtype=torch.uint8).numpy()
        # Rows of 1,152 bytes are bfloat16, and torch sees them as the engine does.
        self._element = torch.bfloat16 if row_bytes == 1152 else torch.uint8

    def case(self, threads: int, repetitions: int, done: Callable[[], None]) -> CopyCase:
        """Time all contenders with so many threads each."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with ThreadPoolExecutor(max(1, threads - 1)) as helpers:
                contenders = [
                    Contender("gather", lambda: self._gather(threads)),
                    Contender("memcpy", lambda: self._memcpy(threads, helpers)),
                    Contender("torch copy_", self._torch_copy),
                    Contender("index_select", self._index_select),
                    Contender("index_select, index_copy_", self._index_select_to_slots),
                ]
                seconds = interleaved(contenders, repetitions, done, settle_s=_SETTLE_S)
        finally:
            torch.set_num_threads(before)
        moved = self._rows * self._pool.shape[1] / _GB
        rates = {name: [moved / each for each in values] for name, values in seconds.items()}
        # Which of the two moves bytes faster depends on their number and the threads; the faster one counts.
        by = max(_CONTIGUOUS, key=lambda name: spread(rates[name]).median)

        def over(other: str) -> list[float]:
            return [mine / theirs for mine, theirs in zip(rates["gather"], rates[other], strict=True)]

        return CopyCase(
            row_bytes=self._pool.shape[1],
            batch=self._batch,
            threads=threads,
            rows=self._rows,
            gather_gb_per_s=spread(rates["gather"]),
            memcpy_gb_per_s=spread(rates[by]),
            memcpy_by=by,
            contiguous_gb_per_s={name: spread(rates[name]) for name in _CONTIGUOUS},
            index_select_gb_per_s=spread(rates["index_select"]),
            index_select_to_slots_gb_per_s=spread(rates["index_select, index_copy_"]),
            gather_over_memcpy=spread(over(by)),
            gather_over_torch_index_select=spread(over("index_select")),
            gather_over_torch_to_slots=spread(over("index_select, index_copy_")),
        )

    def _draw(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return random pool rows, and for each a slot of its request, no slot twice."""
        rows = self._generator.integers(0, len(self._pool), self._rows)
        slots = [
            request * self._slots + self._generator.permutation(self._slots)[: self._top_k]
            for request in range(self._batch)
        ]
        return rows, np.concatenate(slots)

    def _neighbours(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Return as many bytes in one piece of the pool, and of the cache."""
        start = int(self._generator.integers(0, len(self._pool) - self._rows + 1))
        to = int(self._generator.integers(0, len(self._cache) - self._rows + 1))
        source, destination = self._pool[start : start + self._rows], self._cache[to : to + self._rows]
        return source.reshape(-1), destination.reshape(-1)

    def _gather(self, threads: int) -> Callable[[], None]:
        rows, slots = self._draw()

        def act() -> None:
            ops.copy_rows(self._pool, rows, self._cache, slots, threads=threads, implementation=_NATIVE)

        return act

    def _memcpy(self, threads: int, helpers: ThreadPoolExecutor) -> Callable[[], None]:
        source, destination = self._neighbours()
        cuts = [len(source) * part // threads for part in range(threads + 1)]
        to, taken = destination.ctypes.data, source.ctypes.data
        parts = [(to + a, taken + a, b - a) for a, b in itertools.pairwise(cuts)]

        def act() -> None:
            others = [helpers.submit(_memcpy, *part) for part in parts[1:]]
            _memcpy(*parts[0])
            for other in others:
                other.result()

        return act

    def _torch_copy(self) -> Callable[[], object]:
        source, destination = (torch.from_numpy(part) for part in self._neighbours())
        return lambda: destination.copy_(source)

    def _index_select(self) -> Callable[[], object]:
        rows, _ = self._draw()
        pool, dense, index = self._seen(self._pool), self._seen(self._dense), torch.from_numpy(rows)
        return lambda: torch.index_select(pool, 0, index, out=dense)

    def _index_select_to_slots(self) -> Callable[[], object]:
        rows, slots = self._draw()
        pool, dense, cache = (self._seen(each) for each in (self._pool, self._dense, self._cache))
        index, places = torch.from_numpy(rows), torch.from_numpy(slots)

        def act() -> None:
            torch.index_select(pool, 0, index, out=dense)
            cache.index_copy_(0, places, dense)

        return act

    def _seen(self, rows: npt.NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(rows).view(self._element)

    def verify(self) -> None:
        """Gather once more and compare every byte.

        Raises:
            TidalError: they differ.
        """
        rows, slots = self._draw()
        self._cache.fill(0)
        ops.copy_rows(self._pool, rows, self._cache, slots, implementation=_NATIVE)
        if not np.array_equal(self._cache[slots], self._pool[rows]):
            raise TidalError(f"rows of {self._pool.shape[1]} bytes: other bytes lie in the slots than in the pool")


def fill(memory: npt.NDArray[np.uint8]) -> None:
    """Write numbers that differ at every eight bytes, so that a row at another place is seen."""
    words = memory[: len(memory) // 8 * 8].view(np.uint64)
    step = 8 << 20
    for start in range(0, len(words), step):
        piece = words[start : start + step]
        piece[:] = np.arange(start, start + len(piece), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
