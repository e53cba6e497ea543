# SPDX-License-Identifier: Apache-2.0
"""One engine with its latents in the host pool and no peer gives the plain engine's tokens and log-probabilities.

The cases and what they cover are in ``single_instance_matrix``, the requests in ``single_instance_batches``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import LOGPROB_BOUND
from tests.e2e.single_instance_matrix import CASES, Runs
from tidal_connector.cli.demo.compare import compare

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(900)]  # a case may wait for those before it


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, models: Callable[..., Path]) -> Iterator[Runs]:
    """Start every case that some test of this module was chosen for."""
    chosen = [item for item in request.session.items if item.path == request.path and "case" in item.callspec.params]
    with Runs(models) as started:
        started.start(dict.fromkeys(item.callspec.params["case"] for item in chosen))
        yield started


@pytest.mark.parametrize("case", CASES)
def test_answers_equal_those_of_the_plain_engine(runs: Runs, case: str) -> None:
    reference, report = runs.report(CASES[case].arch), runs.report(case)
    wrong = []
    for name, batch in report.batches.items():
        expected = reference.batches[name].answers
        assert batch.answers.keys() == expected.keys()
        for ask, answer in batch.answers.items():
            found = compare(answer, expected[ask])
            if not found.tokens_equal or found.logprob > LOGPROB_BOUND:
                wrong.append(f"{name} {ask}: equal {found.tokens_equal}, logprobs differ by {found.logprob:.2g}")
    assert wrong == []
    preemptions = sum(batch.preemptions for batch in report.batches.values())
    assert (preemptions > 0) == bool(CASES[case].blocks), "blocks are as tight as the case says"
