# SPDX-License-Identifier: Apache-2.0
"""``tidal serve`` with a stand-in for vLLM and a real etcd, as its users start it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.cluster.standins import COMMAND, until
from tests.etcd import EtcdServer
from tidal_connector.cluster.agent_settings import to_toml
from tidal_connector.cluster.keeper import group_members
from tidal_connector.cluster.orders import Order, encode_order, order_key
from tidal_connector.config import child_environment
from tidal_connector.registry.base import Put, Store
from tidal_connector.registry.members import Member, State, peers
from tidal_connector.registry.settings import RegistryConfig, open_store

TTL_S = 2.0
FAST = {"probe_every_s": 0.2, "probe_s": 1.0, "down_after_s": 1.0, "settle_s": 0.3, "drain_s": 20.0}


@dataclass
class Served:
    """One ``tidal serve``."""

    engine: str
    bed: Bed
    process: subprocess.Popen[bytes]
    log: Path

    def member(self) -> Member | None:
        return self.bed.members().get(self.engine)

    def ready(self, bound_s: float = 40.0) -> Member:
        """Wait until it is announced as ready."""
        return self.reaches(State.READY, bound_s)

    def reaches(self, state: State, bound_s: float = 40.0) -> Member:
        def there() -> Member | None:
            assert self.process.poll() is None, f"{self.engine} ended: {self.said()}"
            member = self.member()
            return member if member is not None and member.state is state else None

        found: Member = until(there, bound_s, f"{self.engine} {state}")
        return found

    def gone(self, bound_s: float = 40.0) -> None:
        until(lambda: self.member() is None, bound_s, f"{self.engine} gone")

    def ends(self, bound_s: float = 40.0) -> int:
        return self.process.wait(bound_s)

    def order(self, order: Order) -> None:
        self.bed.store.write([Put(order_key(self.engine), encode_order(order))])

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> list[int]:
        """The engine's processes, without their keeper."""
        parent = str(self.process.pid)
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[1] == parent:
                    return [pid for pid in group_members(int(entry.name)) if pid != int(entry.name)]
        return []

    def signal_engine(self, number: signal.Signals) -> None:
        for pid in self.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass
class Bed:
    """A cluster of its own in a shared etcd."""

    etcd: EtcdServer
    folder: Path
    name: str
    store: Store
    served: list[Served] = field(default_factory=list)

    def members(self) -> Mapping[Any, Member]:
        return peers(self.store).engines

    def serve(
        self,
        role: str,
        engine: str,
        *args: str,
        standin: tuple[str, ...] = (),
        supervise: Mapping[str, float] | None = None,
        url: str = "",
        model: str = "m",
        environment: Mapping[str, str] | None = None,
        **config: Any,
    ) -> Served:
        """Start one; ``config`` replaces tables of its file."""
        settings: dict[str, Any] = {
            "engine": engine,
            "command": [*COMMAND, *standin],
            "registry": {"url": url or self.etcd.url, "cluster": self.name, "ttl_s": TTL_S},
            "tidal": {"control": {"bind": "127.0.0.1:0"}},
            "supervise": {**FAST, **(supervise or {})},
            **config,
        }
        file = self.folder / f"{engine}.toml"
        file.write_text(to_toml(settings))
        log = self.folder / f"{engine}-{len(self.served)}.log"
        command = [sys.executable, "-m", "tidal_connector.cli", "serve", role, "--config", str(file)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--", "--model", model, *args],
                stdout=output,
                stderr=output,
                env=child_environment(environment),
            )
        served = Served(engine, self, process, log)
        self.served.append(served)
        return served

    def close(self) -> None:
        for served in self.served:
            if served.process.poll() is None:
                served.process.kill()  # its keeper ends the engine
            served.process.wait()
        self.store.close()


@contextlib.contextmanager
def open_bed(etcd: EtcdServer, folder: Path) -> Iterator[Bed]:
    """A bed of its own; everything that it started is ended."""
    name = f"c{time.monotonic_ns()}"
    bed = Bed(etcd, folder, name, open_store(RegistryConfig(url=etcd.url, cluster=name, ttl_s=TTL_S)))
    try:
        yield bed
    finally:
        bed.close()


def answer_of(member: Member, body: Mapping[str, Any], timeout_s: float = 30.0) -> httpx.Response:
    return httpx.post(member.http + "/v1/completions", json=dict(body), timeout=timeout_s, trust_env=False)


def port_of(url: str) -> int:
    """The port of a URL or of ``host:port``."""
    return urlsplit(url if "//" in url else f"//{url}").port or 0
