# SPDX-License-Identifier: Apache-2.0
"""Outputs of prefill and decode on two engines equal those of one plain engine, over architectures and geometries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.checks import NEW_TOKENS, assert_at_rest, assert_equal, reference_answers
from tests.e2e.conftest import Deploy
from tidal_connector.cli.demo.client import ask_many, ask_sabotaged
from tidal_connector.cli.demo.compare import compare
from tidal_connector.cli.demo.expect import row_bytes
from tidal_connector.cli.demo.prompts import LENGTHS, SABOTAGE_LENGTH, SHARED_PREFIX, make_prompts
from tidal_connector.cluster.stack import Stack, read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(600)]

DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "v32-blocks16-chunks2048-cached": {"block_size": 16, "max_num_batched_tokens": 2048, "prefix_caching": True},
    "glm-blocks128-chunks64-cached": {
        "model": {"arch": "glm"},
        "block_size": 128,
        "max_num_batched_tokens": 64,
        "prefix_caching": True,
        "decode": {"selection": {"slots": 64}},  # top-k: every miss evicts
    },
    "glm-blocks16-chunks2048-adaptive": {
        "model": {"arch": "glm"},
        "block_size": 16,
        "max_num_batched_tokens": 2048,
        "decode": {"offload": "adaptive"},
    },
    "v32-blocks128-chunks64-prefill16": {
        "block_size": 128,
        "prefill_args": ("--block-size", "16"),
        "max_num_batched_tokens": 64,
        "decode": {"selection": {"slots": 256, "prefetch": False}},
    },
}


@pytest.fixture(scope="module", params=list(DEPLOYMENTS))
def stack(request: pytest.FixtureRequest, deploy: Deploy) -> Iterator[Stack]:
    with deploy(**DEPLOYMENTS[request.param]) as running:
        yield running


def test_every_length_alone_and_eight_at_once(stack: Stack) -> None:
    prompts = make_prompts(LENGTHS, 7, shared_prefix=False)
    reference = reference_answers(stack, prompts)
    before = read_metrics(stack.prefill).get("tidal:bytes_pushed_total", 0.0)
    assert_equal(ask_many(stack.proxy.url, prompts, NEW_TOKENS, 1), reference, LENGTHS)
    if not stack.settings.prefix_caching:
        rows = row_bytes(stack.settings.model, stack.settings.dtype)
        expected = sum(rows.prompt(length) for length in LENGTHS)
        assert read_metrics(stack.prefill)["tidal:bytes_pushed_total"] - before == expected
    assert_equal(ask_many(stack.proxy.url, prompts, NEW_TOKENS, 8), reference, LENGTHS)
    decoded = read_metrics(stack.decode)
    assert decoded["tidal:selection_hits_total"] > 0
    assert decoded["tidal:bytes_written_back_total"] > 0
    assert_at_rest(stack)


def test_a_prompt_seen_before_and_a_shared_prefix(stack: Stack) -> None:
    lengths = (33, 129, 640)
    prompts = make_prompts(lengths, 11, shared_prefix=True)
    reference = reference_answers(stack, prompts)
    for _ in range(2):
        answers = ask_many(stack.proxy.url, prompts, NEW_TOKENS, 1)
        assert_equal(answers, reference, (*lengths, SHARED_PREFIX + 20, SHARED_PREFIX + 90))
    assert_at_rest(stack)


@pytest.mark.parametrize("layer", [0, -1])
def test_one_corrupted_pool_row_is_seen(stack: Stack, layer: int) -> None:
    layers = row_bytes(stack.settings.model, stack.settings.dtype).layers
    prompts = make_prompts((SABOTAGE_LENGTH,), 13 + layer, shared_prefix=False)
    (reference,) = reference_answers(stack, prompts)
    found = compare(ask_sabotaged(stack, prompts[0], NEW_TOKENS, layer % layers, SABOTAGE_LENGTH // 2), reference)
    assert found.logprob > 0.02 or not found.tokens_equal
