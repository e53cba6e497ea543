# SPDX-License-Identifier: Apache-2.0
"""Starts pytest in a process that imports the real vLLM 0.23 and vllm-ascend sources, with an NPU's stand-ins.

By hand, for one test and its output: ``python -m tests.vllm_plugin.ascend.bed.run -k selection``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.arch.source import ROOT
from tests.vllm_plugin.ascend.bed.sources import Sources, ensure_sources

IN_BED = ROOT / "tests" / "vllm_plugin" / "ascend" / "in_bed"
PLUGIN = "tests.vllm_plugin.ascend.bed.inner"
SECONDS = 480.0


@dataclass(frozen=True)
class Outcome:
    """What became of one case: passed, failed or skipped, with pytest's text."""

    node: str
    outcome: str
    text: str
    seconds: float


def environment(sources: Sources) -> dict[str, str]:
    """Return the environment in which ``import vllm`` finds the sources before what is installed."""
    return os.environ | {
        "PYTHONPATH": f"{sources.vllm}{os.pathsep}{sources.vllm_ascend}",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "ascend,tidal",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
    }


def command(arguments: Sequence[str]) -> list[str]:
    """Return the command line of the inner pytest."""
    return [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", *arguments]


def run_nodes(nodes: Iterable[str], seconds: float = SECONDS) -> dict[str, list[Outcome]]:
    """Run tests in the bed and return their outcomes by the name of the function, parameters left off.

    Raises:
        SourcesUnavailable, SourcesWrong: the sources are not there and cannot be fetched.
        AssertionError: the process ended without an outcome for a test.
    """
    sources = ensure_sources()
    with tempfile.TemporaryDirectory(prefix="tidal-bed-") as folder:
        path = Path(folder) / "outcomes.jsonl"
        path.touch()
        output = _run([*command(["-q", f"--bed-outcomes={path}", *nodes])], environment(sources), seconds)
        found: dict[str, list[Outcome]] = defaultdict(list)
        for line in path.read_text().splitlines():
            outcome = Outcome(*json.loads(line))
            found[outcome.node.split("[", 1)[0]].append(outcome)
    for node in nodes:
        whole_file = node.split("::", 1)[0]
        if node not in found:
            reason = found.get(whole_file) or [Outcome(node, "failed", f"no outcome; the output was:\n{output}", 0.0)]
            found[node] = reason
    return found


def _run(arguments: list[str], environment: dict[str, str], seconds: float) -> str:
    process = subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(arguments: Sequence[str]) -> int:
    """Run the inner pytest in the foreground; without a path, over the whole folder ``in_bed``."""
    named = any(Path(each.split("::", 1)[0]).exists() for each in arguments)
    wanted = [*arguments] if named else [*arguments, str(IN_BED)]
    return subprocess.run(command(wanted), cwd=ROOT, env=environment(ensure_sources()), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
