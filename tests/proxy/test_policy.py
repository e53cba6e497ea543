# SPDX-License-Identifier: Apache-2.0
"""Engines are chosen as the policy says, and every claim comes back exactly once."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidal_connector.proxy.policy import (
    Ledger,
    Pair,
    Policy,
    Want,
    choose_pair,
    overload_limit,
    policy_of,
    rendezvous,
)
from tidal_connector.proxy.settings import Affinity, PolicyKind

LEAST = policy_of(PolicyKind.LEAST_TOKENS, Affinity())
TIGHT = Affinity(overload=1.25, spare_tokens=0)
AFFINE = policy_of(PolicyKind.PREFIX_AFFINITY, TIGHT)
NOTHING = Want()
NAMES = [f"e{number}" for number in range(6)]


def every_policy() -> list[Policy]:
    return [policy_of(kind, TIGHT, random.Random(5)) for kind in PolicyKind]


def ledger_of(loads: dict[str, int]) -> Ledger:
    found = Ledger()
    for engine, tokens in loads.items():
        found.claim(engine, tokens)
    return found


def decode(engines: list[str], ledger: Ledger, policy: Policy = LEAST, want: Want = NOTHING, avoid: tuple = ()) -> str:
    pair = choose_pair(policy, (["p"], engines), (Ledger(), ledger), want, ((), avoid))
    assert pair is not None
    return pair[1]


def test_the_least_loaded_engine_is_chosen() -> None:
    assert decode(["a", "b", "c"], ledger_of({"a": 10, "b": 5, "c": 7})) == "b"


def test_among_equals_the_first_is_chosen_then_the_one_whose_turn_is_longest_ago() -> None:
    ledger, turns = Ledger(), []
    for _ in range(6):
        turns.append(engine := decode(["b", "a", "c"], ledger))
        ledger.claim(engine, 5).close()
    assert turns == ["b", "a", "c"] * 2


@pytest.mark.parametrize("policy", every_policy(), ids=lambda policy: type(policy).__name__)
def test_an_engine_that_failed_this_request_is_taken_only_if_there_is_no_other(policy: Policy) -> None:
    for number in range(30):
        want = Want(5, b"%d" % number)
        assert decode(["a", "b"], ledger_of({"b": 1000}), policy, want, ("a",)) == "b"
        assert decode(["a"], Ledger(), policy, want, ("a",)) == "a"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 10_000), st.integers(1, 3))))
def test_claims_add_up_and_return_to_nothing_however_often_they_are_closed(claims: list[tuple[str, int, int]]) -> None:
    ledger = Ledger()
    opened = [(ledger.claim(engine, tokens), closes) for engine, tokens, closes in claims]
    assert sum(ledger.outstanding.values()) == sum(tokens for _, tokens, _ in claims)
    assert sum(map(ledger.requests, "abc")) == len(claims)
    for claim, closes in opened:
        for _ in range(closes):
            claim.close()
    assert ledger.outstanding == {}
    assert [ledger.requests(engine) for engine in "abc"] == [0, 0, 0]


def test_a_pair_needs_both_and_one_that_is_not_barred() -> None:
    for policy in every_policy():
        ledgers, want = (Ledger(), Ledger()), Want(1, b"x")
        assert choose_pair(policy, ([], ["d"]), ledgers, want) is None
        assert choose_pair(policy, (["p"], []), ledgers, want) is None
        assert choose_pair(policy, (["p"], ["d"]), ledgers, want, barred={("p", "d")}) is None


def test_of_the_pairs_that_fit_one_that_failed_is_taken_only_if_there_is_no_other() -> None:
    engines, ledgers = (["a", "b"], ["c", "d"]), (ledger_of({"b": 500}), ledger_of({"d": 500}))
    assert choose_pair(LEAST, engines, ledgers, Want(), (["a"], []), {("b", "c")}) == ("b", "d")
    assert choose_pair(LEAST, engines, ledgers, Want(), (["a"], []), {("b", "c"), ("b", "d")}) == ("a", "c")


some = st.lists(st.sampled_from(NAMES), unique=True, min_size=1)
loads = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 50))
pairs = st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)))
names = st.sets(st.sampled_from(NAMES))


@given(some, some, loads, loads, pairs, names, names, st.integers(0, 100), st.binary(max_size=16))
def test_every_policy_forms_a_pair_that_may_be_formed_wherever_there_is_one(
    prefill: list[str],
    decode_engines: list[str],
    prefill_loads: dict[str, int],
    decode_loads: dict[str, int],
    barred: set[Pair],
    failed: set[str],
    also: set[str],
    tokens: int,
    prefix: bytes,
) -> None:
    possible = {(one, other) for one in prefill for other in decode_engines} - barred
    fewest = min((((one in failed) + (other in also)) for one, other in possible), default=None)
    for policy in every_policy():
        pair = choose_pair(
            policy,
            (prefill, decode_engines),
            (ledger_of(prefill_loads), ledger_of(decode_loads)),
            Want(tokens, prefix),
            (failed, also),
            barred,
        )
        assert (pair is None) == (not possible)
        if pair is not None:
            assert pair in possible
            assert (pair[0] in failed) + (pair[1] in also) == fewest


@given(some, some, loads, loads, names, names, st.binary(max_size=16))
def test_a_bar_elsewhere_changes_no_choice(
    prefill: list[str],
    decode_engines: list[str],
    prefill_loads: dict[str, int],
    decode_loads: dict[str, int],
    failed: set[str],
    also: set[str],
    prefix: bytes,
) -> None:
    engines, ledgers = (prefill, decode_engines), (ledger_of(prefill_loads), ledger_of(decode_loads))
    for policy in (LEAST, AFFINE):
        free = choose_pair(policy, engines, ledgers, Want(7, prefix), (failed, also))
        everything_else = {(one, "x") for one in NAMES} | {("x", other) for other in NAMES}
        assert choose_pair(policy, engines, ledgers, Want(7, prefix), (failed, also), everything_else) == free
        # Barring something that is a candidate takes the slow way; what is left in front must be the same.
        worse = {(one, other) for one in prefill for other in decode_engines} - {free}
        assert choose_pair(policy, engines, ledgers, Want(7, prefix), (failed, also), worse) == free


@given(some, st.binary(max_size=64), st.sampled_from(NAMES))
def test_the_order_of_a_prefix_does_not_depend_on_who_else_is_there(
    engines: list[str], prefix: bytes, gone: str
) -> None:
    whole = rendezvous(prefix, engines)
    assert sorted(whole) == sorted(engines)
    assert rendezvous(prefix, [engine for engine in reversed(engines) if engine != gone]) == [
        engine for engine in whole if engine != gone
    ]


def test_prefixes_spread_evenly_and_only_those_of_a_lost_engine_move() -> None:
    prefixes = [b"%d" % number for number in range(3000)]
    before = {prefix: decode(NAMES, Ledger(), AFFINE, Want(1, prefix)) for prefix in prefixes}
    assert all(400 < count < 600 for count in Counter(before.values()).values())
    left = [engine for engine in NAMES if engine != "e3"]
    after = {prefix: decode(left, Ledger(), AFFINE, Want(1, prefix)) for prefix in prefixes}
    moved = {prefix for prefix in prefixes if before[prefix] != after[prefix]}
    assert moved == {prefix for prefix in prefixes if before[prefix] == "e3"}
    assert len({after[prefix] for prefix in moved}) == len(left)


def test_one_prefix_stays_on_its_engine_until_that_is_overloaded_and_comes_back() -> None:
    ledger, want = Ledger(), Want(100, b"system prompt")
    first = decode(NAMES, ledger, AFFINE, want)
    claims = []
    while (engine := decode(NAMES, ledger, AFFINE, want)) == first:
        claims.append(ledger.claim(first, 100))
        assert len(claims) < 10, "piled up"
    assert engine == rendezvous(want.prefix, NAMES)[1]
    for claim in claims:
        claim.close()
    assert decode(NAMES, ledger, AFFINE, want) == first


@given(st.lists(st.tuples(st.binary(max_size=1), st.integers(1, 500)), max_size=60), st.floats(1, 3))
def test_no_engine_is_piled_up_whatever_comes(requests: list[tuple[bytes, int]], overload: float) -> None:
    settings = Affinity(overload=overload, spare_tokens=0)
    policy, ledger = policy_of(PolicyKind.PREFIX_AFFINITY, settings), Ledger()
    for prefix, tokens in requests:
        limit = overload_limit([ledger.tokens(engine) for engine in NAMES], tokens, settings)
        engine = decode(NAMES, ledger, policy, Want(tokens, prefix))
        assert ledger.tokens(engine) <= limit
        ledger.claim(engine, tokens)


def test_up_to_the_spare_tokens_nothing_counts_as_overloaded() -> None:
    policy, ledger = policy_of(PolicyKind.PREFIX_AFFINITY, Affinity(spare_tokens=1000)), Ledger()
    chosen = []
    for _ in range(12):
        chosen.append(decode(NAMES, ledger, policy, Want(100, b"x")))
        ledger.claim(chosen[-1], 100)
    assert len(set(chosen[:11])) == 1
    assert chosen[11] != chosen[0]


def test_both_roles_follow_the_prefix_and_the_decode_engine_goes_first() -> None:
    want = Want(1, b"shared")
    order = rendezvous(want.prefix, NAMES)
    ledgers = Ledger(), Ledger()
    assert choose_pair(AFFINE, (NAMES, NAMES), ledgers, want) == (order[0], order[0])
    barred = {(order[0], order[0])}
    assert choose_pair(AFFINE, (NAMES, NAMES), ledgers, want, barred=barred) == (order[1], order[0])


def test_random_takes_all_about_equally_often() -> None:
    policy = policy_of(PolicyKind.RANDOM, Affinity(), random.Random(3))
    counts = Counter(decode(["a", "b", "c"], ledger_of({"a": 10_000}), policy) for _ in range(3000))
    assert all(900 < counts[engine] < 1100 for engine in "abc")
