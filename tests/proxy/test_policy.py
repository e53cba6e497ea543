# SPDX-License-Identifier: Apache-2.0
"""Engines are chosen by outstanding tokens, and every claim comes back exactly once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidal_connector.proxy.policy import Ledger, choose_pair


def test_the_least_loaded_engine_is_chosen() -> None:
    ledger = Ledger(["a", "b", "c"])
    ledger.claim("a", 10)
    ledger.claim("b", 5)
    ledger.claim("c", 7)
    assert ledger.choose(0.0) == "b"


def test_among_equals_the_first_configured_is_chosen() -> None:
    assert Ledger(["b", "a"]).choose(0.0) == "b"


def test_an_engine_that_failed_this_request_is_taken_only_if_there_is_no_other() -> None:
    ledger = Ledger(["a", "b"])
    ledger.claim("b", 1000)
    assert ledger.choose(0.0, avoid=["a"]) == "b"
    assert Ledger(["a"]).choose(0.0, avoid=["a"]) == "a"


def test_an_unreachable_engine_is_avoided_until_its_time() -> None:
    ledger = Ledger(["a", "b"])
    ledger.unreachable("a", until=10.0)
    assert ledger.choose(9.9) == "b"
    assert ledger.choose(10.0) == "a"
    ledger.unreachable("a", until=20.0)
    ledger.reached("a")
    assert ledger.choose(10.0) == "a"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 10_000), st.integers(1, 3))))
def test_claims_add_up_and_return_to_zero_however_often_they_are_closed(
    claims: list[tuple[str, int, int]],
) -> None:
    ledger = Ledger(["a", "b", "c"])
    opened = [(ledger.claim(engine, tokens), closes) for engine, tokens, closes in claims]
    assert sum(ledger.outstanding.values()) == sum(tokens for _, tokens, _ in claims)
    for claim, closes in opened:
        for _ in range(closes):
            claim.close()
    assert set(ledger.outstanding.values()) == {0}


def ledgers(prefill: dict[str, int], decode: dict[str, int]) -> tuple[Ledger, Ledger]:
    found = Ledger(list(prefill)), Ledger(list(decode))
    for ledger, loads in zip(found, (prefill, decode), strict=True):
        for engine, tokens in loads.items():
            ledger.claim(engine, tokens)
    return found


def test_a_barred_pair_is_never_formed() -> None:
    pair = ledgers({"a": 0, "b": 5}, {"c": 0, "d": 5})
    assert choose_pair(*pair, 0.0) == ("a", "c")
    assert choose_pair(*pair, 0.0, barred={("a", "c")}) == ("a", "d")
    assert choose_pair(*pair, 0.0, barred={("a", "c"), ("a", "d")}) == ("b", "c")
    assert choose_pair(*pair, 0.0, barred={(p, d) for p in "ab" for d in "cd"}) is None


def test_of_the_pairs_that_fit_one_that_failed_is_taken_only_if_there_is_no_other() -> None:
    pair = ledgers({"a": 0, "b": 500}, {"c": 0, "d": 500})
    assert choose_pair(*pair, 0.0, (["a"], []), {("b", "c")}) == ("b", "d")
    assert choose_pair(*pair, 0.0, (["a"], []), {("b", "c"), ("b", "d")}) == ("a", "c")


loads = st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), min_size=1)


@given(loads, loads, st.sets(st.sampled_from("abc")), st.sets(st.sampled_from("abc")), st.sets(st.sampled_from("abc")))
def test_a_bar_elsewhere_changes_no_choice(
    prefill: dict[str, int], decode: dict[str, int], avoid: set[str], other: set[str], gone: set[str]
) -> None:
    pair = ledgers(prefill, decode)
    for engine in gone & set(prefill):
        pair[0].unreachable(engine, until=10.0)
    free = choose_pair(*pair, 5.0, (avoid, other))
    assert free == (pair[0].choose(5.0, avoid), pair[1].choose(5.0, other))
    assert choose_pair(*pair, 5.0, (avoid, other), {("x", "y")}) == free
