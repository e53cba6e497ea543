# SPDX-License-Identifier: Apache-2.0
"""What happens in the other process arrives here: each case under its function, and nothing is taken for passed."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_plugin.ascend.bed import run
from tests.vllm_plugin.ascend.bed.sources import Sources

pytestmark = pytest.mark.contract

FILE = "tests/vllm_plugin/ascend/in_bed/test_some.py"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Let the other process write these outcomes instead of running anything."""
    lines: list[list[Any]] = []

    def pretend(arguments: list[str], environment: dict[str, str], seconds: float) -> str:
        (option,) = [each for each in arguments if each.startswith("--bed-outcomes=")]
        Path(option.partition("=")[2]).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return "last words"

    monkeypatch.setattr(run, "ensure_sources", lambda: Sources(Path("vllm"), Path("vllm_ascend")))
    monkeypatch.setattr(run, "_run", pretend)
    return lines


def test_the_cases_of_a_function_come_together(written: list[list[Any]]) -> None:
    written += [[f"{FILE}::test_a[1]", "passed", "", 0.1], [f"{FILE}::test_a[2::x]", "failed", "why", 0.2]]
    found = run.run_nodes([f"{FILE}::test_a"])
    assert [each.outcome for each in found[f"{FILE}::test_a"]] == ["passed", "failed"]


def test_a_test_without_an_outcome_has_failed_with_the_output(written: list[list[Any]]) -> None:
    written += [[f"{FILE}::test_a", "passed", "", 0.1]]
    (lost,) = run.run_nodes([f"{FILE}::test_a", f"{FILE}::test_b"])[f"{FILE}::test_b"]
    assert lost.outcome == "failed"
    assert "last words" in lost.text


def test_a_file_that_cannot_be_imported_fails_each_of_its_tests(written: list[list[Any]]) -> None:
    written += [[FILE, "failed", "no such module", 0.0]]
    found = run.run_nodes([f"{FILE}::test_a", f"{FILE}::test_b"])
    assert [found[f"{FILE}::test_{name}"][0].text for name in "ab"] == ["no such module"] * 2


def test_a_process_that_does_not_end_is_ended() -> None:
    began = time.monotonic()
    said = run._run([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), 1.0)
    assert said == "stopped after 1 s"
    assert time.monotonic() - began < 20
