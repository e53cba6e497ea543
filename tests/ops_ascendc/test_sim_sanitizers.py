# SPDX-License-Identifier: Apache-2.0
"""The simulation on builds that watch every memory access: its own memory is sound, and its threads do not race.

AddressSanitizer with UndefinedBehaviorSanitizer runs all cases, ThreadSanitizer those whose kernels keep the rules (a
kernel that breaks them may race). Each build also runs faults made on purpose, so that a sanitizer that watches nothing
fails here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ops_ascendc import sim_program

pytestmark = [pytest.mark.sanitizers, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Sanitizer:
    """What to build in, what to run, and which report each fault must bring."""

    kinds: str
    cases: tuple[str, ...]
    faults: dict[str, str]


WATCHERS = [
    pytest.param(
        Sanitizer(
            "address,undefined",
            ("FAULT", "RIGHT", "LAUNCH"),
            {"planted_overrun": "stack-buffer-overflow", "planted_overflow": "signed integer overflow"},
        ),
        id="address-undefined",
    ),
    pytest.param(Sanitizer("thread", ("RIGHT", "LAUNCH"), {"planted_race": "data race"}), id="thread"),
]


@pytest.fixture(scope="module", params=WATCHERS)
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Sanitizer, Path]:
    """A sanitizer and the program that was built with it."""
    sanitizer: Sanitizer = request.param
    flags = (f"-fsanitize={sanitizer.kinds}", "-fno-sanitize-recover=all", "-O0", "-g1")
    return sanitizer, sim_program.build(tmp_path_factory.mktemp("watched"), *flags)


def test_a_fault_made_on_purpose_is_seen(watched: tuple[Sanitizer, Path]) -> None:
    sanitizer, program = watched
    for name, report in sanitizer.faults.items():
        with pytest.raises(RuntimeError, match=report):
            sim_program.run(program, [name], TSAN_OPTIONS="halt_on_error=1")


def test_no_case_has_a_fault(watched: tuple[Sanitizer, Path]) -> None:
    sanitizer, program = watched
    cases = sim_program.names(*sanitizer.cases)
    runs = sim_program.run(program, cases, TSAN_OPTIONS="halt_on_error=1")
    assert sorted(runs) == sorted(cases)
    assert {name: wrong for name, of in runs.items() if (wrong := [run for run in of if not run.right()])} == {}
