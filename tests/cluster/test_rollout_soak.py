# SPDX-License-Identifier: Apache-2.0
"""Rollouts under load with engines without a model: no client may notice anything, and it would be seen if one did."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from tidal_connector.cli.bench.figures import machine_facts
from tidal_connector.cli.bench.rollout import RolloutOptions, run_rollout
from tidal_connector.cli.bench.rollout_load import Load
from tidal_connector.cli.bench.rollout_report import RolloutResult, Scenario
from tidal_connector.cluster.launch import ServerProcess, free_ports, wait_ready
from tidal_connector.cluster.standin_answers import expected_text
from tidal_connector.config import child_environment

CLIENTS = 8


@pytest.mark.faults
@pytest.mark.timeout(420)
def test_no_client_notices_a_rollout_whatever_dies_meanwhile(tmp_path: Path) -> None:
    said = io.StringIO()
    only = ("mixed", "never-ready", "wrong", "layout")
    found = run_rollout(RolloutOptions(clients=CLIENTS, only=only, keep=tmp_path), Console(file=said, width=160))
    assert found.shortcomings() == [], said.getvalue()
    assert [(item.name, item.outcome) for item in found.scenarios] == [
        ("apply, conducting agent killed -9", "done"),
        ("undo, etcd killed -9", "done"),
        ("apply what never becomes ready", "halted"),
        ("undo it", "done"),
        ("apply what answers wrongly", "halted"),
        ("undo it", "done"),
        ("apply another layout", "done"),
        ("undo it", "done"),
    ]
    assert found.requests > 500
    assert "did not become healthy within 8 s" in found.scenarios[2].why
    assert "without" in found.scenarios[4].why


def test_failed_and_wrong_answers_are_counted(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    command = [
        *(sys.executable, "-m", "tidal_connector.cluster.standin", "--role", "both", "--http", f"127.0.0.1:{port}"),
        *("--fail-rate", "0.2", "--wrong-rate", "0.2"),
    ]
    url = f"http://127.0.0.1:{port}"
    with ServerProcess("standin", command, child_environment(), url, tmp_path / "log") as server:
        wait_ready([server], 30.0)
        with Load(url, 4, body, expected_text) as load:
            deadline = time.monotonic() + 20
            while load.requests < 200 and time.monotonic() < deadline:
                time.sleep(0.05)
            server.kill()  # nobody answers any more
            time.sleep(0.5)
            seen = load.take()
    assert seen.requests >= 200
    assert seen.wrong >= 10
    assert seen.failed >= 10
    assert len(seen.faults) == 5
    with pytest.raises(httpx.TransportError):
        httpx.get(url, trust_env=False)


def body(number: int) -> dict[str, Any]:
    return {"model": "tidal", "prompt": f"prompt {number}", "max_tokens": 8}


def test_a_shortcoming_is_a_failure_a_wrong_answer_another_outcome_or_no_request_at_all() -> None:
    good = {"outcome": "done", "expected": "done", "requests": 9, "failed": 0, "wrong": 0, "seconds": 1, "slowest_s": 1}

    def result(**more: Any) -> list[str]:
        scenario = Scenario(name="x", **{**good, **more})
        sums = {"requests": 1, "failed": 0, "wrong": 0, "seconds": 1, "start_seconds": 1}
        shape = {"engines": "", "prefill": 1, "decode": 1, "clients": 1, "registry": ""}
        return RolloutResult(**sums, **shape, scenarios=(scenario,), machine=machine_facts()).shortcomings()

    assert result() == []
    for more in ({"failed": 1}, {"wrong": 1}, {"outcome": "halted"}, {"requests": 0}):
        assert result(**more)
