# SPDX-License-Identifier: Apache-2.0
"""Random sequences of calls for both operators, as a running engine would make them. Pure; numpy only.

A :class:`Session` is a few requests that decode: each :meth:`Session.step` writes new tokens into the pool, accepts or
rejects drafts, replaces a request now and then, and draws a selection that partly repeats the last one.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tidal_connector.cli.selftest.device import Array

_REPLACED, _FEW, _HOLES = 0.05, 0.1, 0.1  # chances per request and step
_REPEATED = 0.8  # share of a selection that was in the last one


class Case(msgspec.Struct, frozen=True):
    """One shape of calls of GatherSelectionKvCache.

    Attributes:
        name: what reports call it.
        dtype: of the caches; ``int8`` has no rope of its own.
        requests, queries: B and S.
        topk, block: K ids of so many tokens each.
        page: tokens of a page, of either cache.
        longest: tokens of a request, at most.
        kv_dim, rope_dim: elements of a row; rope 0: none.
        steps: calls in turn on one selection cache.
    """

    name: str
    dtype: str = "bfloat16"
    requests: int = 2
    queries: int = 1
    topk: int = 64
    block: int = 1
    page: int = 64
    longest: int = 1024
    kv_dim: int = 32
    rope_dim: int = 16
    steps: int = 30

    @property
    def element(self) -> npt.DTypeLike:
        """Integer of an element's width."""
        return np.int8 if self.dtype == "int8" else np.int16


def selection_cases(quick: bool = False) -> tuple[Case, ...]:
    """Return the shapes that are tried: both keys, both row widths, drafts, quantised rows, and the real geometry."""
    steps = 8 if quick else 30
    real = 2 if quick else 6
    return (
        Case("tokens", steps=steps),
        Case("tokens, float16, two queries", dtype="float16", queries=2, steps=steps),
        Case("tokens, four queries", queries=4, requests=3, steps=steps),
        Case("blocks of 2", topk=16, block=2, steps=steps),
        Case("blocks of 64", topk=8, block=64, page=128, steps=steps),
        Case("int8 rows of 656", dtype="int8", kv_dim=656, rope_dim=0, steps=steps),
        Case("K 2048, 512 + 64", topk=2048, page=128, longest=16384, kv_dim=512, rope_dim=64, steps=real),
        Case(
            "K 2048, 512 + 64, two queries",
            requests=1,
            queries=2,
            topk=2048,
            page=128,
            longest=8192,
            kv_dim=512,
            rope_dim=64,
            steps=real,
        ),
    )


class Session:
    """Requests that decode in step, with their pool and selection cache on the host.

    Attributes:
        case: the shape.
        arguments: of the next call, by the operator's names; caches belong to whoever applies the call.
    """

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self._random = np.random.default_rng(seed)
        pages = -(-case.longest // case.page)
        slots = -(-case.topk * case.block // case.page)
        rows = case.requests * case.queries
        self._lengths = self._random.integers(1, max(2, case.longest * 3 // 4), case.requests)
        self._last: list[Array] = [np.empty(0, np.int64)] * rows
        self.arguments: dict[str, Array] = {
            "selection_k_rope": self._rows(rows * slots, case.rope_dim),
            "selection_kv_cache": self._rows(rows * slots, case.kv_dim),
            "selection_kv_block_table": self._permutation(rows, slots),
            "selection_kv_block_status": np.full((case.requests, case.queries, 1, case.topk + 1), -1, np.int32),
            "selection_topk_indices": np.full((case.requests, case.queries, 1, case.topk), -1, np.int32),
            "full_k_rope": self._rows(case.requests * pages, case.rope_dim),
            "full_kv_cache": self._rows(case.requests * pages, case.kv_dim),
            "full_kv_block_table": self._permutation(case.requests, pages),
            "full_kv_actual_seq": np.zeros(case.requests, np.int32),
            "full_q_actual_seq": np.full(case.requests, case.queries, np.int32),
        }

    def _rows(self, pages: int, wide: int) -> Array:
        if not wide:
            return np.empty(0, self.case.element)
        return self._noise((pages, self.case.page, wide))

    def _noise(self, shape: tuple[int, ...]) -> Array:
        return self._random.integers(-128, 128, shape, np.int8).astype(self.case.element)

    def _permutation(self, rows: int, pages: int) -> Array:
        return self._random.permutation(rows * pages).astype(np.int32).reshape(rows, pages)

    def step(self) -> tuple[str, ...]:
        """Go one decode step further; return the names of the arguments that changed on the host."""
        case, lengths = self.case, self.arguments["full_kv_actual_seq"]
        for request in range(case.requests):
            accepted = int(self._random.integers(0, case.queries + 1)) if case.queries > 1 else 1
            if self._random.random() < _REPLACED or self._lengths[request] + case.queries >= case.longest:
                self._replace(request)
            self._lengths[request] += accepted
            lengths[request] = min(self._lengths[request] + case.queries, case.longest)
            self._write(request, int(lengths[request]) - case.queries, int(lengths[request]))
        ids = self.arguments["selection_topk_indices"].reshape(-1, case.topk)
        for row in range(len(ids)):
            ids[row] = self._select(row)
        return tuple(name for name in self.arguments if not name.startswith("selection_k") or name.endswith("status"))

    def _replace(self, request: int) -> None:
        case = self.case
        self._lengths[request] = self._random.integers(1, max(2, case.longest // 2))
        self._write(request, 0, int(self._lengths[request]))
        self.arguments["selection_kv_block_status"][request] = -1
        for query in range(case.queries):
            self._last[request * case.queries + query] = np.empty(0, np.int64)

    def _write(self, request: int, first: int, end: int) -> None:
        at = np.arange(max(first, 0), end)
        pages = self.arguments["full_kv_block_table"][request, at // self.case.page]
        for name in ("full_kv_cache", "full_k_rope"):
            cache = self.arguments[name]
            if cache.size:
                cache[pages, at % self.case.page] = self._noise((len(at), cache.shape[2]))

    def _select(self, row: int) -> Array:
        case = self.case
        request, query = divmod(row, case.queries)
        seen = int(self.arguments["full_kv_actual_seq"][request]) - (case.queries - 1 - query)
        existing = -(-seen // case.block) if seen > 0 else 0
        count = min(existing, case.topk)
        if self._random.random() < _FEW:
            count = int(self._random.integers(0, count + 1))
        kept = self._last[row][self._last[row] < existing]
        kept = self._random.permutation(kept)[: int(_REPEATED * count)]
        fresh = self._random.permutation(np.setdiff1d(np.arange(existing), kept))[: count - len(kept)]
        chosen = self._random.permutation(np.concatenate([kept, fresh]))
        self._last[row] = chosen
        ids = np.full(case.topk, -1, np.int32)
        ids[: len(chosen)] = chosen
        if self._random.random() < _HOLES:
            ids[self._random.random(case.topk) < 0.1] = -1
        return ids


class MissCase(msgspec.Struct, frozen=True):
    """One call of GatherMissRows.

    Attributes:
        name: what reports call it.
        dtype: of the caches.
        lists, most: R lists of at most M rows.
        page, pages: of the pool; the arena has as many rows as the lists together, in pages of 128.
        kv_dim, rope_dim: elements of a row; rope 0: none.
    """

    name: str
    dtype: str = "bfloat16"
    lists: int = 4
    most: int = 128
    page: int = 128
    pages: int = 32
    kv_dim: int = 512
    rope_dim: int = 64

    @property
    def element(self) -> npt.DTypeLike:
        """Integer of an element's width."""
        return np.int8 if self.dtype == "int8" else np.int16


def miss_cases(quick: bool = False) -> tuple[MissCase, ...]:
    """Return the shapes that are tried: a batch of one, several lists, quantised rows, the real geometry."""
    return (
        MissCase("one list", lists=1),
        MissCase("four lists, float16", dtype="float16"),
        MissCase("int8 rows of 656", dtype="int8", kv_dim=656, rope_dim=0),
        MissCase("2048 misses each", lists=1 if quick else 8, most=2048, pages=128),
    )


def miss_arguments(case: MissCase, seed: int) -> dict[str, Array]:
    """Return the operator's seven arrays in its order: lists of unequal length, some rows and slots to be skipped."""
    random = np.random.default_rng(seed)
    slots = case.lists * case.most
    blocks = -(-slots // 128)

    def rows(pages: int, page: int, wide: int) -> Array:
        if not wide:
            return np.empty(0, case.element)
        return random.integers(-128, 128, (pages, page, wide), np.int8).astype(case.element)

    shape = (case.lists, case.most)
    miss_rows = random.integers(0, case.pages * case.page, shape, np.int32)
    miss_slots = random.permutation(blocks * 128)[:slots].astype(np.int32).reshape(shape)
    miss_rows[random.random(shape) < 0.02] = -1
    miss_slots[random.random(shape) < 0.02] = -1
    count = random.integers(0, case.most + 1, case.lists, np.int32)
    count[0] = case.most
    return {
        "selection_k_rope": rows(blocks, 128, case.rope_dim),
        "selection_kv_cache": rows(blocks, 128, case.kv_dim),
        "full_k_rope": rows(case.pages, case.page, case.rope_dim),
        "full_kv_cache": rows(case.pages, case.page, case.kv_dim),
        "miss_rows": miss_rows,
        "miss_slots": miss_slots,
        "miss_count": count,
    }


def apply_misses(arguments: dict[str, Array]) -> int:
    """Do on the host what GatherMissRows has to do, in plain numpy, and return how many rows it moves."""
    rows, slots, count = (arguments[name] for name in ("miss_rows", "miss_slots", "miss_count"))
    wanted = (np.arange(rows.shape[1]) < count[:, None]) & (rows >= 0) & (slots >= 0)
    for selection, full in (("selection_k_rope", "full_k_rope"), ("selection_kv_cache", "full_kv_cache")):
        to, source = arguments[selection], arguments[full]
        if to.size:
            to.reshape(-1, to.shape[2])[slots[wanted]] = source.reshape(-1, source.shape[2])[rows[wanted]]
    return int(wanted.sum())
