# SPDX-License-Identifier: Apache-2.0
"""The bfloat16 variant: its rounding alone moves log-probabilities by tenths of a nat, so it has a bound of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.checks import NEW_TOKENS, assert_pages_back, reference_answers
from tests.e2e.conftest import Deploy
from tidal_connector.cli.demo.client import ask_many
from tidal_connector.cli.demo.compare import compare
from tidal_connector.cli.demo.expect import row_bytes
from tidal_connector.cli.demo.prompts import make_prompts
from tidal_connector.cluster.stack import Stack, read_metrics
from tidal_connector.modelmaker.report import tolerance_of

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(400)]

LENGTHS = (1, 16, 17, 65, 129, 300, 700)


@pytest.fixture(scope="module")
def stack(deploy: Deploy) -> Iterator[Stack]:
    with deploy(model={"dtype": "bfloat16"}, max_num_batched_tokens=64, max_model_len=1024) as running:
        yield running


def test_outputs_stay_within_the_noise_that_bfloat16_allows(stack: Stack) -> None:
    prompts = make_prompts(LENGTHS, 7, shared_prefix=False)
    reference = reference_answers(stack, prompts)
    answers = ask_many(stack.proxy.url, prompts, NEW_TOKENS, 4)
    gaps = [compare(one, other).logprob for one, other in zip(answers, reference, strict=True)]
    assert max(gaps) <= tolerance_of("bfloat16").noise
    rows = row_bytes(stack.settings.model, "bfloat16")
    assert read_metrics(stack.prefill)["tidal:bytes_pushed_total"] == sum(rows.prompt(length) for length in LENGTHS)
    assert_pages_back(stack)
