# SPDX-License-Identifier: Apache-2.0
"""Processes that outlive their starter are found again, and end with all that they started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.standins import until
from tidal_connector.cluster import processes
from tidal_connector.cluster.processes import ProcessId

FAMILY = """
import subprocess, sys, time
inner = "import time; time.sleep(60)"
children = [
    subprocess.Popen([sys.executable, "-c", inner]),
    subprocess.Popen([sys.executable, "-c", inner], start_new_session=True),
]
print(*(child.pid for child in children), flush=True)
time.sleep(60)
"""


def start(code: str, log: Path, *words: str) -> tuple[subprocess.Popen[bytes], ProcessId]:
    child = processes.spawn([sys.executable, "-c", code, *words], dict(os.environ), log)
    found = processes.identify(child.pid)
    assert found is not None
    return child, found


def test_a_process_is_in_a_session_of_its_own_and_known_by_its_start(tmp_path: Path) -> None:
    child, found = start("import time; time.sleep(60)", tmp_path / "log")
    try:
        assert os.getsid(child.pid) == child.pid
        assert processes.alive(found)
        assert not processes.alive(ProcessId(found.pid, found.started + 1))  # the number was given away again
    finally:
        child.kill()
    until(lambda: not processes.alive(found), 10)  # also before anybody has looked at its status
    assert child.wait(5) == -9
    assert processes.identify(child.pid) is None


def test_its_whole_family_ends_even_in_other_sessions(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child, found = start(FAMILY, log)
    until(lambda: len(log.read_text().split()) == 2, 10)
    family = [processes.identify(int(pid)) for pid in log.read_text().split()]
    processes.kill_tree(found)
    assert child.wait(5) == -9
    assert not any(each is not None and processes.alive(each) for each in family)


def test_what_a_dead_leader_left_in_its_session_ends_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child, found = start(FAMILY, log)
    until(lambda: len(log.read_text().split()) == 2, 10)
    inner, other = (processes.identify(int(pid)) for pid in log.read_text().split())
    assert inner is not None
    assert other is not None
    child.kill()
    child.wait(5)
    assert processes.alive(inner)
    processes.kill_tree(found)
    assert not processes.alive(inner)
    processes.kill_tree(other)


def test_a_process_is_found_by_a_word_of_its_command_line(tmp_path: Path) -> None:
    word = str(tmp_path / "serve-1.toml")
    assert processes.find(word) is None
    child, found = start("import time; time.sleep(60)", tmp_path / "log", word)
    try:
        until(lambda: processes.find(word) == found, 10)
        assert processes.find(word + "x") is None
        assert processes.find(word[:-1]) is None
    finally:
        child.kill()
        child.wait(5)
    assert processes.find(word) is None


def test_a_process_is_asked_to_end_and_one_that_has_ended_is_not(tmp_path: Path) -> None:
    child, found = start("import time; time.sleep(60)", tmp_path / "log")
    processes.terminate(found)
    assert child.wait(5) == -15
    processes.terminate(found)
