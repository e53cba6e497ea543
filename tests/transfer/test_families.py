# SPDX-License-Identifier: Apache-2.0
"""IPv4 and IPv6 of the data ports: the decisions, and real bytes between two processes of each kind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.arch.source import ROOT
from tidal_connector.address import only_ipv6
from tidal_connector.config import child_environment
from tidal_connector.errors import PeerLost
from tidal_connector.transfer.families import as_called

SIZE = 8 << 20
BOUND_S = 20.0


@pytest.mark.parametrize(
    ("host", "expected"),
    [("10.0.0.1", False), ("fd00::1", True), ("::1", True), ("localhost", False), ("no-such-host.invalid", False)],
)
def test_only_a_host_without_ipv4_needs_ipv6(host: str, expected: bool) -> None:
    assert only_ipv6(host) is expected


@pytest.mark.parametrize(
    ("endpoint", "ipv6", "called"),
    [
        ("10.0.0.1:15000", False, "10.0.0.1:15000"),
        ("10.0.0.1:15000", True, "[::ffff:10.0.0.1]:15000"),
        ("[fd00::1]:15000", True, "[fd00::1]:15000"),
        ("localhost:15000", False, "127.0.0.1:15000"),
        ("localhost:15000", True, "[::ffff:127.0.0.1]:15000"),
    ],
)
def test_a_peer_is_called_in_the_form_of_our_sockets(endpoint: str, ipv6: bool, called: str) -> None:
    assert as_called(endpoint, ipv6=ipv6) == called


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("[fd00::1]:15000", "data ports are of IPv4: set transfer.host"),
        ("no-such-host.invalid:15000", "no-such-host.invalid"),
        ("fd00::1:15000", "expected"),
    ],
)
def test_a_peer_out_of_reach_is_one_clear_line(endpoint: str, words: str) -> None:
    with pytest.raises(PeerLost, match=words):
        as_called(endpoint, ipv6=False)


@pytest.mark.mooncake
@pytest.mark.parametrize(("here", "there"), [("::1", "::1"), ("::1", "127.0.0.1")])
def test_bytes_arrive_over_ipv6_and_from_it_at_ipv4(tmp_path: Path, here: str, there: str) -> None:
    pool = tmp_path / "pool"
    pool.write_bytes(bytes(SIZE))
    with _child("tests.transfer.target", str(pool), there, "3.0") as target:
        assert target.stdout is not None
        said = json.loads(target.stdout.readline())
        assert said["endpoint"].startswith("[::1]:" if there == "::1" else "127.0.0.1:")
        peer = (said["endpoint"], str(said["address"]))
        with _child("tests.transfer.writer", *peer, str(SIZE), "3.0", here):
            memory = np.memmap(pool, np.uint8, mode="r")
            until = time.monotonic() + BOUND_S
            while not (memory == 0x55).all():
                assert time.monotonic() < until, f"{int((memory != 0).sum())} of {SIZE} bytes arrived"
                time.sleep(0.02)


@contextmanager
def _child(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=child_environment())
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=BOUND_S)
