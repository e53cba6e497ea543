# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys

from tests.arch.source import ROOT
from tidal_connector.config import child_environment

ROOMS = ("1 save", "2 address", "3 carry", "4 land", "5 choose", "6 fetch", "7 hold", "8 attend")


def walk(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "examples/walk.py", *options],
        cwd=ROOT,
        env=child_environment({"PYTHONPATH": str(ROOT), "COLUMNS": "200"}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_walk_passes_all_rooms_and_ends_with_the_same_bytes() -> None:
    done = walk()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [room for room in ROOMS if room not in done.stdout] == []
    # Tokens [128, 299) of three latent rows and two rows of index keys: nothing less, nothing more.
    assert f"{171 * (3 * 1152 + 2 * 132):,} of 636,120" in done.stdout
    assert "identical" in done.stdout
    assert done.stderr == ""


def test_the_walk_sees_one_flipped_bit() -> None:
    done = walk("--sabotage")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED: latent of layer 0: page 0 row" in done.stdout
    assert "FAILED: attention of layer 0 differs" in done.stdout
    assert "attention of layer 1" not in done.stdout
    assert "identical" not in done.stdout
