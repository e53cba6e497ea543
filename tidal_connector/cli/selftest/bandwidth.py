# SPDX-License-Identifier: Apache-2.0
"""How fast random rows come from the pool into device memory, beside a plain copy of as many bytes in the same run.

The gather is GatherMissRows, reading the pool through its alias; the copy is one contiguous transfer from pinned
host memory. Both move latents of DeepSeek-V3.2, 1,024 + 128 bytes a row. Rounds alternate. Afterwards every row
that the gather brought is compared with the pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tidal_connector.cli.bench.figures import spread
from tidal_connector.cli.bench.rounds import Contender, interleaved
from tidal_connector.cli.selftest.device import Array, Pool, TestDevice
from tidal_connector.cli.selftest.report import BandwidthCase
from tidal_connector.cli.selftest.worker import Worker

SIZES = ((1, 512), (1, 2048), (8, 2048), (24, 2048))
"""Lists and rows in each: a few misses, a whole selection, and batches of selections."""

QUICK_SIZES = SIZES[:2]

NOPE, ROPE = 512, 64
ROW_BYTES = 2 * (NOPE + ROPE)
PAGE = 128

_OPEN_S, _ROUNDS_S = 600.0, 300.0
_FILL = 1 << 26  # bytes written at a time, so that a large pool needs no second one for its noise


def least_pool(sizes: Sequence[tuple[int, int]]) -> int:
    """Return the bytes of the smallest pool that has a different row for each of the largest call."""
    return -(-max(lists * rows for lists, rows in sizes) // PAGE) * PAGE * ROW_BYTES


def measure_bandwidth(
    device: TestDevice,
    worker: Worker,
    size: int,
    sizes: Sequence[tuple[int, int]],
    rounds: int,
    seed: int,
    tell: Callable[[str], None],
) -> Iterator[str | BandwidthCase]:
    """Open and register a pool, fill it, and measure each size; the first value says what the pool is made of.

    Args:
        device: used on the worker's thread only.
        worker: that thread.
        size: bytes of the pool.
        sizes: lists and rows in each.
        rounds: timed rounds of each size.
        seed: of contents and rows.
        tell: what is being done.

    Raises:
        Stuck: the device did not answer.
        TidalError: the pool cannot be had or registered, or a call was refused.
    """
    pages = size // (PAGE * ROW_BYTES)
    with contextlib.ExitStack() as stack:
        tell("opening and registering the pool")
        opened = device.open_pool(pages * PAGE * ROW_BYTES)
        pool = worker.run("registering the pool", _OPEN_S, opened.__enter__)
        stack.callback(_close, worker, opened)
        yield pool.report
        tell("filling the pool")
        _fill(pool.host, seed)
        tables = worker.run("aliases of the pool", _OPEN_S, lambda: _caches(pool, pages))
        for lists, rows in sizes:
            tell(f"{lists} x {rows} rows")
            work = _Work(device, pool, tables, lists, rows, pages, seed)
            yield worker.run(f"{lists} x {rows} rows", _ROUNDS_S, lambda work=work: work.measure(rounds))


def _close(worker: Worker, opened: Any) -> None:
    if not worker.stuck:
        worker.run("unregistering the pool", _OPEN_S, lambda: opened.__exit__(None, None, None))


def _fill(host: Array, seed: int) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, min(_FILL, host.size), np.uint8)
    for at in range(0, host.size, noise.size):
        part = host[at : at + noise.size]
        np.add(noise[: part.size], np.uint8(at // noise.size % 251), out=part)


def _caches(pool: Pool, pages: int) -> tuple[Any, Any]:
    """Return k_pe and k_nope as two regions of the pool, one behind the other, as an engine has them."""
    nope = pool.tensor(0, (pages, PAGE, NOPE), "bfloat16")
    return pool.tensor(pages * PAGE * NOPE * 2, (pages, PAGE, ROPE), "bfloat16"), nope


class _Work:
    """The rows of one size, drawn anew for each round."""

    def __init__(
        self, device: TestDevice, pool: Pool, caches: tuple[Any, Any], lists: int, rows: int, pages: int, seed: int
    ) -> None:
        self._device, self._pool, self._caches = device, pool, caches
        self._lists, self._rows, self._pages = lists, rows, pages
        self._random = np.random.default_rng(seed)
        blocks = -(-lists * rows // PAGE)
        zeros = [np.zeros((blocks, PAGE, wide), np.int16) for wide in (ROPE, NOPE)]
        self._arena = [device.put(array, "bfloat16") for array in zeros]
        shape = (lists, rows)
        self._slots = device.put(np.arange(lists * rows, dtype=np.int32).reshape(shape), "int32")
        self._count = device.put(np.full(lists, rows, np.int32), "int32")
        self._staged = device.staged(lists * rows * ROW_BYTES)
        self._dense = device.put(np.zeros(lists * rows * ROW_BYTES, np.int8), "int8")
        self._drawn: Array = np.empty(0, np.int32)

    def measure(self, rounds: int) -> BandwidthCase:
        bytes_ = self._lists * self._rows * ROW_BYTES
        seconds = interleaved(
            (Contender("gather", self._gather), Contender("copy", self._copy)), rounds, done=lambda: None
        )
        ratios = [copy / gather for gather, copy in zip(seconds["gather"], seconds["copy"], strict=True)]
        return BandwidthCase(
            lists=self._lists,
            rows=self._rows,
            bytes=bytes_,
            gather_gb_s=round(bytes_ / 1e9 / spread(seconds["gather"]).median, 3),
            copy_gb_s=round(bytes_ / 1e9 / spread(seconds["copy"]).median, 3),
            ratio=round(spread(ratios).median, 3),
            wrong=self._wrong(),
        )

    def _gather(self) -> Callable[[], None]:
        rows = self._random.choice(self._pages * PAGE, self._lists * self._rows, replace=False)
        self._drawn = rows.astype(np.int32).reshape(self._lists, self._rows)
        drawn = self._device.put(self._drawn, "int32")
        self._device.finish()

        def act() -> None:
            self._device.gather_miss_rows(*self._arena, *self._caches, drawn, self._slots, self._count)
            self._device.finish()

        return act

    def _copy(self) -> Callable[[], None]:
        self._device.finish()

        def act() -> None:
            self._dense.copy_(self._staged, non_blocking=True)
            self._device.finish()

        return act

    def _wrong(self) -> int:
        """Count the rows of the last round that are not what the pool holds."""
        self._gather()()
        host, rows = self._pool.host.view(np.int16), self._drawn.reshape(-1)
        nope = host[: self._pages * PAGE * NOPE].reshape(-1, NOPE)
        rope = host[nope.size : nope.size + self._pages * PAGE * ROPE].reshape(-1, ROPE)
        bad = np.zeros(len(rows), bool)
        for tensor, source in zip(self._arena, (rope, nope), strict=True):
            found = self._device.take(tensor).reshape(-1, source.shape[1])[: len(rows)]
            bad |= (found != source[rows]).any(axis=1)
        return int(bad.sum())
