# SPDX-License-Identifier: Apache-2.0
"""The simulation of AscendC: kernels that keep its rules pass in every mode, and each rule has one that breaks it."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ops_ascendc import sim_program
from tests.ops_ascendc.sim_program import MODES, SIMULATION, Run

CHECKS = ("refuse(", "throw Fault(")
pytestmark = pytest.mark.timeout(300)  # the first test builds the program, half a minute on a busy machine


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cases, built so that they count which lines ran."""
    return sim_program.build(tmp_path_factory.mktemp("sim"), "-O0", "--coverage")


@pytest.fixture(scope="module")
def runs(program: Path) -> dict[str, list[Run]]:
    """What every case said in every mode."""
    return sim_program.run(program)


def test_every_case_ran_in_every_mode(runs: dict[str, list[Run]]) -> None:
    named = sim_program.names("FAULT", "RIGHT", "LAUNCH")
    assert len(named) > 100
    assert {name: len(of) for name, of in runs.items()} == dict.fromkeys(named, MODES)


@pytest.mark.parametrize("name", sim_program.names("FAULT"))
def test_a_broken_rule_is_named(name: str, runs: dict[str, list[Run]]) -> None:
    assert [run for run in runs[name] if not run.right()] == []
    assert any(run.expected for run in runs[name])


@pytest.mark.parametrize("name", sim_program.names("RIGHT", "LAUNCH"))
def test_what_keeps_the_rules_passes(name: str, runs: dict[str, list[Run]]) -> None:
    assert [run for run in runs[name] if not run.right()] == []


@pytest.mark.usefixtures("runs")
def test_every_check_of_the_simulation_was_seen_to_bite(program: Path) -> None:
    """A line that refuses something, and that no case reached, would be a check that nobody knows to work."""
    counts = lines_run(program.parent)
    unseen = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted(SIMULATION.rglob("*.h"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if any(check in line for check in CHECKS) and not line.startswith("[[noreturn]]") and path.name != "error.h"
        if not counts.get((path.name, number))
    ]
    assert unseen == []


def lines_run(folder: Path) -> dict[tuple[str, int], int]:
    """How often each line of the headers ran, by gcov's count."""
    gcov = shutil.which("gcov")
    if gcov is None:
        pytest.skip("gcov is not installed")
    data = sorted(map(str, folder.glob("*.gcda")))
    assert data
    subprocess.run([gcov, "--json-format", *data], cwd=folder, check=True, capture_output=True)
    counts: dict[tuple[str, int], int] = {}
    for report in folder.glob("*.gcov.json.gz"):
        for file in json.loads(gzip.decompress(report.read_bytes()))["files"]:
            for line in file["lines"]:
                key = (Path(file["file"]).name, line["line_number"])
                counts[key] = counts.get(key, 0) + line["count"]
    return counts
