# SPDX-License-Identifier: Apache-2.0
"""The example with four machines, with stand-ins for the engines; the real ones are tested in tests/e2e."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.arch.source import ROOT
from tests.e2e.net import skip_without_namespaces
from tidal_connector.config import child_environment

BOUND_S = 90.0
MISUSE = 2


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    skip_without_namespaces()
    for tool in ("etcd", "curl"):
        if shutil.which(tool) is None:
            pytest.skip(f"the example needs {tool}, which is not installed")
    return child_environment({"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)})


def left_by(pid: int) -> list[str]:
    folders = [folder for folder in (Path("/run/netns"), Path("/sys/class/net")) if folder.is_dir()]
    return [entry.name for folder in folders for entry in folder.iterdir() if entry.name.startswith(f"tidal{pid}")]


def test_a_request_is_answered_across_machines_and_nothing_stays(environment: dict[str, str]) -> None:
    command = ["examples/two_nodes.sh", "-s", "-6", "-r", "200mbit"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-1, stderr=-2, text=True) as run:
        output, _ = run.communicate(timeout=BOUND_S)
    assert run.returncode == 0, output
    assert "the answers are the same" in output
    assert "prefill-0" in output
    assert left_by(run.pid) == []


def test_an_interrupted_run_takes_its_machines_away_and_those_of_one_that_was_killed(
    environment: dict[str, str],
) -> None:
    killed, orphans = until_machines_are_there(environment, signal.SIGKILL)
    assert left_by(killed) != []
    assert any(running(pid) for pid in orphans)
    interrupted, others = until_machines_are_there(environment, signal.SIGINT)
    assert left_by(killed) == left_by(interrupted) == []
    assert [pid for pid in (*orphans, *others) if running(pid)] == []


def name_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def running(pid: str) -> bool:
    """Whether a process runs: an orphan may stay as a zombie for as long as nobody asks how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until_machines_are_there(environment: dict[str, str], number: signal.Signals) -> tuple[int, list[str]]:
    """Start the example, end it by a signal once etcd runs; return its process id, and etcd's."""
    # In a session of its own, so that the signal comes to the script alone.
    with subprocess.Popen(
        ["examples/two_nodes.sh", "-s"], cwd=ROOT, env=environment, stdout=-1, stderr=-2, start_new_session=True
    ) as run:
        until = time.monotonic() + BOUND_S
        inside: list[str] = []
        while not inside:
            assert time.monotonic() < until
            time.sleep(0.05)
            listed = ["ip", "netns", "pids", f"tidal{run.pid}-etcd"]
            found = subprocess.run(listed, capture_output=True, text=True, check=False).stdout.split()
            inside = [pid for pid in found if name_of(pid) == "etcd"]
        os.kill(run.pid, number)
        run.wait(BOUND_S)
    return run.pid, inside


def test_a_wrong_option_shows_the_right_ones(environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["examples/two_nodes.sh", "-x"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == MISUSE
    assert "examples/two_nodes.sh [-6]" in done.stderr
