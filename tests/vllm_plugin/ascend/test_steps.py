# SPDX-License-Identifier: Apache-2.0
"""Which passes are served from the selection cache, and what it is told of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tidal_connector.vllm_plugin.ascend.selection import EngineSelection


class Cache:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.seats = SimpleNamespace(seated=lambda: ["a"])

    def begin(self, requests: Any, queries: Any, *, padded_requests: int, most_queries: int) -> None:
        self.told.append(("begin", list(requests), list(queries), padded_requests, most_queries))

    def release(self, request: str) -> None:
        self.told.append(("release", request))

    def elsewhere(self, request: str, start: int) -> None:
        self.told.append(("elsewhere", request, start))

    def leads(self, layer: int) -> bool:
        return layer == 0


@pytest.fixture
def cache() -> Cache:
    return Cache()


def engine(cache: Cache, queries: int = 1) -> EngineSelection:
    made: Any = EngineSelection
    selection: EngineSelection = made(cache, queries)
    return selection


def test_a_pass_that_only_decodes_is_served_from_the_cache(cache: Cache) -> None:
    selection = engine(cache)
    selection.arm(["a", "b"], [1, 1], [40, 7], 4)
    assert selection.seated
    assert selection.requests == 1
    assert cache.told == [("begin", ["a", "b"], [1, 1], 4, 1)]


def test_a_mixed_pass_runs_on_the_pool_and_seats_learn_where_their_knowledge_ends(cache: Cache) -> None:
    selection = engine(cache)
    selection.arm(["a", "b"], [1, 90], [40, 0], 2)
    assert not selection.seated
    assert cache.told == [("elsewhere", "a", 40), ("elsewhere", "b", 0)]


def test_drafts_that_may_be_rejected_lower_that_place(cache: Cache) -> None:
    selection = engine(cache, queries=4)
    selection.arm(["a", "b"], [4, 5], [40, 2], 2)
    assert not selection.seated
    assert cache.told == [("elsewhere", "a", 37), ("elsewhere", "b", 0)]
    cache.told.clear()
    selection.arm(["a", "b"], [4, 1], [44, 7], 2)
    assert selection.seated
    assert cache.told == [("begin", ["a", "b"], [4, 1], 2, 4)]


def test_requests_that_ended_or_lost_their_pages_leave_their_seats_first(cache: Cache) -> None:
    output: Any = SimpleNamespace(
        finished_req_ids={"gone"},
        preempted_req_ids=None,
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={"back"}),
    )
    selection = engine(cache)
    selection.begin(output)
    output.preempted_req_ids = {"out"}
    selection.begin(output)
    assert cache.told == [("release", name) for name in ("gone", "back", "gone", "out", "back")]


def test_a_dummy_pass_seats_nobody_and_a_prefill_warm_up_runs_on_the_pool(cache: Cache) -> None:
    selection = engine(cache, queries=2)
    selection.idle(8, 2)
    assert selection.seated
    selection.idle(1, 512)
    assert not selection.seated
    assert cache.told == [("begin", [], [], 8, 2)]


def test_a_layer_asks_its_engine_whether_the_pass_is_served(cache: Cache) -> None:
    selection = engine(cache)
    leader, follower = selection.layer(0), selection.layer(1)
    assert (leader.leads, follower.leads) == (True, False)
    assert not leader.seated
    selection.arm(["a"], [1], [40], 1)
    assert follower.seated
