# SPDX-License-Identifier: Apache-2.0
"""A small decoding world for gather_selection_kv_cache, and the judge of its calls.

Requests grow, have drafts rejected, pause and are replaced; the world writes their KV into the full pool and draws the
selections. The judge knows neither the rules of the operator nor its reference: it compares bytes with the pool, and
what had to be fetched with what the world has written since the last call.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tidal_connector.ops import SelectionTraffic

Array = npt.NDArray[Any]
Operator = Callable[..., Array]


@dataclass(frozen=True)
class Sizes:
    requests: int = 2
    queries: int = 1
    topk: int = 8
    block: int = 1
    selection_page: int = 1  # in blocks
    full_page: int = 2  # in blocks
    longest: int = 96  # tokens
    dtype: str = "uint16"
    kv_dim: int = 5
    rope_dim: int | None = 3
    tnd: bool = False

    @property
    def rows(self) -> int:
        return self.requests * self.queries

    @property
    def selection_page_tokens(self) -> int:
        return self.selection_page * self.block

    @property
    def full_page_tokens(self) -> int:
        return self.full_page * self.block

    @property
    def row_bytes(self) -> int:
        return (self.kv_dim + (self.rope_dim or 0)) * np.dtype(self.dtype).itemsize


class Mood(enum.Enum):
    """What the next step is like."""

    GROW = "all drafts accepted"
    REJECT = "some drafts rejected"
    REPEAT = "nothing accepted: the same positions again"
    REPLACE = "another request in the row"
    PAUSE = "a request has no token"
    FEW = "few ids, so that slots have to move"
    NONE = "no valid id"
    HOLES = "-1 between the ids, and ids past the end"
    PERMUTE = "the rows of tables and status change places"


@dataclass
class World:
    sizes: Sizes
    seed: int = 0
    arguments: dict[str, Array] = field(init=False)
    traffic: SelectionTraffic = field(init=False)

    def __post_init__(self) -> None:
        s = self.sizes
        self.rng = np.random.default_rng(self.seed)
        selection_pages = -(-s.topk * s.block // s.selection_page_tokens) + int(self.rng.integers(0, 2))
        full_pages = -(-s.longest // s.full_page_tokens)
        rows = s.rows + int(self.rng.integers(0, 2))
        blocks, full_blocks = rows * selection_pages + 2, s.requests * full_pages + 2
        layout = (s.rows,) if s.tnd else (s.requests, s.queries)
        self.arguments = {
            "selection_k_rope": self._rope(blocks, s.selection_page_tokens),
            "selection_kv_cache": self._noise(blocks, s.selection_page_tokens, s.kv_dim),
            "selection_kv_block_table": self._table(rows, selection_pages, blocks),
            "selection_kv_block_status": np.full((*layout, 1, s.topk + 1), -1, np.int32),
            "selection_topk_indices": np.full((*layout, 1, s.topk), -1, np.int32),
            "full_k_rope": self._rope(full_blocks, s.full_page_tokens),
            "full_kv_cache": self._noise(full_blocks, s.full_page_tokens, s.kv_dim),
            "full_kv_block_table": self._table(s.requests, full_pages, full_blocks),
            "full_kv_actual_seq": np.zeros(s.requests, np.int32),
            "full_q_actual_seq": np.full(s.requests, s.queries, np.int32),
        }
        self.lengths = self.rng.integers(1, s.longest // 2, s.requests)
        # The positions of each row's copies, as they were written: position -> writing.
        self.held: list[dict[int, int]] = [{} for _ in range(s.rows)]
        self.written = np.zeros((s.requests, s.longest), np.int64)
        self.writings = 0

    def _noise(self, *shape: int) -> Array:
        return self.rng.integers(0, np.iinfo(self.sizes.dtype).max, shape, self.sizes.dtype, endpoint=True)

    def _rope(self, blocks: int, tokens: int) -> Array:
        wide = self.sizes.rope_dim
        return np.empty(0, self.sizes.dtype) if wide is None else self._noise(blocks, tokens, wide)

    def _table(self, rows: int, pages: int, blocks: int) -> Array:
        return self.rng.permutation(blocks)[: rows * pages].astype(np.int32).reshape(rows, pages)

    @property
    def status(self) -> Array:
        """``[R, K + 1]``."""
        return self.arguments["selection_kv_block_status"].reshape(self.sizes.rows, -1)

    def caches(self) -> list[tuple[Array, Array]]:
        names = ("kv_cache",) if self.sizes.rope_dim is None else ("kv_cache", "k_rope")
        return [(self.arguments[f"selection_{name}"], self.arguments[f"full_{name}"]) for name in names]

    def advance(self, mood: Mood) -> None:
        """Write the tokens of the next step and draw its selection."""
        s, lengths = self.sizes, self.arguments["full_kv_actual_seq"]
        paused = int(self.rng.integers(s.requests)) if mood is Mood.PAUSE else None
        if mood is Mood.PERMUTE:
            self._permute()
        for request in range(s.requests):
            accepted = {Mood.REPEAT: 0, Mood.REJECT: int(self.rng.integers(1, s.queries + 1))}.get(mood, s.queries)
            full = self.lengths[request] + accepted > s.longest
            if request == paused:
                lengths[request] = self.rng.integers(-2, 1)
                continue
            if full or (mood is Mood.REPLACE and request == 0):
                self._replace(request)
            else:
                self.lengths[request] += accepted
            lengths[request] = self.lengths[request]
            self._write(request, int(self.lengths[request]) - s.queries, int(self.lengths[request]))
        ids = self.arguments["selection_topk_indices"].reshape(s.rows, s.topk)
        for row in range(s.rows):
            ids[row] = self._selection(row, mood)

    def _write(self, request: int, first: int, end: int) -> None:
        s = self.sizes
        self.writings += 1
        for position in range(max(first, 0), end):
            self.written[request, position] = self.writings
            page, offset = divmod(position, s.full_page_tokens)
            for _, full in self.caches():
                full[self.arguments["full_kv_block_table"][request, page], offset] = self._noise(full.shape[2])

    def _replace(self, request: int) -> None:
        s = self.sizes
        self.lengths[request] = self.rng.integers(1, s.longest // 2)
        self._write(request, 0, s.longest)
        for row in range(request * s.queries, (request + 1) * s.queries):
            self.status[row] = -1
            self.held[row] = {}

    def _permute(self) -> None:
        """Give the copies of one request to another row, as a batch that is sorted anew does."""
        s = self.sizes
        order = self.rng.permutation(s.requests)
        rows = (order[:, None] * s.queries + np.arange(s.queries)).reshape(-1)
        self.status[:] = self.status[rows]
        table = self.arguments["selection_kv_block_table"]
        table[: s.rows] = table[rows]
        full_table = self.arguments["full_kv_block_table"]
        full_table[:] = full_table[order]
        self.lengths, self.written = self.lengths[order], self.written[order]
        self.held = [self.held[row] for row in rows]

    def length(self, row: int) -> int:
        """Return the tokens that a row sees."""
        request, query = divmod(row, self.sizes.queries)
        return int(self.arguments["full_kv_actual_seq"][request]) - (self.sizes.queries - 1 - query)

    def _selection(self, row: int, mood: Mood) -> Array:
        s = self.sizes
        ids = np.full(s.topk, -1)
        existing = max(0, -(-self.length(row) // s.block))
        count = min(existing, s.topk)
        if mood is Mood.FEW:
            count = int(self.rng.integers(0, count + 1))
        if mood is Mood.NONE:
            count = 0
        old = self.rng.permutation([x for x in self.status[row, : s.topk] if 0 <= x < existing])
        new = self.rng.permutation(existing)
        kept = old[: int(len(old) * self.rng.random())]
        newest = [existing - 1] if self.rng.random() < 0.7 else []
        drawn = list(dict.fromkeys([*newest, *kept, *new]))[:count]
        ids[:count] = self.rng.permutation(drawn)
        if mood is Mood.HOLES:
            ids[self.rng.random(s.topk) < 0.2] = -1
            ids[self.rng.random(s.topk) < 0.1] = existing + int(self.rng.choice([0, 1, 2**31 - 1 - existing]))
        return ids

    def valid(self, row: int) -> list[int]:
        """Return the ids of a row that count."""
        s = self.sizes
        ids = self.arguments["selection_topk_indices"].reshape(s.rows, s.topk)[row].tolist()
        if s.topk <= 32:
            ids = ids[: next((at for at, x in enumerate(ids) if x < 0), len(ids))]
        return [x for x in ids if 0 <= x * s.block < self.length(row)]

    def positions(self, row: int, x: int) -> range:
        """Return the tokens of an id that a row sees."""
        return range(x * self.sizes.block, min((x + 1) * self.sizes.block, self.length(row)))

    def call(self, operator: Operator, **more: Any) -> Array:
        """Call the operator on the world's memory."""
        self.traffic = SelectionTraffic()
        return operator(**self.arguments, selection_topk_block_size=self.sizes.block, traffic=self.traffic, **more)

    def copy(self) -> dict[str, Array]:
        return {name: array.copy() for name, array in self.arguments.items()}


def judge(world: World, before: dict[str, Array], actual: Array) -> None:
    """Assert that a call did what it had to; note what the rows hold now."""
    s = world.sizes
    assert actual.dtype == np.int32
    assert actual.shape == world.arguments["selection_kv_block_table"].shape[:1]
    assert not actual[s.rows :].any()
    inputs = set(before) - {"selection_kv_cache", "selection_k_rope", "selection_kv_block_status"}
    for name in inputs:
        assert np.array_equal(before[name], world.arguments[name]), name
    expected = [before["selection_kv_cache"], before["selection_k_rope"]]
    selected = fetched = tokens = 0
    for row in range(s.rows):
        if world.length(row) <= 0:
            assert actual[row] == 0
            assert np.array_equal(world.status[row], before["selection_kv_block_status"].reshape(s.rows, -1)[row])
            continue
        ids = world.valid(row)
        stale = [x for x in ids if not _fresh(world, row, x)]
        selected += len(ids)
        fetched += len(stale)
        tokens += sum(len(world.positions(row, x)) for x in stale)
        _judge_row(world, row, ids, int(actual[row]), expected)
        world.held[row] = {p: int(world.written[row // s.queries, p]) for x in ids for p in world.positions(row, x)}
    # Nothing else was written: neither unused slots, nor other pages.
    assert np.array_equal(world.arguments["selection_kv_cache"], expected[0])
    assert np.array_equal(world.arguments["selection_k_rope"], expected[1])
    traffic = world.traffic
    assert (traffic.hits, traffic.fetched) == (selected - fetched, fetched)
    assert (traffic.fetched_rows, traffic.fetched_bytes) == (tokens, tokens * s.row_bytes)
    assert traffic.moved <= traffic.hits


def _fresh(world: World, row: int, x: int) -> bool:
    """Whether the row held the whole block after its last call, and none of it was written since."""
    whole = range(x * world.sizes.block, (x + 1) * world.sizes.block)
    written = world.written[row // world.sizes.queries]
    return all(p < len(written) and world.held[row].get(p) == written[p] for p in whole)


def _judge_row(world: World, row: int, ids: list[int], actual: int, expected: list[Array]) -> None:
    s, status = world.sizes, world.status[row].tolist()
    assert sorted(status[: len(ids)]) == sorted(ids)
    assert set(status[len(ids) : s.topk]) <= {-1}
    assert status[s.topk] == actual == sum(len(world.positions(row, x)) for x in ids)
    # Attention reads tokens 0 .. actual-1 of the row's pages: only the last of them may be a part of a block.
    assert all(len(world.positions(row, x)) == s.block for x in status[: len(ids)][:-1])
    request = row // s.queries
    for slot, x in enumerate(status[: len(ids)]):
        for at, position in enumerate(world.positions(row, x)):
            page, offset = divmod(slot * s.block + at, s.selection_page_tokens)
            full_page, full_offset = divmod(position, s.full_page_tokens)
            there = (world.arguments["selection_kv_block_table"][row, page], offset)
            origin = (world.arguments["full_kv_block_table"][request, full_page], full_offset)
            for (selection, full), whole in zip(world.caches(), expected, strict=False):
                assert np.array_equal(selection[there], full[origin]), f"row {row} slot {slot} id {x}"
                whole[there] = full[origin]
