# SPDX-License-Identifier: Apache-2.0
"""Times ``ops.resolve`` on requests that decode: a new selection in each step, most of it resident. One thread, and
those it is told.

The same steps go to numpy's LRU, and the results are compared; further runs leave parts of the work out, so that the
differences say where the time goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tidal_connector import ops
from tidal_connector.cli.bench.figures import Spread, spread
from tidal_connector.cli.bench.gather_lru import MappedLru, NumpyResolved, SortedLru, selections
from tidal_connector.cli.bench.gather_report import ContextPoint, CostSplit, ResolveCase
from tidal_connector.cli.bench.rounds import Contender, interleaved
from tidal_connector.errors import TidalError

Int32 = npt.NDArray[np.int32]

PAGE_TOKENS = 64
WARM_UP = 14
"""Steps until all slots are taken and each miss takes one from another row."""

_EXTENT_ROWS = 64
_US = 1e6


class Steps:
    """What the indexer selects in successive steps of a batch, the same for everybody who asks.

    Args:
        context: positions that are selected from; the requests are so long at the first step and grow by one in each.
        batch: requests.
        top_k: positions of a selection.
        slots: slots of a request.
        hit_rate: share of hits.
        count: number of steps.
        seed: of the random selections.
    """

    def __init__(
        self, *, context: int, batch: int, top_k: int, slots: int, hit_rate: float, count: int, seed: int
    ) -> None:
        self.context, self.batch, self.top_k, self.slots, self.count = context, batch, top_k, slots, count
        generator = np.random.default_rng(seed)
        drawn = [list(itertools.islice(selections(context, top_k, hit_rate, generator), count)) for _ in range(batch)]
        self.selected: list[Int32] = [np.stack(step) for step in zip(*drawn, strict=True)]
        width = -(-(context + count) // PAGE_TOKENS)
        self.pages: Int32 = generator.permutation(batch * width).astype(np.int32).reshape(batch, width)
        extents = slots // _EXTENT_ROWS
        self.extents: Int32 = generator.permutation(batch * extents).astype(np.int32).reshape(batch, extents)

    def nothing(self) -> list[Int32]:
        """Return selections of nothing."""
        return [np.full((self.batch, self.top_k), -1, np.int32)] * self.count

    def only_hits(self) -> list[Int32]:
        """Return the first selection again and again, each time in another order."""
        generator = np.random.default_rng(0)
        return [generator.permuted(self.selected[0], axis=1) for _ in range(self.count)]


class Native:
    """Requests whose slots ``ops.resolve`` keeps.

    Args:
        steps: the requests.
        selected: what they select in each step.
        threads: workers at most.
        implementation: of the operator.
    """

    def __init__(
        self,
        steps: Steps,
        selected: Sequence[Int32],
        threads: int,
        implementation: ops.Implementation = ops.Implementation.NATIVE,
    ) -> None:
        self._implementation = implementation
        batch, rows = steps.batch, steps.batch * steps.slots
        self._steps, self._selected, self._threads = steps, selected, threads
        self._seats = ops.Seats(
            capacity=np.full(batch, steps.slots, np.int32), extents=steps.extents.copy(), extent_rows=_EXTENT_ROWS
        )
        self._state = ops.SlotState.empty(rows, batch)
        self._buffers = ops.ResolveBuffers()
        self._step = 0
        self.last: ops.Resolved | None = None

    def prepare(self) -> Callable[[], None]:
        """Make the batch of the next step; what it returns resolves it."""
        count = self._steps.batch
        batch = ops.SelectionBatch(
            selected=self._selected[self._step],
            query_start=np.arange(count + 1, dtype=np.int32),
            seat=np.arange(count, dtype=np.int32),
            start=np.full(count, self._steps.context + self._step, np.int32),
            pages=self._steps.pages,
            page_tokens=PAGE_TOKENS,
        )
        self._step += 1

        def act() -> None:
            self.last = self._resolve(batch)

        return act

    def prepare_empty(self) -> Callable[[], object]:
        """Make a batch of no requests."""
        none = np.zeros(0, np.int32)
        batch = ops.SelectionBatch(
            selected=np.zeros((0, self._steps.top_k), np.int32),
            query_start=np.zeros(1, np.int32),
            seat=none,
            start=none,
            pages=self._steps.pages[:0],
            page_tokens=PAGE_TOKENS,
        )

        return lambda: self._resolve(batch)

    def _resolve(self, batch: ops.SelectionBatch) -> ops.Resolved:
        return ops.resolve(
            self._state,
            self._seats,
            batch,
            eager_rows=self._steps.slots,
            threads=self._threads,
            buffers=self._buffers,
            implementation=self._implementation,
        )


class InNumpy:
    """Requests whose slots numpy keeps."""

    def __init__(self, steps: Steps, kind: type[SortedLru]) -> None:
        self._steps = steps
        self._requests = [kind(steps.slots, steps.context + steps.count) for _ in range(steps.batch)]
        self._step = 0
        self.last: list[NumpyResolved] = []

    def prepare(self) -> Callable[[], None]:
        """Take the next step; what it returns resolves it, one request after the other."""
        selected, written = self._steps.selected[self._step], self._steps.context + self._step
        self._step += 1

        def act() -> None:
            self.last = [
                request.resolve(selected[index], written, self._steps.pages[index], PAGE_TOKENS)
                for index, request in enumerate(self._requests)
            ]

        return act


def resolve_case(steps: Steps, threads: int, repetitions: int, done: Callable[[], None]) -> ResolveCase:
    """Time resolve, numpy, and what resolve does without parts of its work.

    Raises:
        TidalError: resolve and numpy find different misses.
    """
    native = Native(steps, steps.selected, threads)
    hits, nothing = Native(steps, steps.only_hits(), threads), Native(steps, steps.nothing(), threads)
    in_numpy = {"numpy": InNumpy(steps, SortedLru), "map": InNumpy(steps, MappedLru)}
    seconds = interleaved(
        [
            Contender("resolve", native.prepare),
            Contender("hits", hits.prepare),
            Contender("nothing", nothing.prepare),
            Contender("empty", hits.prepare_empty),
            *(Contender(name, each.prepare) for name, each in in_numpy.items()),
        ],
        repetitions,
        done,
        WARM_UP,
    )
    for each in in_numpy.values():
        _compare(native.last, each.last)
    times = {name: _per_row(values, steps.batch) for name, values in seconds.items()}

    def over(name: str) -> Spread:
        return spread(theirs / mine for theirs, mine in zip(seconds[name], seconds["resolve"], strict=True))

    assert native.last is not None
    found = native.last
    return ResolveCase(
        batch=steps.batch,
        threads=threads,
        hits=found.hits / (found.hits + found.misses),
        us_per_row=times["resolve"],
        split=cost_split(*(times[name].median for name in ("empty", "nothing", "hits", "resolve"))),
        numpy_us_per_row=times["numpy"],
        numpy_map_us_per_row=times["map"],
        resolve_over_numpy=over("numpy"),
        resolve_over_numpy_map=over("map"),
    )


def cost_split(empty: float, nothing: float, hits: float, whole: float) -> CostSplit:
    """Return the differences between timings that do more and more of the work, none of them below zero."""
    return CostSplit(
        call=empty, scan=max(0.0, nothing - empty), find=max(0.0, hits - nothing), replace=max(0.0, whole - hits)
    )


def context_sweep(runs: Sequence[Steps], repetitions: int, done: Callable[[], None]) -> list[ContextPoint]:
    """Time resolve with one thread at several lengths of the context, in turn."""
    natives = [Native(steps, steps.selected, threads=1) for steps in runs]
    contenders = [Contender(str(at), native.prepare) for at, native in enumerate(natives)]
    seconds = interleaved(contenders, repetitions, done, WARM_UP)
    return [ContextPoint(steps.context, _per_row(seconds[str(at)], steps.batch)) for at, steps in enumerate(runs)]


def _per_row(seconds: Sequence[float], batch: int) -> Spread:
    return spread(each * _US / batch for each in seconds)


def _compare(mine: ops.Resolved | None, theirs: Sequence[NumpyResolved]) -> None:
    assert mine is not None
    starts = mine.miss_start
    for index, request in enumerate(theirs):
        rows = mine.miss_rows[starts[index] : starts[index + 1]]
        if not np.array_equal(np.sort(rows), np.sort(request.miss_rows)):
            raise TidalError(
                f"request {index}: resolve fetches {len(rows)} rows, numpy {len(request.miss_rows)}, and not the same"
            )
