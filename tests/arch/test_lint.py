# SPDX-License-Identifier: Apache-2.0
"""The tools of `make lint` find nothing; they run here too, so that one command judges everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch.source import ROOT, tracked_files

BIN = Path(sys.executable).parent


def _run(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN / tool, *arguments], cwd=ROOT, check=False, capture_output=True, text=True)


def _assert_clean(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)


def test_style() -> None:
    _assert_clean(_run("ruff", "check", "--output-format", "concise", "."))


def test_format() -> None:
    _assert_clean(_run("ruff", "format", "--check", "--output-format", "concise", "."))


def test_types() -> None:
    _assert_clean(_run("mypy"))


def test_native_format() -> None:
    native = [path for path in tracked_files() if path.startswith("csrc/") and path.endswith((".cpp", ".h"))]
    _assert_clean(_run("clang-format", "--dry-run", "-Werror", *native))


def test_spelling() -> None:
    _assert_clean(_run("codespell", *tracked_files()))


def test_an_untyped_function_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f(x):\n    return x\n")
    options = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache"))
    assert "no-untyped-def" in _run("mypy", *options, str(bad)).stdout
    assert "ANN001" in _run("ruff", "check", "--config", str(ROOT / "pyproject.toml"), str(bad)).stdout
