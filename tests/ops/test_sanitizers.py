# SPDX-License-Identifier: Apache-2.0
"""The native tests of this folder once more, on builds that watch every memory access.

AddressSanitizer with UndefinedBehaviorSanitizer runs all of them, ThreadSanitizer those that use threads. Each build
also runs a fault made on purpose, so that a sanitizer that watches nothing fails here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nanobind
import pytest

from tests.arch.source import ROOT
from tidal_connector.config import child_environment

BIN = Path(sys.executable).parent
FOLDER = Path(__file__).parent
pytestmark = [pytest.mark.native, pytest.mark.sanitizers]
# A hundred thousand steps take minutes when every access is watched; its neighbours go the same ways in fewer.
TOO_LONG = "test_both_implementations_agree_bit_for_bit_over_100_000_request_steps"


@dataclass(frozen=True)
class Sanitizer:
    """What to build, what has to be in the process before everything else, which tests to run, and what it must see."""

    kinds: str
    library: str
    tests: str
    faults: dict[str, str]


# The row right behind the memory: farther away may lie somebody else's.
OUT_OF_BOUNDS = """
import numpy as np
from numpy.lib.stride_tricks import as_strided
from tidal_connector.ops import native
few = as_strided(np.zeros(640, np.uint8), (1, 100, 64), (6400, 64, 1))
native.copy_rows(few, np.array([10]), np.zeros((1, 1, 64), np.uint8), np.array([0]))
"""
OVERFLOW = """
import numpy as np
from numpy.lib.stride_tricks import as_strided
from tidal_connector.ops import native
far = as_strided(np.zeros(64, np.uint8), (4, 1, 64), (1 << 62, 64, 1))
native.copy_rows(far, np.array([3]), np.zeros((1, 1, 64), np.uint8), np.array([0]))
"""
RACE = """
import numpy as np
from tidal_connector.ops import CopyStream, Move
source, destination = np.zeros((4096, 656), np.uint8), np.zeros((4096, 656), np.uint8)
everything = np.arange(4096)
with CopyStream(2) as stream:
    moves = stream.prepare([Move(source, destination)] * 2)  # nothing orders the two
    for _ in range(200):
        stream.settle(stream.submit(moves, everything, everything) + 1, 60)
"""


WATCHERS = [
    pytest.param(
        Sanitizer(
            "address,undefined",
            "libasan.so",
            f"not {TOO_LONG}",
            {"heap-buffer-overflow": OUT_OF_BOUNDS, "signed integer overflow": OVERFLOW},
        ),
        id="address-undefined",
    ),
    pytest.param(
        Sanitizer("thread", "libtsan.so", "(thread or stream) and not fork", {"data race": RACE}), id="thread"
    ),
]


def tool(name: str) -> str:
    found = shutil.which(name, path=str(BIN)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds a kind of module; all share one folder, so that nanobind is compiled once."""
    folder = tmp_path_factory.mktemp("sanitized")

    def make(kinds: str) -> Path:
        command = [tool("cmake"), "-S", ROOT / "csrc", "-B", folder, "-G", "Ninja", f"-DTIDAL_SANITIZE={kinds}"]
        command += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DCMAKE_CXX_COMPILER={tool('g++')}"]
        command += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}"]
        command += ["-DCMAKE_BUILD_TYPE=Debug", "-DSKBUILD_PROJECT_VERSION=0"]
        for step in (command, [tool("cmake"), "--build", folder]):
            done = subprocess.run(step, check=False, capture_output=True, text=True)
            if done.returncode:
                pytest.fail(done.stdout + done.stderr, pytrace=False)
        (module,) = folder.glob("_native*.so")
        kept = folder / kinds
        kept.mkdir()
        return Path(shutil.copy(module, kept))

    return make


def library(name: str) -> str:
    path = subprocess.run([tool("g++"), f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    found = path.stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"the compiler has no {name}")
    return found


class Watched:
    """Runs Python with a sanitizer's build of the native module."""

    def __init__(self, sanitizer: Sanitizer, module: Path, folder: Path) -> None:
        self._reports = folder / "report"
        common = f"log_path={self._reports}:halt_on_error=1:exitcode=66"
        self._environment = child_environment() | {
            # libstdc++ too, because Python does not need it, and exceptions are looked for at the start
            "LD_PRELOAD": f"{library(sanitizer.library)} {library('libstdc++.so.6')}",
            "ASAN_OPTIONS": f"{common}:detect_leaks=0",  # Python frees little at its end
            "UBSAN_OPTIONS": f"{common}:print_stacktrace=1",
            "TSAN_OPTIONS": common,
            "TIDAL_NATIVE": str(module),
        }

    def run(self, *arguments: str) -> tuple[int, str]:
        """Return the exit status and everything that was reported or printed."""
        for old in self._reports.parent.glob("report.*"):
            old.unlink()
        # setarch: ThreadSanitizer does not find its way through every randomized address space
        command = [tool("setarch"), "-R", sys.executable, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self._environment, check=False, capture_output=True, text=True)
        reports = "".join(path.read_text() for path in sorted(self._reports.parent.glob("report.*")))
        return done.returncode, reports + done.stdout + done.stderr


@pytest.fixture(scope="module", params=WATCHERS)
def watched(
    request: pytest.FixtureRequest, build: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Sanitizer, Watched]:
    sanitizer: Sanitizer = request.param
    return sanitizer, Watched(sanitizer, build(sanitizer.kinds), tmp_path_factory.mktemp("reports"))


@pytest.mark.timeout(600)
def test_a_fault_made_on_purpose_is_seen(watched: tuple[Sanitizer, Watched]) -> None:
    sanitizer, python = watched
    for name, story in sanitizer.faults.items():
        status, said = python.run("-c", story)
        assert name in said
        assert status != 0


@pytest.mark.timeout(600)
def test_the_native_tests_have_no_fault(watched: tuple[Sanitizer, Watched]) -> None:
    sanitizer, python = watched
    # --capture=sys leaves the file behind standard error alone, to which a dying process reports
    tests = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--capture=sys", str(FOLDER), f"--ignore={__file__}")
    status, said = python.run(*tests, "-m", "native", "-k", sanitizer.tests)
    if status or "Sanitizer" in said:
        pytest.fail(said, pytrace=False)
    assert " passed" in said
