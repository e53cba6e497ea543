# SPDX-License-Identifier: Apache-2.0
"""The tools of `make lint` find nothing; they run here too, so that one command judges everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch.source import ROOT, tracked_files


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, check=False, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "command", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)], ids=" ".join
)
def test_python(command: tuple[str, ...]) -> None:
    done = _run(*command)
    assert done.returncode == 0, done.stdout + done.stderr


def test_native_code_is_formatted() -> None:
    native = [path for path in tracked_files() if path.startswith("csrc/") and path.endswith((".cpp", ".h"))]
    done = _run("clang_format", "--dry-run", "-Werror", *native)
    assert done.returncode == 0, done.stderr


def test_spelling() -> None:
    done = _run("codespell_lib", *tracked_files())
    assert done.returncode == 0, done.stdout


def test_an_untyped_function_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f(x):\n    return x\n")
    options = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache"))
    assert "no-untyped-def" in _run("mypy", *options, str(bad)).stdout
    assert "ANN001" in _run("ruff", "check", "--config", str(ROOT / "pyproject.toml"), str(bad)).stdout
