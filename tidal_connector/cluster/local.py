# SPDX-License-Identifier: Apache-2.0
"""A whole cluster on this machine: a registry, agents, a proxy, and the engines that the agents start.

Used by ``tidal up``, ``tidal bench rollout`` and tests. Engines outlive their agents by design, so a guard process ends
them: it waits for the end of its standard input, which also comes when whoever made the cluster is killed with -9
(``python -m tidal_connector.cluster.local FOLDER``). Called from one thread.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tidal_connector.address import join_address
from tidal_connector.cluster import processes
from tidal_connector.cluster.agent_folder import AgentFolder
from tidal_connector.cluster.agent_settings import registry_table, to_toml
from tidal_connector.cluster.launch import ServerProcess, StartFailed
from tidal_connector.config import child_environment
from tidal_connector.errors import ConfigError
from tidal_connector.registry.settings import RegistryConfig

_HOST = "127.0.0.1"
_START_S = 30.0
_POLL_S = 0.1
_LOCK_S = 20.0
_TWICE_S = 0.3
_GRACE_S = 15.0
_PORTS = range(20000, 21000)
_NODE_PORTS = 200


def free_fixed_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, outside the kernel's range for connections: still free after a restart."""
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_HOST, port))
            found.append(port)
        if len(found) == count:
            return found
    raise ConfigError(f"no {count} ports from {_PORTS[0]} to {_PORTS[-1]} are free on {_HOST}")


class LocalEtcd:
    """A private etcd, which keeps its ports and its data when it starts again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port, peer, self._metrics = free_fixed_ports(3)
        client, other = f"http://{_HOST}:{self.port}", f"http://{_HOST}:{peer}"
        command = [
            *("etcd", "--name", "private", "--data-dir", str(folder / "etcd")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", other, "--initial-advertise-peer-urls", other),
            *("--initial-cluster", f"private={other}", "--log-level", "warn", "--logger", "zap"),
            *("--listen-metrics-urls", f"http://{_HOST}:{self._metrics}"),
        ]
        self._server = ServerProcess("etcd", command, child_environment(), client, folder / "etcd.log")

    def start(self) -> None:
        """Start it, and wait until it answers.

        Raises:
            StartFailed: it does not.
        """
        self._server.start()
        deadline = time.monotonic() + _START_S
        while not self._healthy():
            if not self._server.running() or time.monotonic() > deadline:
                raise StartFailed(f"etcd does not answer; {self._server.log_tail()}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """End it as a crash does."""
        self._server.kill()

    def stop(self) -> None:
        """End it in order."""
        self._server.stop()

    def wipe(self) -> None:
        """Delete its data, while it is stopped."""
        shutil.rmtree(self._folder / "etcd", ignore_errors=True)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{_HOST}:{self._metrics}/health", timeout=1) as answer:
                return b'"true"' in answer.read()
        except (OSError, urllib.error.URLError):
            return False


class LocalCluster:
    """The processes, as a context manager that starts them and leaves none behind.

    Attributes:
        folder: holds everything: records, logs, data.
        registry: where the cluster's registry is.
        etcd: None where a folder is the registry instead.
        proxy: its server; ``proxy.url`` is where clients ask.

    Args:
        folder: empty, or that of an earlier cluster of the same kind.
        nodes: names of the agents.
        name: of the cluster.
        ttl_s: of leases.
        etcd: whether to run one; None: where it is installed.
        listen: port of the proxy; 0 for a free one.
        proxy: further settings of the proxy.
        supervise: further settings of the engines' supervisors.
        environment: further variables of every engine.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str],
        name: str = "default",
        ttl_s: float = 3.0,
        etcd: bool | None = None,
        listen: int = 0,
        proxy: dict[str, Any] | None = None,
        supervise: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        wanted = shutil.which("etcd") is not None if etcd is None else etcd
        self.etcd = LocalEtcd(folder) if wanted else None
        url = f"etcd://{_HOST}:{self.etcd.port}" if self.etcd is not None else f"file://{folder / 'registry'}"
        self.registry = RegistryConfig(url=url, cluster=name, ttl_s=ttl_s)
        self._agents = {
            node: self._agent(number, node, supervise or {}, environment or {}) for number, node in enumerate(nodes)
        }
        port = listen or free_fixed_ports(1)[0]
        self.proxy = self._server(
            "proxy",
            {"listen": join_address(_HOST, port), **(proxy or {}), "registry": registry_table(self.registry)},
            ["proxy"],
            f"http://{_HOST}:{port}",
        )
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as started:
            if self.etcd is not None:
                started.callback(self.etcd.stop)
                self.etcd.start()
            started.enter_context(_guarded(self.folder))
            for agent in self._agents.values():
                started.enter_context(agent)
            started.enter_context(self.proxy)
            started.callback(self._begin_stop)
            self._exit = started.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def kill_agent(self, node: str) -> None:
        """End an agent with SIGKILL; its engines live on."""
        self._agents[node].kill()

    def start_agent(self, node: str) -> None:
        """Start an agent that was killed."""
        self._agents[node].start()

    def engine_log(self, node: str, engine: str) -> Path:
        """Return the log of an engine."""
        return _state(self.folder, node) / "engines" / engine / "engine.log"

    def log(self, what: str) -> Path:
        """Return the log of the proxy, of etcd or of a node's agent (``agent-NODE``)."""
        return self.folder / f"{what}.log"

    def _begin_stop(self) -> None:
        for server in (self.proxy, *self._agents.values()):
            server.begin_stop()

    def _agent(self, number: int, node: str, supervise: dict[str, Any], environment: dict[str, str]) -> ServerProcess:
        first = _PORTS[-1] + 1 + number * _NODE_PORTS
        settings = {
            "node": node,
            "host": _HOST,
            "state": str(_state(self.folder, node)),
            "ports": f"{first}-{first + _NODE_PORTS - 1}",
            "registry": registry_table(self.registry),
            "supervise": supervise,
            "environment": environment,
        }
        return self._server(f"agent-{node}", settings, ["agent"], "")

    def _server(self, name: str, settings: dict[str, Any], command: list[str], url: str) -> ServerProcess:
        file = self.folder / f"{name}.toml"
        file.write_text(to_toml(settings), encoding="utf-8")
        words = [sys.executable, "-m", "tidal_connector.cli", *command, "--config", str(file)]
        return ServerProcess(name, words, child_environment(), url, self.folder / f"{name}.log")


def _state(folder: Path, node: str) -> Path:
    return folder / "nodes" / node


@contextlib.contextmanager
def _guarded(folder: Path) -> Any:
    """Have a process of its own end the engines at the end of the context, or of this process."""
    guard = subprocess.Popen(
        [sys.executable, "-m", "tidal_connector.cluster.local", str(folder)],
        stdin=subprocess.PIPE,
        env=child_environment(),
        start_new_session=True,
    )
    assert guard.stdin is not None
    try:
        yield
    finally:
        guard.stdin.close()
        guard.wait(_LOCK_S + _GRACE_S + 10.0)


def end_engines(folder: Path) -> None:
    """End every engine that agents in a cluster's folder have started, once these agents have ended."""
    found = []
    for state in sorted((folder / "nodes").glob("*")):
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                with AgentFolder(state) as locked:
                    found += [item.process for item in locked.records().values() if item.process is not None]
                break
            except ConfigError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)
    for _ in range(2):  # the first asks a supervisor to drain, the second to stop at once
        for process in found:
            processes.terminate(process)
        time.sleep(_TWICE_S)
    deadline = time.monotonic() + _GRACE_S
    while any(processes.alive(process) for process in found) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for process in found:
        if processes.alive(process):
            processes.kill_tree(process)


def guard(folder: Path) -> None:
    """Wait for the end of standard input, then end the engines."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the owner's end is what counts
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    end_engines(folder)


if __name__ == "__main__":
    guard(Path(sys.argv[1]))
