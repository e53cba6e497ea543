# SPDX-License-Identifier: Apache-2.0
"""What a test asks of one engine in a process of its own, what comes back, and how the process is run.

A test makes an :class:`Order`: how the engine is built, and batches of requests, which run one after the other.
:func:`run_order` hands it as JSON to ``single_instance_engine`` in a child process and reads a :class:`Report`. Each
configuration takes its own process, so that engines share nothing; the plain engine's report is made once per
checkpoint and serves all others, because no setting of the cache may change an answer. Blocks; any thread.

A batch may let requests join while others run (``joins``), leave early (``leaves``), or go on from another's answer
(``follows``). Its counters tell what the cache did: ``Batch.gained`` in all, ``Batch.steps`` step by step.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tests.arch.source import ROOT
from tidal_connector.cli.demo.compare import Generated
from tidal_connector.cluster.hugepages import extra_hugepages
from tidal_connector.config import child_environment

POOL_BYTES = 192 << 20
LIMIT_S = 300.0
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the process reads the worker's counters and may patch it
    # The same request ids again in each batch: an id that comes back must not find what its predecessor left.
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Ask(msgspec.Struct, frozen=True):
    """One request.

    Attributes:
        name: its request id; unique within a batch, the same again in others.
        prompt: token ids.
        new_tokens: tokens to generate.
        joins: step before which it is added; requests of the same step are added in order.
        leaves: generated tokens after which its client goes away; 0: it stays to the end.
        follows: name of a request whose prompt and answer come before ``prompt``; it joins after that one has ended.
    """

    name: str
    prompt: list[int]
    new_tokens: int
    joins: int = 0
    leaves: int = 0
    follows: str = ""


class EngineSettings(msgspec.Struct, frozen=True):
    """One engine.

    Attributes:
        model: folder of the checkpoint.
        tidal: the connector's settings of a single instance (role kv_both, no peer); None: no connector.
        blocks: number of KV blocks, where it is to be tight; 0: as many as fit.
        prefix_caching: whether the engine keeps the KV of earlier prompts.
        chunk: tokens of one step.
        seats: requests of one step.
        draft_tokens: tokens that the checkpoint's own drafter proposes per step; 0: no speculative decoding.
        environment: variables of its process besides those that every engine gets.
    """

    model: str
    tidal: dict[str, Any] | None = None
    blocks: int = 0
    prefix_caching: bool = False
    chunk: int = 1024
    seats: int = 8
    draft_tokens: int = 0
    environment: dict[str, str] = {}


class Order(msgspec.Struct, frozen=True):
    """What one process does: build an engine, run batches, each by a name."""

    settings: EngineSettings
    batches: dict[str, list[Ask]]


class Step(msgspec.Struct, frozen=True):
    """One step of the engine: the requests that gained a token, and what the connector's counters gained."""

    tokens: list[str]
    gained: Mapping[str, float]


class Batch(msgspec.Struct, frozen=True):
    """What became of a batch.

    Attributes:
        answers: by request name; of one that left, what had come until then.
        steps: step by step.
        preemptions: how often a request lost its blocks.
        drafts: what a drafter proposed, step by step and by request name.
        accepted: tokens of them that the model would have generated too.
        seconds: from the first step to the last.
    """

    answers: dict[str, Generated]
    steps: list[Step]
    preemptions: int
    drafts: list[dict[str, list[int]]]
    accepted: int
    seconds: float

    @property
    def gained(self) -> dict[str, float]:
        """What the connector's counters gained in all."""
        total: dict[str, float] = {}
        for step in self.steps:
            for name, value in step.gained.items():
                total[name] = total.get(name, 0.0) + value
        return total


class Report(msgspec.Struct, frozen=True):
    """What an order's process says.

    Attributes:
        start_s: seconds from its start until the engine stood.
        batches: what became of each, by name.
        gauges: the connector's gauges at the end.
        log: what the process printed.
    """

    start_s: float
    batches: dict[str, Batch]
    gauges: Mapping[str, float] = {}
    log: str = ""


def run_order(order: Order, script: str = "tests.e2e.single_instance_engine") -> Report:
    """Run an order in a process of its own.

    Raises:
        AssertionError: the process failed; its last lines are shown.
    """
    pool = POOL_BYTES if order.settings.tidal is not None else 0
    with tempfile.TemporaryDirectory(prefix="tidal-single-") as scratch, extra_hugepages(pool):
        given, found, log = (Path(scratch) / name for name in ("order.json", "report.json", "log"))
        given.write_bytes(msgspec.json.encode(order))
        with log.open("wb") as sink:
            done = subprocess.run(
                [sys.executable, "-m", script, str(given), str(found)],
                cwd=ROOT,
                env=child_environment({**_ENVIRONMENT, **order.settings.environment}),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
                check=False,
            )
        printed = log.read_text(errors="replace")
        last = "\n".join(printed.splitlines()[-40:])
        assert done.returncode == 0, f"{script} ended with status {done.returncode}; its last lines:\n{last}"
        return msgspec.structs.replace(msgspec.json.decode(found.read_bytes(), type=Report), log=printed)
