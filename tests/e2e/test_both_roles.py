# SPDX-License-Identifier: Apache-2.0
"""Two engines of role kv_both prefill for one another: out of the pool into device memory, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.checks import NEW_TOKENS, assert_at_rest, assert_equal, reference_answers
from tests.e2e.conftest import Deploy
from tidal_connector.cli.demo.client import ask, ask_many
from tidal_connector.cli.demo.compare import Generated
from tidal_connector.cli.demo.prompts import make_prompts
from tidal_connector.cluster.stack import DECODE_ENGINE, Stack, read_metrics
from tidal_connector.ids import new_transfer_id
from tidal_connector.vllm_plugin.params import decode_params, prefill_params

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(400)]

LENGTHS = (1, 16, 17, 65, 300)


@pytest.fixture(scope="module")
def stack(deploy: Deploy) -> Iterator[Stack]:
    with deploy(both_roles=True, max_num_batched_tokens=64, max_model_len=1024) as running:
        yield running


def backwards(stack: Stack, prompt: list[int]) -> Generated:
    """Let the engine with the pool prefill, and the other one decode."""
    transfer = new_transfer_id()
    sends = prefill_params(transfer)
    takes = decode_params(transfer, DECODE_ENGINE, stack.decode_control)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, stack.decode.url, prompt, 1, kv_transfer_params=sends)
        answer = ask(stack.prefill.url, prompt, NEW_TOKENS, kv_transfer_params=takes)
        first.result()
    return answer


def test_kv_goes_both_ways(stack: Stack) -> None:
    prompts = make_prompts(LENGTHS, 91, shared_prefix=False)
    reference = reference_answers(stack, prompts)
    assert_equal(ask_many(stack.proxy.url, prompts, NEW_TOKENS, 4), reference, LENGTHS)
    assert_equal([backwards(stack, prompt) for prompt in prompts], reference, LENGTHS)
    pushed = [read_metrics(server)["tidal:bytes_pushed_total"] for server in (stack.prefill, stack.decode)]
    assert pushed[0] == pushed[1] > 0
    assert_at_rest(stack)


def test_each_serves_alone(stack: Stack) -> None:
    prompts = make_prompts(LENGTHS, 92, shared_prefix=False)
    reference = reference_answers(stack, prompts)
    for server in (stack.prefill, stack.decode):
        assert_equal(ask_many(server.url, prompts, NEW_TOKENS, 4), reference, LENGTHS)
