# SPDX-License-Identifier: Apache-2.0
"""The example of a rollout runs to its end, and its client sees nothing of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tidal_connector.cluster.local import free_fixed_ports

ROOT = Path(__file__).parents[2]


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_example_ends_well(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_fixed_ports(1)[0]}"
    done = subprocess.run(
        [ROOT / "examples/rollout.sh", f"file://{tmp_path}/registry", listen],
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for wanted in ("halted", "exit status 2", ", 0 failures", "undo"):
        assert wanted in done.stdout
