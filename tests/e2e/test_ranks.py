# SPDX-License-Identifier: Apache-2.0
"""A prefill engine of two tensor-parallel ranks, each of which sends its share of the layers to one decode engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.checks import NEW_TOKENS, assert_at_rest, assert_equal, reference_answers
from tests.e2e.conftest import Deploy
from tidal_connector.cli.demo.client import ask_many
from tidal_connector.cli.demo.prompts import make_prompts
from tidal_connector.cluster.stack import Stack, read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(500)]

LENGTHS = (1, 16, 17, 65, 300)


@pytest.fixture(scope="module")
def stack(deploy: Deploy) -> Iterator[Stack]:
    two = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
    with deploy(
        prefill_args=two, max_num_batched_tokens=64, max_model_len=1024, environment={"OMP_NUM_THREADS": "1"}
    ) as running:
        yield running


def test_two_ranks_of_prefill_send_half_each(stack: Stack) -> None:
    prompts = make_prompts(LENGTHS, 93, shared_prefix=False)
    reference = reference_answers(stack, prompts)
    before = read_metrics(stack.decode)
    assert_equal(ask_many(stack.proxy.url, prompts, NEW_TOKENS, 4), reference, LENGTHS)
    sent, got = read_metrics(stack.prefill), read_metrics(stack.decode)
    received = got["tidal:bytes_received_total"] - before["tidal:bytes_received_total"]
    assert sent["tidal:bytes_pushed_total"] == received > 0  # nothing twice, nothing left out
    log = (stack.settings.logs / "prefill.log").read_text()
    assert "rank 0 of 2," in log
    assert "rank 1 of 2," in log
    assert_at_rest(stack)
