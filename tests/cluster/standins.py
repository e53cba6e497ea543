# SPDX-License-Identifier: Apache-2.0
"""Engine stand-ins as child processes, and the questions that tests ask them."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tidal_connector.config import child_environment
from tidal_connector.ids import new_transfer_id
from tidal_connector.vllm_plugin.params import decode_params, prefill_params

COMMAND = [sys.executable, "-m", "tidal_connector.cluster.standin"]
_BOUND_S = 40.0


def until(condition: Callable[[], Any], bound_s: float = _BOUND_S, what: str = "the awaited condition") -> Any:
    """Poll until a condition is true; return what it said."""
    deadline = time.monotonic() + bound_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come within {bound_s:g} s"
        time.sleep(0.02)
    return found


@dataclass
class Standin:
    """One that runs."""

    engine: str
    http: str
    control: str
    process: subprocess.Popen[str]

    def post(self, body: dict[str, Any], path: str = "/v1/completions", timeout_s: float = 30.0) -> httpx.Response:
        return httpx.post(self.http + path, json=body, timeout=timeout_s, trust_env=False)

    def listens(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return bool(httpx.get(self.http + "/health", timeout=10, trust_env=False).status_code)
        return False

    def metrics(self) -> dict[str, float]:
        text = httpx.get(self.http + "/metrics", timeout=10, trust_env=False).text
        return {line.split("{")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines()}


@contextlib.contextmanager
def standin(role: str, engine: str, log: Path, *options: str, host: str = "127.0.0.1") -> Iterator[Standin]:
    """Run one on ports that the kernel chooses."""
    places = ["--http", f"{host}:0", "--control", f"{host}:0"]
    command = [*COMMAND, "--role", role, "--engine", engine, *places, *options]
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=child_environment())
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        found = re.search(r"http (\S+), control (\S+),", said)
        assert found, f"{engine} said {said!r}: {log.read_text()}"
        made = Standin(engine, f"http://{found[1]}", found[2], process)
        until(made.listens, what=f"{engine} listening")
        yield made
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def legs(prefill: Standin, body: dict[str, Any], **wrong: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both legs of one attempt, as the proxy sends them; ``wrong`` replaces parameters of the decode leg."""
    transfer = new_transfer_id()
    mine = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": prefill_params(transfer, "d")}
    theirs = {**decode_params(transfer, prefill.engine, prefill.control), **wrong}
    return mine, {**body, "kv_transfer_params": theirs}
