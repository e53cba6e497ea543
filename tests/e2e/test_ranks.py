# SPDX-License-Identifier: Apache-2.0
"""Engines of two tensor-parallel ranks each: P's ranks send a share of the layers, D's ranks share one host pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.checks import NEW_TOKENS, assert_at_rest, assert_equal, reference_answers
from tests.e2e.conftest import Deploy
from tidal_connector.cli.demo.client import ask_many
from tidal_connector.cli.demo.prompts import make_prompts
from tidal_connector.cluster.launch import ServerProcess
from tidal_connector.cluster.stack import Stack, read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(500)]

LENGTHS = (1, 16, 17, 65, 300)
TWO = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")


@pytest.fixture(scope="module")
def stack(deploy: Deploy) -> Iterator[Stack]:
    one_thread = {"OMP_NUM_THREADS": "1"}
    with deploy(
        prefill_args=TWO, decode_args=TWO, max_num_batched_tokens=64, max_model_len=1024, environment=one_thread
    ) as running:
        yield running


def per_token(server: ServerProcess) -> tuple[float, float]:
    """Bytes of a token's latents and index keys over all layers, as an engine with a pool says."""
    said = read_metrics(server)
    index = said["tidal:device_bytes_per_token"]
    return said["tidal:kv_bytes_per_token"] - index, index


def test_two_ranks_before_two_ranks(stack: Stack) -> None:
    prompts = make_prompts(LENGTHS, 93, shared_prefix=False)
    reference = reference_answers(stack, prompts)
    assert_equal(ask_many(stack.proxy.url, prompts, NEW_TOKENS, 4), reference, LENGTHS)
    sent, got = read_metrics(stack.prefill), read_metrics(stack.decode)
    # The last prompt token is computed by decode. Latents are delivered once for both ranks, index keys to each.
    tokens = sum(length - 1 for length in LENGTHS)
    latents, index = per_token(stack.decode)
    assert sent["tidal:bytes_pushed_total"] == got["tidal:bytes_received_total"] == tokens * (latents + 2 * index)
    for name in ("prefill", "decode"):
        log = (stack.settings.logs / f"{name}.log").read_text()
        assert "rank 0 of 2, listens on" in log
        assert "rank 1 of 2, listens on" in log
    assert_at_rest(stack)
