# SPDX-License-Identifier: Apache-2.0
"""A cluster of real engines, each on a machine of its own: prefill, one or more decode engines, etcd and the proxy."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.e2e.net import Network, Node
from tests.etcd import etcd_binary
from tidal_connector.cluster.agent_settings import to_toml
from tidal_connector.cluster.launch import ServerProcess, wait_ready
from tidal_connector.cluster.serving import engine_environment
from tidal_connector.cluster.stack import MODEL_NAME, QUIET, StackSettings
from tidal_connector.ids import Role

HTTP_PORT = 8000
CONTROL_PORT = 7100
ETCD_PORT = 2379
START_S = 240.0
QUICK_S = 30.0


class Cluster(msgspec.Struct, frozen=True):
    """What runs, and where; the checks take it for a ``Stack``.

    Attributes:
        network: the machines: ``prefill``, ``decode-0``, ``decode-1`` ..., ``etcd``, ``proxy``.
        family: 4 or 6, the addresses that all of them use.
        settings: of every engine.
        registry: what ``registry.url`` says.
        prefill, decodes, proxy: the servers.
        reference: the plain engine, outside the network.
    """

    network: Network
    family: int
    settings: StackSettings
    registry: str
    prefill: ServerProcess
    decodes: tuple[ServerProcess, ...]
    proxy: ServerProcess
    reference: ServerProcess

    @property
    def decode(self) -> ServerProcess:
        """The first decode engine."""
        return self.decodes[0]


@contextlib.contextmanager
def running_cluster(
    network: Network, family: int, settings: StackSettings, reference: ServerProcess
) -> Iterator[Cluster]:
    """Start everything on the nodes of a network, and wait until all serve and the reference does."""
    registry = f"etcd://{network['etcd'].at(family, ETCD_PORT)}"
    roles = {name: Role.PREFILL if name == "prefill" else Role.DECODE for name in network.names if _is_engine(name)}
    engines = {name: engine(network[name], family, roles[name], settings, registry) for name in roles}
    listen = network["proxy"].at(family, HTTP_PORT)
    command = [sys.executable, "-m", "tidal_connector.cli", "proxy", "--listen", listen, "--registry", registry]
    proxy = network["proxy"].server("proxy", command, f"http://{listen}", settings.logs / "proxy.log", "/ready")
    with contextlib.ExitStack() as stack:
        stack.enter_context(etcd(network["etcd"], family, settings.logs))
        for server in (*engines.values(), proxy):
            stack.enter_context(server)
        stack.callback(_begin_stop, [*engines.values(), proxy])
        wait_ready([*engines.values(), reference], START_S)
        wait_ready([proxy], QUICK_S)
        prefill, *decodes = engines.values()
        yield Cluster(network, family, settings, registry, prefill, tuple(decodes), proxy, reference)


@contextlib.contextmanager
def etcd(node: Node, family: int, folder: Path) -> Iterator[ServerProcess]:
    """Run an etcd of one member on a node, with its data in a folder."""
    client, peer = (f"http://{node.at(family, port)}" for port in (ETCD_PORT, ETCD_PORT + 1))
    command = [
        *(etcd_binary(), "--name", "one", "--data-dir", str(folder / "etcd"), "--logger", "zap", "--log-level", "warn"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"one={peer}"),
    ]
    with node.server("etcd", command, client, folder / "etcd.log") as server:
        wait_ready([server], QUICK_S)
        yield server


def engine(node: Node, family: int, role: Role, settings: StackSettings, registry: str) -> ServerProcess:
    """Return an engine of a node, not started yet; a decode engine listens everywhere and advertises one address."""
    name, address = node.name, node.address(family)
    http: dict[str, Any] = {"bind": node.at(family, HTTP_PORT)}
    control: dict[str, Any] = {"bind": node.at(family, CONTROL_PORT)}
    tidal: dict[str, Any] = {"control": control}
    if role is Role.DECODE:
        everywhere = "[::]" if family == 6 else "0.0.0.0"
        http |= {"bind": f"{everywhere}:{HTTP_PORT}", "advertise": address}
        control |= {"bind": f"{everywhere}:{CONTROL_PORT}", "advertise": address}
        tidal |= {"pool": {"bytes": settings.pool_bytes}, "offload": "on"}
    control |= settings.prefill_tidal["control"]
    file = settings.logs / f"{name}.toml"
    file.write_text(
        to_toml({"engine": name, "node": name, "http": http, "registry": {"url": registry}, "tidal": tidal})
    )
    command = [
        *(sys.executable, "-m", "tidal_connector.cli", "serve", str(role), "--config", str(file), "--"),
        *("--model", str(settings.model), "--served-model-name", MODEL_NAME, "--dtype", settings.dtype),
        *("--enforce-eager", "--no-enable-prefix-caching", "--block-size", str(settings.block_size)),
        *("--max-model-len", str(settings.max_model_len), "--max-num-seqs", str(settings.max_num_seqs)),
        *("--max-num-batched-tokens", str(settings.max_num_batched_tokens)),
        *("--kv-cache-memory-bytes", str(settings.kv_bytes)),
    ]
    url = f"http://{node.at(family, HTTP_PORT)}"
    return node.server(name, command, url, settings.logs / f"{name}.log", environment={**engine_environment(), **QUIET})


def _is_engine(name: str) -> bool:
    return name == "prefill" or name.startswith("decode")


def _begin_stop(servers: Sequence[ServerProcess]) -> None:
    for server in servers:
        server.begin_stop()
