# SPDX-License-Identifier: Apache-2.0
"""One engine with its latents in the host pool and no peer gives the plain engine's tokens and log-probabilities.

The cases and what they cover are in ``single_instance_matrix``, the requests in ``single_instance_batches``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import LOGPROB_BOUND
from tests.e2e.single_instance import Batch, Report
from tests.e2e.single_instance_batches import make_batch, once
from tests.e2e.single_instance_matrix import CASES, LAYERS, ROW_BYTES, Runs
from tidal_connector.cli.demo.compare import compare
from tidal_connector.metrics import COUNTERS

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(900)]  # a case may wait for those before it

SETTLED = 4  # tokens; by then a request within its slots has all its rows on the device
GROUPS = {"v32": LAYERS, "glm": 1}


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
        expected = reference.batches[once(name)].answers
        assert batch.answers.keys() == expected.keys()
        for ask, answer in batch.answers.items():
            found = compare(answer, expected[ask])
            if not found.tokens_equal or found.logprob > LOGPROB_BOUND:
                wrong.append(f"{name} {ask}: equal {found.tokens_equal}, logprobs differ by {found.logprob:.2g}")
    assert wrong == []
    preemptions = sum(batch.preemptions for batch in report.batches.values())
    assert (preemptions > 0) == bool(CASES[case].blocks), "blocks are as tight as the case says"


# --- what the cache did, by its counters


def in_all(report: Report, batches: Iterable[str]) -> dict[str, float]:
    """What the counters gained over some batches; a counter that stood still is 0."""
    total = dict.fromkeys(COUNTERS, 0.0)
    for batch in batches:
        for name, value in report.batches[batch].gained.items():
            total[name] += value
    return total


def after_first_decode(batch: Batch) -> dict[str, float]:
    """What the counters gained once every request of a batch had several tokens."""
    counts: dict[str, int] = {}
    total = dict.fromkeys(COUNTERS, 0.0)
    for step in batch.steps:
        if counts.keys() == batch.answers.keys() and min(counts.values()) >= SETTLED:
            for name, value in step.gained.items():
                total[name] += value
        for name in step.tokens:
            counts[name] = counts.get(name, 0) + 1
    return total


@pytest.mark.parametrize("case", CASES)
def test_selection_meets_rows_that_are_there_already(runs: Runs, case: str) -> None:
    report = runs.report(case)
    seen = in_all(report, report.batches)
    for name in ("selection_hits", "selection_misses", "selection_evictions", "bytes_written_back"):
        assert seen[name] > 0, name
    assert seen["selection_invalid"] == 0


@pytest.mark.parametrize("case", [name for name, each in CASES.items() if "short" in each.batches])
def test_a_request_within_its_slots_never_touches_the_pool_again(runs: Runs, case: str) -> None:
    seen = after_first_decode(runs.report(case).batches["short"])
    assert seen["selection_hits"] > 0
    assert (seen["rows_gathered"], seen["selection_misses"], seen["selection_evictions"]) == (0, 0, 0)


@pytest.mark.parametrize("case", ["v32-128-adaptive"])
def test_an_adaptive_engine_keeps_a_lone_request_on_the_device(runs: Runs, case: str) -> None:
    """It has more context than slots, and yet no row is fetched twice."""
    batch = runs.report(case).batches["alone"]
    seen = after_first_decode(batch)
    assert seen["selection_hits"] > 0
    assert batch.gained.get("selection_evictions", 0) == 0
    assert seen["selection_misses"] <= GROUPS[CASES[case].arch] * len(make_batch("alone")[0].prompt)


@pytest.mark.parametrize("case", ["v32-128-adaptive", "glm-64-cached-adaptive"])
def test_an_adaptive_engine_spills_under_pressure(runs: Runs, case: str) -> None:
    assert in_all(runs.report(case), ["flood"])["selection_spills"] > 0


@pytest.mark.parametrize("case", ["v32-128-adaptive", "glm-64-cached-adaptive"])
def test_a_request_that_was_wholly_on_the_device_is_spilled_while_it_decodes(runs: Runs, case: str) -> None:
    """Its answer is compared with the plain engine's among all others; here, that it went through both."""
    steps = runs.report(case).batches["switch"].steps
    spilled = [number for number, step in enumerate(steps) if step.gained.get("selection_spills")]
    assert len(spilled) == 1
    assert steps[spilled[0]].gained["selection_spills"] == 1
    before, after = steps[: spilled[0]], [step for step in steps[spilled[0] :] if step.tokens == ["long"]]
    assert sum(step.tokens == ["long"] for step in before) > SETTLED
    assert len(after) > SETTLED
    assert sum(step.gained.get("selection_evictions", 0) for step in before) == 0
    assert sum(step.gained.get("selection_evictions", 0) for step in after) > 0


@pytest.mark.parametrize("case", ["v32-64", "glm-128-cached"])
def test_each_decoded_row_goes_to_the_pool_once(runs: Runs, case: str) -> None:
    batch = runs.report(case).batches["alone"]
    (answer,) = batch.answers.values()
    assert batch.gained["bytes_written_back"] == (len(answer.tokens) - 1) * ROW_BYTES  # the last one is never computed


@pytest.mark.parametrize(("case", "ahead"), [("glm-128-cached", True), ("glm-64-tight", True), ("glm-256", False)])
def test_followers_rows_are_fetched_ahead_if_asked(runs: Runs, case: str, ahead: bool) -> None:
    report = runs.report(case)
    assert (in_all(report, report.batches)["prefetches"] > 0) == ahead


# --- speculative decoding


@pytest.mark.parametrize("case", [name for name, each in CASES.items() if each.draft_tokens])
def test_some_drafts_are_accepted_and_some_are_not(runs: Runs, case: str) -> None:
    batches = runs.report(case).batches.values()
    proposed = sum(len(tokens) for batch in batches for step in batch.drafts for tokens in step.values())
    assert 10 <= sum(batch.accepted for batch in batches) <= proposed - 100


@pytest.mark.parametrize("case", [name for name, each in CASES.items() if each.draft_tokens and not each.blocks])
def test_the_drafter_guesses_as_it_does_without_offload(runs: Runs, case: str) -> None:
    """No answer tells whether the drafter's own layer reads the right rows: its guesses do."""
    plain, report = runs.report(f"{case}, plain"), runs.report(case)
    for name, batch in report.batches.items():
        assert batch.drafts == plain.batches[name].drafts, name
