# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidal_connector.config import Offload, PoolConfig, SelectionConfig, TidalConfig
from tidal_connector.errors import ConfigError
from tidal_connector.selection.budget import EXTENT_ROWS, ModelCosts, divide_memory

LAYERS, BLOCK = 8, 16
LATENT, INDEX = LAYERS * 1152, LAYERS * 132  # bytes of a token
MODEL = ModelCosts(
    top_k=64,
    queries=1,
    requests=16,
    context=4096,
    block_size=BLOCK,
    latent_block_bytes=LATENT * BLOCK,
    index_block_bytes=INDEX * BLOCK,
    slot_bytes=LATENT,
)
CONFIG = TidalConfig(pool=PoolConfig(bytes=4 << 30))
SEAT = 144  # 2 x 64 slots, one for the row of the step, in whole extents


def model(**changed: int) -> ModelCosts:
    return ModelCosts(**{name: getattr(MODEL, name) for name in ModelCosts.__slots__} | changed)


def config(**changed: Any) -> TidalConfig:
    return msgspec.structs.replace(CONFIG, **changed)


def test_every_request_gets_a_seat_where_half_of_the_budget_allows() -> None:
    plan = divide_memory(CONFIG, MODEL, 100 << 20)
    assert (plan.slots, plan.base_rows, plan.most_rows) == (128, SEAT, SEAT)
    assert plan.arena_rows == 16 * SEAT
    assert plan.blocks.blocks == ((100 << 20) - 16 * SEAT * LATENT) // (INDEX * BLOCK)


def test_the_selection_cache_takes_half_of_a_small_budget() -> None:
    budget = 16 * SEAT * LATENT
    plan = divide_memory(CONFIG, MODEL, budget)
    assert budget // 2 - EXTENT_ROWS * LATENT < plan.arena_bytes <= budget // 2
    assert plan.index_bytes <= budget - plan.arena_bytes


def test_requests_of_two_thousand_tokens_reach_the_bound_of_the_layout() -> None:
    """(1,284 x context) / (1,152 x slots + 132 x context) = 6.3 for contexts of 2,048 tokens and 128 slots."""
    context, budget = 2048, 20 * 2048 * (LATENT + INDEX)
    bound = budget / (LATENT * 128 + INDEX * context)
    plan = divide_memory(CONFIG, model(requests=int(bound)), budget)
    assert 0.9 * bound <= plan.concurrent(context) <= bound
    assert 5.6 < plan.concurrent(context) / 20 <= 6.3


def test_adaptive_takes_what_index_keys_leave() -> None:
    budget = 200 << 20
    small_pool = config(offload=Offload.ADAPTIVE, pool=PoolConfig(bytes=512 * LATENT * BLOCK))
    plan = divide_memory(small_pool, MODEL, budget)
    assert plan.blocks.blocks == 512
    assert plan.most_rows == 4096
    assert budget - plan.index_bytes - plan.arena_bytes < EXTENT_ROWS * LATENT
    enough = divide_memory(small_pool, MODEL, 10 << 30)
    assert enough.arena_rows == MODEL.requests * 4096  # no more than all requests could ever hold


def test_a_share_that_was_set_is_kept() -> None:
    plan = divide_memory(config(selection=SelectionConfig(slots=64, bytes=f"{3 * 80 * LATENT}B")), MODEL, 100 << 20)
    assert (plan.slots, plan.base_rows, plan.arena_rows) == (64, 80, 240)
    assert plan.concurrent(4096) == 3


@pytest.mark.parametrize(("slots", "queries", "rows"), [(128, 1, 144), (64, 2, 144), (128, 3, 208), (256, 3, 272)])
def test_a_seat_holds_what_a_step_with_draft_tokens_selects(slots: int, queries: int, rows: int) -> None:
    plan = divide_memory(config(selection=SelectionConfig(slots=slots)), model(queries=queries), 100 << 20)
    assert plan.base_rows == rows >= queries * (MODEL.top_k + 1)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (SelectionConfig(slots=63), "selection.slots = 63: expected at least the model's index_topk, 64"),
        (SelectionConfig(bytes=1000), "selection.bytes = 1000: expected at least the 1327104 bytes that one request"),
        (SelectionConfig(bytes="100MiB"), "selection.bytes = 104857600: the device's KV budget is 104857600 bytes"),
    ],
)
def test_settings_that_cannot_be_are_refused(selection: SelectionConfig, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        divide_memory(config(selection=selection), MODEL, 100 << 20)
    assert message in str(error.value)


@given(
    budget=st.integers(1 << 18, 1 << 34),
    requests=st.integers(1, 300),
    context=st.integers(1, 1 << 20),
    top_k=st.sampled_from([16, 64, 2048]),
    queries=st.integers(1, 3),
    adaptive=st.booleans(),
)
def test_the_device_never_holds_more_than_its_budget(
    budget: int, requests: int, context: int, top_k: int, queries: int, adaptive: bool
) -> None:
    chosen = config(offload=Offload.ADAPTIVE if adaptive else Offload.ON)
    costs = model(requests=requests, context=context, top_k=top_k, queries=queries)
    plan = divide_memory(chosen, costs, budget)
    assert plan.index_bytes + plan.arena_bytes <= budget
    assert plan.blocks.blocks >= 1
    assert plan.arena_rows % EXTENT_ROWS == plan.base_rows % EXTENT_ROWS == 0
    assert plan.arena_rows <= requests * plan.most_rows
    assert plan.concurrent(context) <= requests
