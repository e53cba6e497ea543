# SPDX-License-Identifier: Apache-2.0
"""What ``tidal bench rollout`` works on: a cluster under load, and the things that are done to it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console

from tidal_connector.cli.bench.rollout_load import Load
from tidal_connector.cli.bench.rollout_report import Scenario
from tidal_connector.cluster import rollout as verbs
from tidal_connector.cluster.launch import wait_ready
from tidal_connector.cluster.local import LocalCluster
from tidal_connector.cluster.rollout_records import Rollout, Status
from tidal_connector.cluster.rollout_status import rollout_status
from tidal_connector.cluster.spec import ClusterSpec, build_spec
from tidal_connector.cluster.standin_answers import expected_text
from tidal_connector.cluster.steps_words import Phase
from tidal_connector.errors import RegistryLost, TidalError
from tidal_connector.registry.base import Store
from tidal_connector.registry.settings import open_store

_POLL_S = 0.1
_QUIET_S = 1.0
_OUTAGE_S = 2.0
_DEADLINE_S = {False: 120.0, True: 1800.0}
_READY_S = {False: 60.0, True: 900.0}
_PAUSE_S = {False: 0.0, True: 0.5}
_NODES = ("a", "b")
_PROBE = "the quick brown fox"
_PROBE_TOKENS = 3
_REAL_ARGS = (
    *("--served-model-name", "tidal", "--dtype", "float32", "--enforce-eager", "--block-size", "16"),
    *("--max-model-len", "1024", "--max-num-batched-tokens", "1024", "--no-enable-prefix-caching"),
    *("--kv-cache-memory-bytes", str(128 << 20)),
)


class RolloutOptions(msgspec.Struct, frozen=True):
    """What the command was asked for; its help says what each means."""

    engines: int = 2
    clients: int = 8
    real: bool = False
    etcd: bool = True
    only: tuple[str, ...] = ()
    model: Path | None = None
    keep: Path | None = None


class Bench:
    """A cluster under load, and the things that are done to it."""

    def __init__(self, options: RolloutOptions, folder: Path, console: Console) -> None:
        self.options = options
        self.start_seconds = 0.0
        self._console = console
        self._folder = folder
        self._model = options.model
        self._answers: dict[str, str] = {}
        self._exit = contextlib.ExitStack()
        self.cluster = LocalCluster(
            folder / "cluster",
            _NODES,
            ttl_s=2.0,
            etcd=options.etcd,
            supervise={"probe_every_s": 0.5},
            environment={"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        )

    def __enter__(self) -> Bench:
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            if self.options.real and self._model is None:
                from tidal_connector.modelmaker.api import make_model

                self._model = self._folder / "model"
                make_model(self._model, arch="v32", dtype="float32")
            stack.enter_context(self.cluster)
            self.store: Store = stack.enter_context(open_store(self.cluster.registry))
            self._await(verbs.apply(self.store, self.spec("a"), "bench"), Status.DONE)
            wait_ready([self.cluster.proxy], _DEADLINE_S[False])
            if self.options.real:
                self._learn()
            self.load = stack.enter_context(
                Load(
                    self.cluster.proxy.url,
                    self.options.clients,
                    self._body,
                    self._expected,
                    _PAUSE_S[self.options.real],
                )
            )
            self._exit = stack.pop_all()
        self.start_seconds = round(time.monotonic() - started, 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    # --- what there is ---

    def spec(
        self, revision: str, layout: str = "v1", more: Sequence[str] = (), ready_s: float | None = None
    ) -> ClusterSpec:
        """Return the cluster's specification at a revision.

        Args:
            revision: any text that parts it from others.
            layout: of the stand-ins' KV.
            more: further arguments of the engines.
            ready_s: until a new engine must be healthy; None: plenty.
        """
        group: dict[str, Any] = {
            "count": self.options.engines,
            "nodes": _NODES,
            "environment": {"TIDAL_BENCH_REVISION": revision},
        }
        if self.options.real:
            group |= {"model": str(self._model), "vllm": [*_REAL_ARGS, *more]}
            decode = {"offload": "on", "pool": {"bytes": "128MiB"}}
        else:
            pace = ("--token-ms", "4", "--prefill-ms", "10", "--layout", layout)
            command = (sys.executable, "-m", "tidal_connector.cluster.standin", *pace, *more)
            group |= {"command": command, "vllm": ["--served-model-name", "tidal"]}
            decode = {}
        few = self.options.engines < 2
        return build_spec(
            {
                "cluster": {
                    "max_surge": 1 if few else 0,
                    "max_unavailable": 0 if few else 1,
                    "drain_deadline_s": 30.0,
                    "ready_deadline_s": ready_s or _READY_S[self.options.real],
                    "probe": self._probe(),
                },
                "group": [{"role": "prefill", **group}, {"role": "decode", "tidal": decode, **group}],
            },
            "bench",
        )

    def _probe(self) -> dict[str, Any]:
        probe: dict[str, Any] = {"prompt": _PROBE, "max_tokens": _PROBE_TOKENS, "deadline_s": 60.0}
        if not self.options.real:
            probe["expect"] = expected_text({"prompt": _PROBE, "max_tokens": _PROBE_TOKENS})
        return probe

    def _body(self, number: int) -> dict[str, Any]:
        if self.options.real:
            number %= 24
        words = f"request {number} of a client that must not notice anything, " * (1 + number % 5)
        return {
            "model": "tidal",
            "prompt": words,
            "max_tokens": 4 + number % (5 if self.options.real else 40),
            "temperature": 0.0,
            "ignore_eos": True,
        }

    def _expected(self, body: dict[str, Any]) -> str:
        return self._answers[body["prompt"]] if self.options.real else expected_text(body)

    def _learn(self) -> None:
        """Ask every prompt once while nothing changes: the answers that are expected later."""
        for number in range(24):
            body = self._body(number)
            answer = httpx.post(self.cluster.proxy.url + "/v1/completions", json=body, timeout=120.0, trust_env=False)
            if answer.status_code != httpx.codes.OK:
                raise TidalError(f"the cluster does not serve: {answer.status_code} {answer.text[:300]}")
            self._answers[body["prompt"]] = answer.json()["choices"][0]["text"]

    # --- what is done ---

    def scenario(
        self,
        name: str,
        begin: Callable[[], Rollout],
        expected: Status = Status.DONE,
        midway: Callable[[], None] | None = None,
    ) -> Scenario:
        """Let an operator begin something, disturb it midway, and wait for its end."""
        self.load.take()
        started = time.monotonic()
        begun = begin()
        if midway is not None:
            self._await_midway(begun)
            midway()
        ended = self._await(begun)
        seconds = time.monotonic() - started
        time.sleep(_QUIET_S)  # the aftermath belongs to it
        seen = self.load.take()
        return Scenario(
            name=name,
            outcome=str(ended.status),
            expected=str(expected),
            requests=seen.requests,
            failed=seen.failed,
            wrong=seen.wrong,
            seconds=round(seconds, 1),
            slowest_s=seen.slowest_s,
            faults=seen.faults,
            why=ended.reason,
        )

    def apply(self, spec: ClusterSpec) -> Callable[[], Rollout]:
        """Return an operator who applies a specification."""
        return lambda: verbs.apply(self.store, spec, "bench")

    def undo(self) -> Rollout:
        """Be an operator who returns."""
        return verbs.undo(self.store, "bench")

    def kill_conductor(self) -> None:
        """Kill the agent that conducts with -9, and start it again after a while."""
        node = verbs.read_view(self.store).conductor or _NODES[0]
        self.cluster.kill_agent(node)
        time.sleep(_OUTAGE_S)
        self.cluster.start_agent(node)

    def restart_etcd(self) -> None:
        """Kill etcd with -9, and start it again after a while."""
        if self.cluster.etcd is not None:
            self.cluster.etcd.kill()
            time.sleep(_OUTAGE_S)
            self.cluster.etcd.start()

    def _await_midway(self, begun: Rollout) -> None:
        """Wait until a new engine is on its way."""
        deadline = time.monotonic() + _DEADLINE_S[self.options.real]
        while time.monotonic() < deadline:
            found = rollout_status(verbs.read_view(self.store))
            if any(item.new and item.phase in (Phase.STARTING, Phase.HEALTHY) for item in found.engines):
                return
            if found.rollout.status is not Status.RUNNING or found.rollout.number != begun.number:
                return
            time.sleep(_POLL_S)

    def _await(self, begun: Rollout, wanted: Status | None = None) -> Rollout:
        deadline = time.monotonic() + _DEADLINE_S[self.options.real]
        found = begun
        while time.monotonic() < deadline:
            with contextlib.suppress(RegistryLost):
                found = verbs.read_view(self.store).rollout or begun
                if found.status in (Status.DONE, Status.HALTED):
                    break
            time.sleep(_POLL_S)
        if wanted is not None and found.status is not wanted:
            raise TidalError(f"the cluster did not come up: {found.status} {found.reason}")
        return found
