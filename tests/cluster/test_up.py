# SPDX-License-Identifier: Apache-2.0
"""tidal up: what it makes of a cluster's file, and a whole cluster that starts, serves and leaves nothing behind."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from tidal_connector.cli.up import UpOptions, local_spec
from tidal_connector.cluster.spec import build_spec, read_spec
from tidal_connector.cluster.standin_answers import expected_text

ROOT = Path(__file__).parents[2]
READY_S = 60.0


def test_the_example_becomes_a_small_cluster_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()  # made already
    said = io.StringIO()
    spec = read_spec(ROOT / "configs/cluster.toml")
    options = UpOptions(ROOT / "configs/cluster.toml")
    found = local_spec(spec, options, tmp_path, Console(file=said, width=200))
    assert "/models/DeepSeek-V3.2 is not on this machine" in said.getvalue()
    assert [(group.name, group.count) for group in found.group] == [("prefill", 1), ("decode", 1)]
    for group in found.group:
        assert group.model == str(tmp_path / "model")
        assert "--tensor-parallel-size" not in group.vllm
        assert group.vllm[:2] == ("--served-model-name", "deepseek")
        assert (group.port, group.control_port) == (0, 0)
    assert found.groups()["decode"].tidal == {"offload": "on", "pool": {"bytes": "256MiB"}}
    assert found.cluster.allow_outage


def test_a_model_that_is_here_or_that_was_chosen_keeps_its_arguments(tmp_path: Path) -> None:
    group = {"count": 3, "nodes": ["a"], "model": str(tmp_path), "vllm": ["--max-model-len", "9"]}
    spec = build_spec({"group": [{"role": "prefill", **group}, {"role": "decode", **group}]}, "x")
    quiet = Console(file=io.StringIO())
    found = local_spec(spec, UpOptions(tmp_path, count=2), tmp_path, quiet)
    assert (found.group[0].model, found.group[0].vllm) == (str(tmp_path), ("--max-model-len", "9"))
    assert found.group[0].count == 2
    other = tmp_path / "other"
    found = local_spec(spec, UpOptions(tmp_path, model=other, count=0), tmp_path, quiet)
    assert (found.group[0].model, found.group[0].vllm) == (str(other), ("--max-model-len", "9"))
    assert found.group[0].count == 3


def write_standins(path: Path) -> None:
    command = f'command = ["{sys.executable}", "-m", "tidal_connector.cluster.standin"]'
    lines = ["[cluster]", "drain_deadline_s = 5", "ready_deadline_s = 40"]
    for role in ("prefill", "decode"):
        lines += ["[[group]]", f'role = "{role}"', "count = 2", 'nodes = ["a", "b"]', command]
        lines += ['vllm = ["--served-model-name", "tidal"]']
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def processes_of(word: str) -> list[str]:
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if word in line]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.faults
@pytest.mark.timeout(180)
def test_a_cluster_comes_up_serves_and_leaves_nothing_behind(tmp_path: Path, end: signal.Signals) -> None:
    file, keep, log = tmp_path / "cluster.toml", tmp_path / "up", tmp_path / "log"
    write_standins(file)
    command = [sys.executable, "-m", "tidal_connector.cli", "up", str(file), "--keep", str(keep)]
    with log.open("wb") as output:
        up = subprocess.Popen(
            [*command, "--listen", "127.0.0.1:0"], stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + READY_S
        while "Ctrl-C ends everything" not in log.read_text():
            assert up.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        found = re.search(r"proxy +(http://\S+)", log.read_text())
        assert found
        body = {"model": "tidal", "prompt": "Hello", "max_tokens": 5}
        answer = httpx.post(found[1] + "/v1/completions", json=body, timeout=20.0, trust_env=False)
        assert answer.json()["choices"][0]["text"] == expected_text(body)
        assert len(processes_of(str(keep))) > 4
        for engine in ("prefill-0", "decode-0"):  # its way is told while it goes on, not only its end
            assert re.search(rf"^\[ *\d+ s\] {engine} on a, revision \w+: starting", log.read_text(), re.MULTILINE)
    finally:
        os.killpg(up.pid, end)
        status = up.wait(60)
    assert status == (-9 if end is signal.SIGKILL else 130)
    deadline = time.monotonic() + 60.0
    while left := processes_of(str(keep)):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    assert not processes_of(f"standin --host 127.0.0.1 --port {found[1].rpartition(':')[2]}")
