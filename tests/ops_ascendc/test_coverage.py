# SPDX-License-Identifier: Apache-2.0
"""How many lines of the kernels the battery runs: at least 95 of 100, in each file (some 15 s)."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.arch.source import ROOT
from tests.ops_ascendc.build import COVERED, OPERATORS, build, kernel_sources
from tests.ops_ascendc.tally import Tally

LEAST = 0.95


def covered_lines(folder: Path) -> dict[str, dict[int, int]]:
    """Return how often each line ran, by file of the operators' folder; a template's instances count as one."""
    gcov = shutil.which("gcov")
    if gcov is None:
        pytest.skip("gcov is not installed")
    counts = sorted(folder.glob("*.gcda"))
    assert len(counts) == 3
    command = [gcov, "--json-format", *map(str, counts)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    lines: dict[str, dict[int, int]] = defaultdict(dict)
    for report in folder.glob("*.gcov.json.gz"):
        for file in json.loads(gzip.decompress(report.read_bytes()))["files"]:
            path = (folder / file["file"]).resolve()
            if not path.is_relative_to(OPERATORS):
                continue
            seen = lines[str(path.relative_to(OPERATORS))]
            for line in file["lines"]:
                number = line["line_number"]
                seen[number] = seen.get(number, 0) + line["count"]
    return lines


@pytest.mark.timeout(300)
def test_the_battery_runs_nearly_every_line_of_the_kernels(tmp_path: Path, tally: Tally) -> None:
    library = build(tmp_path, COVERED)
    command = [sys.executable, "-m", "tests.ops_ascendc.battery", str(library), "8"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = covered_lines(tmp_path)
    missed = []
    for source in map(str, kernel_sources()):
        counts = lines.get(source, {})
        if not counts:
            continue  # a header of plain numbers has no line that runs
        run = sum(count > 0 for count in counts.values())
        tally.coverage[Path(source).name] = (run, len(counts))
        missed += [f"{source}:{number}" for number, count in sorted(counts.items()) if not count]
        assert run >= LEAST * len(counts), f"{source}: {run} of {len(counts)} lines ran; not: {missed}"
    # All files with code were seen, and what did not run is said.
    assert {name for name in tally.coverage if name.endswith(".cpp")} == {
        "gather_selection_kv_cache.cpp",
        "gather_miss_rows.cpp",
    }
    assert len(tally.coverage) >= 8
    total = [sum(each[i] for each in tally.coverage.values()) for i in (0, 1)]
    assert total[0] >= LEAST * total[1], missed
