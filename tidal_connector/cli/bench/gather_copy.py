# SPDX-License-Identifier: Apache-2.0
"""Times the copy of missed rows into their slots, in turn with memcpy and with torch. One thread, and those it is told.

The pool holds so many layers, as an engine's does, and each timing works on the next of them, its slots and its rows
drawn anew: a decode step comes back to a layer only after all others, so that nothing of it is in the processor's
caches any more. Every contender moves as many bytes from a layer's pages to where its slots are.
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
from tidal_connector.selection.budget import slot_bytes

Rows = npt.NDArray[np.uint8]

_GB = 1e9
_SETTLE_S = 0.01
_COLD_BYTES = 256 << 20  # eight times the last-level cache of the machines that this was measured on
_NATIVE = ops.Implementation.NATIVE

_memcpy = ctypes.CDLL(None).memcpy  # releases the interpreter, as the operators do
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class CopyBench:
    """One pool and one cache of slots, seen as rows of one size.

    Args:
        memory: the pool, flat uint8; its layers lie one behind the other.
        layers: of the pool.
        row_bytes: bytes of a row.
        top_k: rows that each request misses.
        slots: slots of each request.
        batch: requests.
        seed: of the random rows.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        layers: int,
        row_bytes: int,
        top_k: int,
        slots: int,
        batch: int,
        seed: int,
    ) -> None:
        self._generator = np.random.default_rng(seed)
        count = len(memory) // layers // row_bytes
        self._pools = memory[: layers * count * row_bytes].reshape(layers, count, row_bytes)
        self._top_k, self._slots, self._batch = top_k, slots, batch
        self._rows = batch * top_k
        width = slot_bytes(row_bytes)
        # All layers' slots would take gigabytes; this many are out of the caches, too, when their turn comes again.
        kept = min(layers, max(2, _COLD_BYTES // (batch * slots * width)))
        self._slots_of = torch.ones((kept, batch * slots, width), dtype=torch.uint8).numpy()
        self._dense_of = torch.ones((kept, self._rows, row_bytes), dtype=torch.uint8).numpy()
        self._turn = 0
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
        moved = self._rows * self._pools.shape[2] / _GB
        rates = {name: [moved / each for each in values] for name, values in seconds.items()}

        def over(other: str) -> list[float]:
            return [mine / theirs for mine, theirs in zip(rates["gather"], rates[other], strict=True)]

        return CopyCase(
            row_bytes=self._pools.shape[2],
            batch=self._batch,
            threads=threads,
            rows=self._rows,
            gather_gb_per_s=spread(rates["gather"]),
            memcpy_gb_per_s=spread(rates["memcpy"]),
            torch_copy_gb_per_s=spread(rates["torch copy_"]),
            index_select_gb_per_s=spread(rates["index_select"]),
            index_select_to_slots_gb_per_s=spread(rates["index_select, index_copy_"]),
            gather_over_memcpy=spread(over("memcpy")),
            gather_over_torch_copy=spread(over("torch copy_")),
            gather_over_torch_index_select=spread(over("index_select, index_copy_")),
            gather_over_torch_index_select_dense=spread(over("index_select")),
        )

    def _next(self) -> tuple[Rows, Rows, Rows]:
        """Return the next layer's rows in the pool, its slots (without their padding), and a dense buffer."""
        self._turn += 1
        kept, layers, row_bytes = len(self._slots_of), len(self._pools), self._pools.shape[2]
        slots = self._slots_of[self._turn % kept, :, :row_bytes]
        return self._pools[self._turn % layers], slots, self._dense_of[self._turn % kept]

    def _draw(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return random rows of a layer, and for each a slot of its request, no slot twice."""
        rows = self._generator.integers(0, self._pools.shape[1], self._rows)
        slots = [
            request * self._slots + self._generator.permutation(self._slots)[: self._top_k]
            for request in range(self._batch)
        ]
        return rows, np.concatenate(slots)

    def _neighbours(self) -> tuple[Rows, Rows]:
        """Return as many bytes in one piece of a layer's pages, and where they go."""
        pool, _, dense = self._next()
        start = int(self._generator.integers(0, len(pool) - self._rows + 1))
        return pool[start : start + self._rows].reshape(-1), dense.reshape(-1)

    def _gather(self, threads: int) -> Callable[[], None]:
        rows, places = self._draw()
        pool, slots, _ = self._next()

        def act() -> None:
            ops.copy_rows(pool, rows, slots, places, threads=threads, implementation=_NATIVE)

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
        pool, _, dense = map(self._seen, self._next())
        index = torch.from_numpy(rows)
        return lambda: torch.index_select(pool, 0, index, out=dense)

    def _index_select_to_slots(self) -> Callable[[], object]:
        rows, places = self._draw()
        pool, slots, dense = map(self._seen, self._next())
        index, to = torch.from_numpy(rows), torch.from_numpy(places)

        def act() -> None:
            torch.index_select(pool, 0, index, out=dense)
            slots.index_copy_(0, to, dense)

        return act

    def _seen(self, rows: npt.NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(rows).view(self._element)

    def verify(self) -> None:
        """Gather once more and compare every byte.

        Raises:
            TidalError: they differ.
        """
        rows, places = self._draw()
        pool, slots, _ = self._next()
        slots.fill(0)
        ops.copy_rows(pool, rows, slots, places, implementation=_NATIVE)
        if not np.array_equal(slots[places], pool[rows]):
            raise TidalError(f"rows of {pool.shape[1]} bytes: other bytes lie in the slots than in the pool")


def fill(memory: npt.NDArray[np.uint8]) -> None:
    """Write numbers that differ at every eight bytes, so that a row at another place is seen."""
    words = memory[: len(memory) // 8 * 8].view(np.uint64)
    step = 8 << 20
    for start in range(0, len(words), step):
        piece = words[start : start + step]
        piece[:] = np.arange(start, start + len(piece), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
