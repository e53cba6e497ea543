# SPDX-License-Identifier: Apache-2.0
"""Prompts are the same in every run, and share what they are to share."""

from __future__ import annotations

from tidal_connector.cli.demo.prompts import LENGTHS, SHARED_PREFIX, make_prompts


def test_prompts_have_the_lengths_and_depend_on_the_seed_alone() -> None:
    prompts = make_prompts(LENGTHS, 7, shared_prefix=False)
    assert [len(prompt) for prompt in prompts] == list(LENGTHS)
    assert prompts == make_prompts(LENGTHS, 7, shared_prefix=False)
    assert prompts != make_prompts(LENGTHS, 8, shared_prefix=False)
    assert all(0 <= token < 256 for prompt in prompts for token in prompt)


def test_two_prompts_share_a_prefix_where_asked() -> None:
    *_, one, two = make_prompts((5,), 7, shared_prefix=True)
    assert one[:SHARED_PREFIX] == two[:SHARED_PREFIX]
    assert one[SHARED_PREFIX] != two[SHARED_PREFIX]
