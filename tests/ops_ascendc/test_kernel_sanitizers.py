# SPDX-License-Identifier: Apache-2.0
"""The battery on a build that watches every memory access of the simulated kernels, their host tiling and harness."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch.source import ROOT
from tests.ops_ascendc.build import HARNESS, OPERATORS, SANITIZED, build, compiler, link
from tidal_connector.config import child_environment

pytestmark = pytest.mark.sanitizers


def library_of_compiler(name: str) -> str:
    """Return the path of a runtime library; skip without it."""
    found = subprocess.run(
        [compiler(), f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"the compiler has no {name}")
    return found


def watched_battery(library: Path, histories: int) -> tuple[int, str]:
    """Return the exit status and everything that was said."""
    environment = child_environment() | {
        "LD_PRELOAD": f"{library_of_compiler('libasan.so')} {library_of_compiler('libstdc++.so.6')}",
        "ASAN_OPTIONS": "halt_on_error=1:exitcode=66:detect_leaks=0",  # Python frees little at its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [sys.executable, "-m", "tests.ops_ascendc.battery", str(library), str(histories)]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the build; its library is the only one in it."""
    folder = tmp_path_factory.mktemp("watched")
    build(folder, SANITIZED)
    return folder


@pytest.mark.timeout(600)
def test_the_kernels_have_no_fault(watched: Path) -> None:
    status, said = watched_battery(watched / "libtidal_kernels.so", 20)
    assert status == 0, said
    assert "steps passed" in said
    assert "runtime error" not in said


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("text", "instead", "said"),
    [
        ("std::memset(workspace.get(), kGarbage, bytes);", "std::memset(workspace.get(), kGarbage, bytes + 1);",
         "heap-buffer-overflow"),
        ("static_cast<size_t>(launch.workspace), true}",
         "static_cast<size_t>(launch.workspace + INT64_MAX), true}",
         "signed integer overflow"),
    ],
    ids=["address", "undefined"],
)  # fmt: skip
def test_a_fault_made_on_purpose_is_seen(watched: Path, tmp_path: Path, text: str, instead: str, said: str) -> None:
    """So that a sanitizer that watches nothing fails here."""
    copy = tmp_path / "ops_ascendc"
    shutil.copytree(OPERATORS / HARNESS.parent, copy / HARNESS.parent)
    source = copy / HARNESS
    assert source.read_text().count(text) == 1
    source.write_text(source.read_text().replace(text, instead))
    status, words = watched_battery(link(tmp_path / "faulty", SANITIZED, copy, [HARNESS], watched), 1)
    assert status != 0
    assert said in words
