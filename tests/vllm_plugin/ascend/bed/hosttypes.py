# SPDX-License-Identifier: Apache-2.0
"""Checks the vLLM-facing package with mypy against the types of one host: vLLM 0.23 with vllm-ascend, or 0.32.

``mypy.ini`` beside this file says which checks are on. A cache in the ignored folder makes a second run short.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.arch.source import ROOT
from tests.vllm_plugin.ascend.bed.sources import CACHE

CONFIG = Path(__file__).with_name("mypy.ini")
PACKAGE = ROOT / "tidal_connector" / "vllm_plugin"
SECONDS = 400.0


@dataclass(frozen=True)
class Host:
    """A release of vLLM: its name, the folder of ours that it loads, and where its packages lie if not installed."""

    name: str
    own: str
    packages: tuple[Path, ...] = ()


def complaints(host: Host, *more: Path) -> str:
    """Return what mypy has to say about the shared modules and the host's own folder (and ``more`` files)."""
    files = [*sorted(PACKAGE.glob("*.py")), *sorted((PACKAGE / host.own).rglob("*.py")), *more]
    arguments = [f"--config-file={CONFIG}", f"--cache-dir={CACHE / f'mypy-{host.name}'}", "--no-error-summary"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *arguments, *map(str, files)],
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": os.pathsep.join(map(str, host.packages))},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise AssertionError(f"mypy could not run: {done.stdout}{done.stderr}")
    return done.stdout.replace(f"{ROOT}{os.sep}", "")
