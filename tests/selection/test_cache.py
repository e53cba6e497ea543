# SPDX-License-Identifier: Apache-2.0
"""The selection cache against a model of it: whatever happened before, a slot table names the right rows.

Every row carries a stamp (layer, request, position, how often it was written). The pool and the arena hold stamps, so
that a wrong slot, a stale row or a skipped miss shows as a wrong stamp.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tidal_connector import ops
from tidal_connector.metrics import Counters
from tidal_connector.selection.cache import DecodeBatch, SelectionCache
from tidal_connector.selection.groups import index_groups
from tidal_connector.selection.seats import NO_SEAT

LAYERS, LEADERS = [0, 1, 2, 3, 4], {0, 3}
PAGE, PAGES, WIDTH, TOP_K = 4, 60, 16, 8
EXTENT, BASE = 4, 12


class World:
    """Requests that decode, their pages, and what every row has to be."""

    def __init__(self, prefetch: bool, threads: int, extents: int = 12, most: int = BASE) -> None:
        self.rng = np.random.default_rng(7)
        self.counters = Counters()
        self.pools = [np.zeros((PAGES * PAGE, WIDTH), np.uint8) for _ in LAYERS]
        self.arena = np.zeros((len(LAYERS), extents * EXTENT, WIDTH), np.uint8)
        self.stream = ops.CopyStream(threads=threads)
        self.cache = SelectionCache(
            arena=self.arena,
            pools=self.pools,
            groups=index_groups(LAYERS, LEADERS),
            extent_rows=EXTENT,
            requests=4,
            top_k=TOP_K,
            base_rows=BASE,
            most_rows=most,
            eager_rows=BASE - 1,
            page_tokens=PAGE,
            stream=self.stream,
            counters=self.counters,
            prefetch=prefetch,
        )
        self.free = list(range(PAGES))
        self.pages: dict[str, list[int]] = {}
        self.rows: dict[str, list[np.ndarray]] = {}  # by request and position, [layers, WIDTH]

    def join(self, request: str, length: int) -> None:
        self.pages[request], self.rows[request] = [], []
        for _ in range(length):
            self.append(request)
            self.write_back(request, len(self.rows[request]) - 1)

    def append(self, request: str) -> None:
        at = len(self.rows[request])
        if at == len(self.pages[request]) * PAGE:
            self.pages[request].append(self.free.pop())
        self.rows[request].append(self.rng.integers(0, 256, (len(LAYERS), WIDTH), np.uint8))

    def write_back(self, request: str, position: int) -> None:
        row = self.pages[request][position // PAGE] * PAGE + position % PAGE
        for layer in LAYERS:
            self.pools[layer][row] = self.rows[request][position][layer]

    def leave(self, request: str) -> None:
        self.cache.book.release(request)
        self.free.extend(self.pages.pop(request))
        del self.rows[request]

    def step(self, requests: list[str]) -> int:
        """Decode one token of each; return how many found a seat."""
        for request in requests:
            self.append(request)
        seats = {request: self.cache.book.hold(request, len(self.rows[request]), 1) for request in requests}
        seated = [request for request in requests if seats[request] != NO_SEAT]
        if seated:
            self.decode(seated, [seats[request] for request in seated])
        for request in requests:
            self.write_back(request, len(self.rows[request]) - 1)
        self.cache.check()
        return len(seated)

    def decode(self, requests: list[str], seats: list[int]) -> None:
        count = len(requests)
        width = max(len(self.pages[request]) for request in requests)
        batch = DecodeBatch(
            requests=tuple(requests),
            query_start=np.arange(count + 1, dtype=np.int32),
            seat=np.asarray(seats, np.int32),
            start=np.asarray([len(self.rows[request]) - 1 for request in requests], np.int32),
            pages=np.asarray(
                [self.pages[request] + [0] * (width - len(self.pages[request])) for request in requests], np.int32
            ),
        )
        selected = np.full((count, TOP_K), -1, np.int32)
        for layer in LAYERS:
            if self.cache.leads(layer):
                for i, request in enumerate(requests):
                    length = len(self.rows[request])
                    chosen = self.rng.permutation(length)[: int(self.rng.integers(1, TOP_K + 1))]
                    selected[i] = -1
                    selected[i, : len(chosen)] = chosen
                resolved = self.cache.plan(layer, batch, selected)
            for i, request in enumerate(requests):
                self.cache.rows(layer)[resolved.written[i]] = self.rows[request][-1][layer]
            self.cache.arrive(layer, batch)
            self.compare(layer, requests, selected, resolved)

    def compare(self, layer: int, requests: list[str], selected: np.ndarray, resolved: ops.Resolved) -> None:
        for i, request in enumerate(requests):
            for position, slot in zip(selected[i].tolist(), resolved.slots[i].tolist(), strict=True):
                assert (position < 0) == (slot < 0)
                if slot >= 0:
                    found, expected = self.cache.rows(layer)[slot], self.rows[request][position][layer]
                    assert (found == expected).all(), f"layer {layer} {request} position {position} slot {slot}"


@pytest.fixture(params=[(True, 1), (True, 0), (False, 1)], ids=["prefetch", "stolen", "in place"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(*request.param)
    yield made
    made.stream.close()


def live_through(world: World, steps: int) -> int:
    """Let requests come and go at random; return how many steps of a request had a seat."""
    served = 0
    for step in range(steps):
        if len(world.rows) < 4 and world.rng.random() < 0.3:
            world.join(f"r{step}", int(world.rng.integers(1, 30)))
        running = [request for request in world.rows if world.rng.random() < 0.9]
        if running:
            served += world.step(running)
        for request in list(world.rows):
            if world.rng.random() < 0.04 or len(world.rows[request]) > 45:
                world.leave(request)
    return served


def test_every_slot_holds_the_selected_row_of_every_layer(world: World) -> None:
    assert live_through(world, 400) > 400
    counted = world.counters.snapshot()
    assert min(counted["selection_hits"], counted["selection_misses"], counted["selection_evictions"]) > 0
    assert counted["rows_gathered"] > counted["selection_misses"]  # each miss is fetched for all layers of its group
    assert (counted["prefetches"] > 0) is world.cache._prefetch


def test_adaptive_seats_change_nothing_but_what_is_fetched() -> None:
    world = World(prefetch=True, threads=1, extents=16, most=48)
    try:
        live_through(world, 300)
        assert world.cache.book.spills > 0
    finally:
        world.stream.close()


def test_a_short_request_is_fetched_once(world: World) -> None:
    world.join("a", 6)
    world.step(["a"])
    fetched = world.counters.snapshot()["rows_gathered"]
    assert fetched == 6 * len(LAYERS)
    for _ in range(4):
        world.step(["a"])
    assert world.counters.snapshot()["rows_gathered"] == fetched


@pytest.mark.parametrize("fault", ["skipped miss", "wrong slot", "stale row", "early follower"])
def test_the_model_notices(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(prefetch=True, threads=0)
    resolve = ops.resolve

    def broken(*args: object, **named: object) -> ops.Resolved:
        found = resolve(*args, **named)  # type: ignore[arg-type]
        if fault == "skipped miss" and len(found.miss_rows):
            found.miss_slots[0] = -1
        if fault == "wrong slot" and (found.slots[0] >= 0).sum() > 1:
            found.slots[0, :2] = found.slots[0, 1::-1].copy()
        if fault == "stale row" and len(found.miss_rows):
            found.miss_rows[0] = (found.miss_rows[0] + 1) % (PAGES * PAGE)
        return found

    if fault == "early follower":
        arrive = world.cache.arrive
        monkeypatch.setattr(
            world.cache, "arrive", lambda layer, batch: arrive(layer, batch) if world.cache.leads(layer) else None
        )
    else:
        monkeypatch.setattr(ops, "resolve", broken)
    try:
        with pytest.raises(AssertionError, match="position"):
            live_through(world, 100)
    finally:
        world.stream.close()
