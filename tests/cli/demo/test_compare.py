# SPDX-License-Identifier: Apache-2.0
"""The judge of the demo sees what differs and nothing else."""

from __future__ import annotations

import pytest

from tidal_connector.cli.demo.compare import Generated, compare, parse_completion
from tidal_connector.errors import TidalError

ANSWER = {
    "choices": [
        {
            "text": "ab",
            "logprobs": {
                "tokens": ["token_id:97", "token_id:98"],
                "token_logprobs": [-0.25, -0.5],
                "top_logprobs": [{"token_id:97": -0.25, "token_id:3": -2.0}, {"token_id:98": -0.5}],
            },
        }
    ]
}
BASE = parse_completion(ANSWER)


def test_a_completion_is_read() -> None:
    assert Generated((97, 98), (-0.25, -0.5), ({97: -0.25, 3: -2.0}, {98: -0.5})) == BASE


@pytest.mark.parametrize(
    "answer",
    [{}, {"choices": []}, {"choices": [{"logprobs": None}]}, {"choices": [{"logprobs": {"tokens": ["a"]}}]}],
)
def test_an_unreadable_completion_is_an_error(answer: dict[str, object]) -> None:
    with pytest.raises(TidalError, match="no readable logprobs"):
        parse_completion(answer)


def test_equal_answers_have_no_difference() -> None:
    found = compare(BASE, BASE)
    assert (found.tokens_equal, found.logprob) == (True, 0.0)


def test_a_different_token_is_seen() -> None:
    other = Generated((97, 99), BASE.logprobs, BASE.top)
    assert not compare(other, BASE).tokens_equal


def test_a_shorter_answer_is_seen() -> None:
    other = Generated((97,), (-0.25,), BASE.top[:1])
    assert not compare(other, BASE).tokens_equal


def test_the_largest_logprob_difference_is_found_also_among_the_tokens_not_chosen() -> None:
    other = Generated(BASE.tokens, (-0.25, -0.6), ({97: -0.25, 3: -2.3}, {98: -0.6}))
    assert compare(other, BASE).logprob == pytest.approx(0.3)


def test_after_a_different_token_nothing_is_comparable_any_more() -> None:
    other = Generated((5, 98), (-0.2, -9.0), ({97: -0.3, 5: -0.2}, {98: -9.0}))
    assert compare(other, BASE).logprob == pytest.approx(0.05)
