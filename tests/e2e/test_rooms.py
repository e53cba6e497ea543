# SPDX-License-Identifier: Apache-2.0
"""Each room of the selection cache is broken in a running engine, and the judge of ``test_single_instance`` sees it.

Clean runs come first, after each broken one, and last, so that a change is due to the room and to nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.checks import LOGPROB_BOUND
from tests.e2e.single_instance import Ask, Batch, Order, Report, run_order
from tests.e2e.single_instance_batches import TOP_K
from tests.e2e.single_instance_matrix import LAYERS, Case
from tidal_connector.cli.demo.compare import compare
from tidal_connector.cli.demo.prompts import make_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(300)]

ROOMS = {
    "v32": ("wrong slot", "skipped miss", "stale pool row", "stale residency"),
    "glm": ("wrong slot", "skipped miss", "stale pool row", "stale residency", "early follower"),
}
SPARED = {"wrong slot", "skipped miss"}
"""Rooms that are broken for the victim alone."""


def probe() -> list[Ask]:
    """Return a request that ends, the victim, which then takes its seat, and one that is there all the time."""
    before, bystander, victim = make_prompts((280, 200, 300), 41, shared_prefix=False)
    return [Ask("before", before, 12), Ask("bystander", bystander, 90), Ask("victim", victim, 60, joins=24)]


@pytest.fixture(scope="module", params=list(ROOMS))
def broken(request: pytest.FixtureRequest, models: Callable[..., Path]) -> tuple[str, Report]:
    arch = request.param
    settings = Case(arch, TOP_K, ()).settings(models(arch=arch, layers=LAYERS))
    batches = {"clean": probe()}
    for room in ROOMS[arch]:
        batches |= {room: probe(), f"{room}, mended": probe()}
    return arch, run_order(Order(settings, batches), "tests.e2e.single_instance_rooms")


def caught(batch: Batch, clean: Batch, name: str) -> bool:
    """Whether the judge would have refused an answer."""
    found = compare(batch.answers[name], clean.answers[name])
    return not found.tokens_equal or found.logprob > LOGPROB_BOUND


def test_a_broken_room_is_caught(broken: tuple[str, Report]) -> None:
    arch, report = broken
    clean = report.batches["clean"]
    for room in ROOMS[arch]:
        assert caught(report.batches[room], clean, "victim"), f"{room} goes unseen"
        if room in SPARED:
            assert not caught(report.batches[room], clean, "bystander"), f"{room} hurts others"
        mended = report.batches[f"{room}, mended"]
        assert [name for name in clean.answers if caught(mended, clean, name)] == [], f"{room} stays broken"
