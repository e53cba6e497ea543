# SPDX-License-Identifier: Apache-2.0
"""Pools too small for all requests at once: preemption on either side, no deadlock, equal answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.checks import assert_at_rest, assert_equal, reference_answers
from tests.e2e.conftest import Deploy
from tidal_connector.cli.demo.client import ask_many
from tidal_connector.cli.demo.prompts import make_prompts
from tidal_connector.cluster.stack import Stack, read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(600)]

MODEL_LEN = 512
LENGTHS = (180, 33, 250, 64, 199, 120, 300, 161, 17, 222)
NEW_TOKENS = 64
BLOCKS = 48  # of 16 tokens: two or three requests of these lengths


@pytest.fixture(scope="module")
def stack(deploy: Deploy) -> Iterator[Stack]:
    with deploy(
        max_model_len=MODEL_LEN,
        max_num_batched_tokens=64,
        prefill_args=("--num-gpu-blocks-override", str(BLOCKS)),
        decode_args=("--num-gpu-blocks-override", str(BLOCKS)),
    ) as running:
        yield running


def test_fr_37_more_requests_than_the_pools_hold(stack: Stack) -> None:
    prompts = make_prompts(LENGTHS, 17, shared_prefix=False)
    reference = reference_answers(stack, prompts, NEW_TOKENS)
    assert_equal(ask_many(stack.proxy.url, prompts, NEW_TOKENS, len(prompts)), reference, LENGTHS)
    preempted = read_metrics(stack.decode, "vllm:num_preemptions_total")["vllm:num_preemptions_total"]
    assert preempted > 0, "the pool was large enough for all: the test tests nothing"
    assert_at_rest(stack)
