# SPDX-License-Identifier: Apache-2.0
"""The bed of the two-node tests: links as fast and as late as they were asked for, and nothing left behind."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.arch.source import ROOT
from tests.e2e.net import Network, Node, skip_without_namespaces, sweep
from tidal_connector.config import child_environment

RATE_MBIT = 200
PORT = 9000
BOUND_S = 20.0

# Takes one connection, answers five bytes, one at a time, then counts the others; prints the count.
SINK = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.create_server((sys.argv[1], int(sys.argv[2])), family=family) as server:
    print("listening", flush=True)
    link, _ = server.accept()
    for _ in range(5):
        link.sendall(link.recv(1))
    print(sum(map(len, iter(lambda: link.recv(1 << 20), b""))), flush=True)
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    skip_without_namespaces()
    with Network(["near", "far"], rate=f"{RATE_MBIT}mbit", relayed=["far"]) as made:
        yield made


def send(node: Node, address: str, length: int) -> tuple[float, float]:
    """Send bytes from here to a sink on a node; return the least seconds of a byte there and back, and of all bytes."""
    command = node.inside([sys.executable, "-c", SINK, address, str(PORT)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sink:
        assert sink.stdout is not None
        try:
            assert sink.stdout.readline() == "listening\n"
            with socket.create_connection((address, PORT), timeout=BOUND_S) as link:
                trips = []
                for _ in range(5):
                    began = time.monotonic()
                    link.sendall(b"x")
                    assert link.recv(1) == b"x"
                    trips.append(time.monotonic() - began)
                began = time.monotonic()
                link.sendall(bytes(length))
            assert sink.stdout.readline() == f"{length}\n"
            return min(trips), time.monotonic() - began
        finally:
            sink.kill()


@pytest.mark.parametrize("name", ["near", "far"])
@pytest.mark.parametrize("family", [4, 6])
def test_a_link_is_as_fast_as_it_was_asked_for(network: Network, name: str, family: int) -> None:
    length = RATE_MBIT * 1_000_000 // 8 // 2
    before = network[name].traffic()
    _, seconds = send(network[name], network[name].address(family), length)
    assert 0.45 < seconds < BOUND_S / 4
    assert length < network[name].traffic().received - before.received < 1.2 * length


def test_a_delay_is_added_each_way(network: Network) -> None:
    network["far"].delay(0.02)
    try:
        answered, _ = send(network["far"], network["far"].ipv4, 1)
        assert answered >= 0.04
    finally:
        network["far"].delay(0.0)
    answered, _ = send(network["far"], network["far"].ipv4, 1)
    assert answered < 0.04


@pytest.mark.parametrize("name", ["near", "far"])
def test_an_unplugged_node_gets_nothing_until_it_is_back(network: Network, name: str) -> None:
    done = threading.Event()

    def run() -> None:
        send(network[name], network[name].ipv4, 1000)
        done.set()

    with network[name].unplugged():
        thread = threading.Thread(target=run)
        thread.start()
        assert not done.wait(0.6)
    assert done.wait(BOUND_S)
    thread.join()


def test_a_node_has_a_loopback_of_its_own(network: Network) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        probe = f"import socket; print(socket.socket().connect_ex(('127.0.0.1', {server.getsockname()[1]})))"
        assert network["near"].run([sys.executable, "-c", probe]).strip() == "111"


def test_what_a_killed_process_left_is_swept_away() -> None:
    skip_without_namespaces()
    left = (
        "import os, signal\nfrom tests.e2e.net import Network\n"
        "with Network(['lost'], relayed=[]):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", left], cwd=ROOT, env=child_environment())
    child.wait(BOUND_S)
    names = set(sweep())
    assert f"tidal-{child.pid}-0-lost" in names
    assert f"td{child.pid}b0" in names
    assert sweep() == []
    assert not [entry for entry in Path("/sys/class/net").iterdir() if entry.name.startswith(f"td{child.pid}")]
