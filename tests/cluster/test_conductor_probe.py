# SPDX-License-Identifier: Apache-2.0
"""The probe of a new engine goes through a pair of real rooms, and says who is to blame."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec
import pytest

from tidal_connector.cluster.conductor_probe import run_probe
from tidal_connector.cluster.launch import ServerProcess, free_ports, wait_ready
from tidal_connector.cluster.spec import Probe
from tidal_connector.cluster.standin_answers import expected_text
from tidal_connector.config import child_environment
from tidal_connector.ids import EngineId, Role
from tidal_connector.registry.members import Member, State

PROBE = Probe(prompt="one two", max_tokens=3, deadline_s=20.0)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Member]]:
    logs = tmp_path_factory.mktemp("logs")
    wanted = {
        "prefill": (Role.PREFILL, ()),
        "decode": (Role.DECODE, ()),
        "other": (Role.DECODE, ("--layout", "v2")),
        "failing": (Role.DECODE, ("--fail-rate", "1")),
        "both": (Role.BOTH, ()),
    }
    servers, members = [], {}
    for name, (role, more) in wanted.items():
        http, control = free_ports(2)
        command = [sys.executable, "-m", "tidal_connector.cluster.standin", "--role", str(role), "--engine", name]
        command += ["--http", f"127.0.0.1:{http}", "--control", f"127.0.0.1:{control}", *more]
        url = f"http://127.0.0.1:{http}"
        servers.append(ServerProcess(name, command, child_environment(), url, logs / f"{name}.log"))
        members[name] = Member(
            engine=EngineId(name),
            role=role,
            state=State.STARTING,
            http=url,
            control=f"127.0.0.1:{control}",
            model="tidal",
        )
    try:
        for server in servers:
            server.start()
        wait_ready(servers, 60.0)
        yield members
    finally:
        for server in servers:
            server.kill()


def test_a_pair_that_serves_passes(engines: dict[str, Member]) -> None:
    wanted = msgspec.structs.replace(PROBE, expect=expected_text({"prompt": "one two", "max_tokens": 3}))
    assert run_probe(engines["prefill"], engines["decode"], wanted).good


def test_an_engine_that_serves_alone_passes(engines: dict[str, Member]) -> None:
    assert run_probe(engines["both"], engines["both"], PROBE).good


def test_another_answer_than_expected_fails(engines: dict[str, Member]) -> None:
    found = run_probe(engines["prefill"], engines["decode"], msgspec.structs.replace(PROBE, expect="sea"))
    assert not found.good
    assert "without 'sea'" in found.why


def test_an_engine_that_answers_with_an_error_is_to_blame(engines: dict[str, Member]) -> None:
    found = run_probe(engines["prefill"], engines["failing"], PROBE)
    assert (found.good, found.engine) == (False, "failing")
    assert "status 500" in found.why


def test_engines_that_do_not_fit_fail(engines: dict[str, Member]) -> None:
    assert not run_probe(engines["prefill"], engines["other"], PROBE).good


def test_an_engine_that_is_not_there_is_to_blame(engines: dict[str, Member]) -> None:
    gone = msgspec.structs.replace(engines["prefill"], http=f"http://127.0.0.1:{free_ports(1)[0]}")
    found = run_probe(gone, engines["decode"], msgspec.structs.replace(PROBE, deadline_s=5.0))
    assert (found.good, found.engine) == (False, "prefill")
    assert "no answer to the probe" in found.why
