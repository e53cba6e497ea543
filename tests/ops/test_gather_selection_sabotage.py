# SPDX-License-Identifier: Apache-2.0
"""The judge of gather_selection_kv_cache sees each fault that an implementation could have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.ops.selection_world import Array, Mood, Sizes, World, judge
from tidal_connector.ops import Implementation, gather_selection_kv_cache, gather_selection_reference

GROW, FEW = Mood.GROW, Mood.FEW
MOODS = [GROW, GROW, FEW, GROW, Mood.REJECT, Mood.REPEAT, FEW, GROW, Mood.REPLACE, GROW, Mood.REJECT, FEW]
KINDS = {
    "tokens": Sizes(requests=2, queries=3, topk=40, longest=96),
    "blocks": Sizes(requests=2, queries=3, topk=6, block=4, longest=96, selection_page=2),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def run(kind: str, spoil: Callable[[World, dict[str, Array], Array], None] | None = None) -> None:
    """Run two histories with the reference; ``spoil`` undoes a part of each call before it is judged."""
    for seed in (11, 12):
        story(World(KINDS[kind], seed), spoil)


def story(world: World, spoil: Callable[[World, dict[str, Array], Array], None] | None) -> None:
    for mood in MOODS * 2:
        world.advance(mood)
        before = world.copy()
        actual = world.call(gather_selection_kv_cache, implementation=Implementation.REFERENCE)
        if spoil is not None:
            spoil(world, before, actual)
        judge(world, before, actual)


def place(world: World, row: int, slot: int) -> tuple[int, int]:
    """Return page and token of the first token of a slot."""
    page, offset = divmod(slot * world.sizes.block, world.sizes.selection_page_tokens)
    return world.arguments["selection_kv_block_table"][row, page], offset


def fetched_slot(world: World, before: dict[str, Array]) -> tuple[int, int] | None:
    """Return row and slot of an id that was not in the row before."""
    old = before["selection_kv_block_status"].reshape(world.sizes.rows, -1)
    for row in range(world.sizes.rows):
        for slot in range(len(world.valid(row))):
            if world.status[row, slot] not in old[row, :-1]:
                return row, slot
    return None


def flip_a_bit(world: World, before: dict[str, Array], actual: Array) -> None:
    world.arguments["selection_kv_cache"][place(world, 1, 0)][0] ^= 1


def flip_a_bit_of_rope(world: World, before: dict[str, Array], actual: Array) -> None:
    world.arguments["selection_k_rope"][place(world, 1, 0)][0] ^= 1


def skip_a_miss(world: World, before: dict[str, Array], actual: Array) -> None:
    if found := fetched_slot(world, before):
        there = place(world, *found)
        world.arguments["selection_kv_cache"][there] = before["selection_kv_cache"][there]


def write_beside(world: World, before: dict[str, Array], actual: Array) -> None:
    """A page that belongs to no row."""
    free = set(range(len(before["selection_kv_cache"]))) - set(before["selection_kv_block_table"].flat)
    world.arguments["selection_kv_cache"][free.pop(), 0, 0] ^= 1


def name_another_id(world: World, before: dict[str, Array], actual: Array) -> None:
    world.status[0, 0] += 1


def exchange_two_ids(world: World, before: dict[str, Array], actual: Array) -> None:
    world.status[0, [0, 1]] = world.status[0, [1, 0]]


def count_one_more(world: World, before: dict[str, Array], actual: Array) -> None:
    actual[0] += 1


def write_the_pool(world: World, before: dict[str, Array], actual: Array) -> None:
    world.arguments["full_kv_cache"][0, 0, 0] ^= 1


def read_one_more(world: World, before: dict[str, Array], actual: Array) -> None:
    world.traffic.fetched_bytes += world.sizes.row_bytes


SPOILS = [
    flip_a_bit,
    flip_a_bit_of_rope,
    skip_a_miss,
    write_beside,
    name_another_id,
    exchange_two_ids,
    count_one_more,
    write_the_pool,
    read_one_more,
]


@kinds
def test_an_honest_history_passes(kind: str) -> None:
    run(kind)


@kinds
@pytest.mark.parametrize("spoil", SPOILS)
def test_a_spoiled_result_is_seen(kind: str, spoil: Any) -> None:
    with pytest.raises(AssertionError):
        run(kind, spoil)


def always_trusts(rule: Any, x: int, slot: int) -> bool:
    return True


def never_trusts(rule: Any, x: int, slot: int) -> bool:
    return False


def trusts_drafts(rule: Any, x: int, slot: int) -> bool:
    """The rule of the operator that this one stands for: a draft of the last step counts as written for good."""
    return slot < rule.old // rule.call.block


def trusts_one_token_more(rule: Any, x: int, slot: int) -> bool:
    return (x + 1) * rule.call.block <= rule.stable + 1 and slot < rule.old // rule.call.block


def trusts_a_partial_block(rule: Any, x: int, slot: int) -> bool:
    return (x + 1) * rule.call.block <= rule.stable


@kinds
@pytest.mark.parametrize("rule", [always_trusts, never_trusts, trusts_drafts, trusts_one_token_more])
def test_a_wrong_rule_of_trust_is_seen(kind: str, rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_selection_reference._Rule, "trusted", rule)
    with pytest.raises(AssertionError):
        run(kind)


@kinds
def test_a_move_from_the_page_of_another_row_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = gather_selection_reference._place

    def of_query(call: Any, row: int, slot: int, tokens: int) -> tuple[int, slice]:
        used = int(np.count_nonzero(call.ids[row] >= 0))  # the histories here have no ids that do not count
        return honest(call, row % call.queries if slot >= used else row, slot, tokens)

    monkeypatch.setattr(gather_selection_reference, "_place", of_query)
    with pytest.raises(AssertionError):
        run(kind)


def test_a_partial_block_of_the_last_call_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_selection_reference._Rule, "trusted", trusts_a_partial_block)
    with pytest.raises(AssertionError):
        run("blocks")


def test_a_partial_block_before_the_last_slot_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_selection_reference, "_largest_last", lambda ids, sources: None)
    with pytest.raises(AssertionError):
        run("blocks")
