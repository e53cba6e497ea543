# SPDX-License-Identifier: Apache-2.0
"""Engines are chosen by outstanding tokens, and every claim comes back exactly once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidal_connector.proxy.policy import Ledger


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
