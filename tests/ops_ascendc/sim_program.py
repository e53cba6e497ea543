# SPDX-License-Identifier: Apache-2.0
"""The cases of the simulation as a program: finds their names, builds it, runs it, and reads what it says.

Takes a folder for what it makes. Any process.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.arch.source import ROOT
from tests.ops_ascendc.build import compiler
from tidal_connector.config import child_environment

SIMULATION = ROOT / "ops_ascendc" / "sim" / "include"
CASES = Path(__file__).parent / "sim_cases"
FLAGS = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{SIMULATION}")
MODES = 8  # of a case: lazy_dma or not, scalar_cache or not, two seeds
# The program gives up a kernel after 20 s by itself.
DEADLINE = 300


def names(*kinds: str) -> list[str]:
    """Return the cases of these kinds (FAULT, RIGHT, LAUNCH), as their sources name them."""
    begins = re.compile(rf"^(?:{'|'.join(kinds)})\(\s*(\w+),", re.MULTILINE)
    return [name for path in sorted(CASES.glob("*_cases.cpp")) for name in begins.findall(path.read_text())]


@dataclass(frozen=True)
class Run:
    """One case in one mode: the error that it should give (``*`` stands for anything), and the one that it gave."""

    mode: str
    expected: str
    error: str

    def right(self) -> bool:
        """Whether the two agree."""
        return re.fullmatch(re.escape(self.expected).replace(r"\*", ".*"), self.error) is not None


def build(folder: Path, *flags: str) -> Path:
    """Return the program, built in the folder with these further flags.

    Raises:
        RuntimeError: the compiler refuses a source; its words are the message.
    """
    program = folder / "sim_cases"
    base = [compiler(), *FLAGS, *flags]

    def compiled(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        _checked([*base, "-c", str(source), "-o", str(target)], folder)
        return target

    with ThreadPoolExecutor(2) as workers:
        objects = list(workers.map(compiled, sorted(CASES.glob("*.cpp"))))
    _checked([*base, *map(str, objects), "-o", str(program)], folder)
    return program


def run(program: Path, cases: Sequence[str] = (), **environment: str) -> dict[str, list[Run]]:
    """Return what each case said in each mode; without names, of all cases.

    Raises:
        RuntimeError: the program died; what it reported is the message.
    """
    done = _checked(["setarch", "-R", str(program), *cases], program.parent, **environment)
    said: dict[str, list[Run]] = defaultdict(list)
    for line in done.splitlines():
        name, mode, expected, error = line.split("\t")
        said[name].append(Run(mode, expected, error))
    return said


def _checked(command: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        # vLLM's CPU platform preloads libraries in whatever process sets it up; a sanitizer's has to be the first.
        env=child_environment() | {"LD_PRELOAD": ""} | environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr}")
    return done.stdout
