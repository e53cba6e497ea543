# SPDX-License-Identifier: Apache-2.0
"""Servers come up, are waited for, and leave nothing behind, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tidal_connector.cluster.keeper import group_members
from tidal_connector.cluster.launch import ServerProcess, StartFailed, free_ports, wait_ready
from tidal_connector.config import child_environment

# A server with a child of its own; both ignore SIGTERM if told to.
SERVER = """
import http.server, signal, subprocess, sys
port, stubborn = int(sys.argv[1]), sys.argv[2] == "stubborn"
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

# Starts that server, says which processes it has, and waits to be killed.
STARTER = """
import sys, time
from pathlib import Path
from tidal_connector.cluster.launch import ServerProcess, wait_ready
from tidal_connector.config import child_environment
port, server, log = sys.argv[1:]
command = [sys.executable, "-c", server, port, "gentle"]
url = "http://127.0.0.1:" + port
with ServerProcess("s", command, child_environment(), url, Path(log)) as s:
    wait_ready([s], 20.0)
    print(*s.pids(), flush=True)
    time.sleep(600)
"""


def make_server(folder: Path, kind: str = "gentle") -> ServerProcess:
    port = free_ports(1)[0]
    command = [sys.executable, "-c", SERVER, str(port), kind]
    return ServerProcess("fake", command, child_environment(), f"http://127.0.0.1:{port}", folder / "fake.log")


def until(condition: Callable[[], bool], bound_s: float = 20.0) -> None:
    deadline = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline, "the awaited condition did not come"
        time.sleep(0.02)


def state(pid: int) -> str:
    """The process's state as the kernel names it; X where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def alive(pid: int) -> bool:
    return state(pid) not in "ZX"


def test_a_server_is_waited_for_and_ended_with_its_descendants(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    with make_server(tmp_path) as server:
        wait_ready([server], 20.0, lambda names, _: seen.append(names))
        pids = server.pids()
        assert len(pids) == 2
        assert seen[-1] == []
    assert not any(map(alive, pids))
    assert not server.running()
    assert "serving" in server.log.read_text()


def test_a_server_that_ignores_sigterm_is_ended_after_the_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidal_connector.cluster.launch.GRACE_S", 0.3)
    with make_server(tmp_path, "stubborn") as server:
        wait_ready([server], 20.0)
        pids = server.pids()
    assert not any(map(alive, pids))


def test_kill_ends_everything_and_the_server_can_start_again(tmp_path: Path) -> None:
    with make_server(tmp_path) as server:
        wait_ready([server], 20.0)
        pids = server.pids()
        server.kill()
        assert not any(map(alive, pids))
        server.start()
        wait_ready([server], 20.0)


def test_a_server_that_ends_early_fails_the_wait_with_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    url = "http://127.0.0.1:9"
    with (
        ServerProcess("early", command, child_environment(), url, tmp_path / "early.log") as server,
        pytest.raises(StartFailed, match=r"(?s)early ended before it served.*no such model"),
    ):
        wait_ready([server], 20.0)


def test_a_server_that_never_serves_fails_the_wait_at_its_bound(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    port = free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    with (
        ServerProcess("mute", command, child_environment(), url, tmp_path / "mute.log") as server,
        pytest.raises(StartFailed, match=r"mute did not serve within 0\.5 s"),
    ):
        wait_ready([server], 0.5)


def test_the_server_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(port), SERVER, str(tmp_path / "s.log")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdout is not None
    pids = [int(word) for word in starter.stdout.readline().split()]
    assert len(pids) == 2
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    until(lambda: not any(map(alive, pids)))


def test_a_server_can_be_stopped_and_continued(tmp_path: Path) -> None:
    with make_server(tmp_path) as server:
        wait_ready([server], 20.0)
        server.signal(signal.SIGSTOP)
        until(lambda: {state(pid) for pid in server.pids()} == {"T"})
        server.signal(signal.SIGCONT)
        assert server.ready()


def test_free_ports_are_distinct() -> None:
    assert len(set(free_ports(50))) == 50


def test_own_group_is_seen() -> None:
    assert os.getpid() in group_members(os.getpgrp())


# Makes shared memory, says its name, and hangs; multiprocessing starts a resource tracker for it.
SHARER = """
import time
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=4096)
print("name", block.name, flush=True)
time.sleep(600)
"""


def test_shared_memory_of_a_killed_server_is_unlinked(tmp_path: Path) -> None:
    server = ServerProcess(
        "s", [sys.executable, "-c", SHARER], child_environment(), "http://127.0.0.1:9", tmp_path / "l"
    )
    with server:
        until(lambda: server.log.exists() and "name" in server.log.read_text())
        name = server.log.read_text().split()[1]
        assert Path("/dev/shm", name).exists()
        server.kill()
        assert not Path("/dev/shm", name).exists()
