# SPDX-License-Identifier: Apache-2.0
"""The definitions of the operators in numpy: short, slow, and what every other implementation is compared with.

Arguments are checked by the public operators. Any thread.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import numpy.typing as npt

from tidal_connector.ops.row_arrays import row_count


def copy_rows(
    source: npt.NDArray[np.uint8],
    source_rows: npt.NDArray[np.int64],
    destination: npt.NDArray[np.uint8],
    destination_rows: npt.NDArray[np.int64],
) -> int:
    """Copy rows between arrays ``[pages, page_tokens, row_bytes]``; source row -1 is zeros, destination row -1 a skip.

    Returns:
        -1, or the position of the first index outside: of ``source_rows``, or behind them of ``destination_rows``;
        then nothing was written.
    """
    wrong = _outside(source_rows, row_count(source), destination_rows, row_count(destination))
    if wrong >= 0:
        return wrong
    kept = destination_rows >= 0
    zeros = kept & (source_rows < 0)
    moved = kept & (source_rows >= 0)
    destination[np.divmod(destination_rows[zeros], destination.shape[1])] = 0
    to = np.divmod(destination_rows[moved], destination.shape[1])
    destination[to] = source[np.divmod(source_rows[moved], source.shape[1])]
    return -1


def _outside(
    source_rows: npt.NDArray[np.int64], sources: int, destination_rows: npt.NDArray[np.int64], destinations: int
) -> int:
    for before, rows, end in ((0, source_rows, sources), (len(source_rows), destination_rows, destinations)):
        wrong = np.flatnonzero((rows < -1) | (rows >= end))
        if wrong.size:
            return before + int(wrong[0])
    return -1


def gather_rows(pool: npt.NDArray[np.uint8], slots: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> int:
    """Copy rows of ``pool [pages, page_tokens, row_bytes]`` to ``out [n, row_bytes]``; slot -1 gives zeros.

    Returns:
        -1, or the position of the first slot outside ``[-1, rows)``; then nothing was written.
    """
    return copy_rows(pool, slots, out[np.newaxis], np.arange(len(slots)))


class CopyStream:
    """What a copy stream does, without a thread: a submission is done when ``submit`` returns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs = 0
        self._bytes = 0
        self._busy_seconds = 0.0
        self._closed = False

    def submit(
        self,
        moves: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]],
        first: int,
        count: int,
        source_rows: npt.NDArray[np.int64],
        destination_rows: npt.NDArray[np.int64],
        after: int,
        wake: bool = True,
    ) -> int:
        """Copy rows by moves ``[first, first + count)``, each a source and a destination as for ``copy_rows``.

        Returns:
            The ticket of the first copy; or ``~position`` of the first index that is outside for any of the moves,
            counted as ``copy_rows`` does: then nothing was copied.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the copy stream is closed")
            self._check(after)
            part = moves[first : first + count]
            sources = min(row_count(source) for source, _ in part)
            destinations = min(row_count(destination) for _, destination in part)
            wrong = _outside(source_rows, sources, destination_rows, destinations)
            if wrong >= 0:
                return ~wrong
            begun = time.perf_counter()
            for source, destination in part:
                copy_rows(source, source_rows, destination, destination_rows)
                self._bytes += int((destination_rows >= 0).sum()) * source.shape[2]
            self._busy_seconds += time.perf_counter() - begun
            self._jobs += count
            return self._jobs - count + 1

    def wait(self, ticket: int, seconds: float) -> int:
        """Return 0: what has a ticket is done."""
        with self._lock:
            self._check(ticket)
        return 0

    def settle(self, ticket: int, seconds: float) -> int:
        """Return 0: what has a ticket is done."""
        return self.wait(ticket, seconds)

    def done(self, ticket: int) -> bool:
        """Return True: what has a ticket is done."""
        return self.wait(ticket, 0) == 0

    def statistics(self) -> tuple[int, int, float, float, float, int]:
        """Return jobs, bytes, busy seconds, and zero for what concerns those who wait."""
        with self._lock:
            return self._jobs, self._bytes, self._busy_seconds, 0.0, 0.0, 0

    def close(self) -> None:
        """Refuse submissions from now on."""
        with self._lock:
            self._closed = True

    def _check(self, ticket: int) -> None:
        if not 0 <= ticket <= self._jobs:
            raise ValueError(f"ticket {ticket}: expected at least 0, at most {self._jobs}")
