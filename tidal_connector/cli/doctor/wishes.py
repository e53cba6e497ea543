# SPDX-License-Identifier: Apache-2.0
"""What files of settings ask of a machine: pools, ports, addresses, transports, a registry. Only reads the files."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tidal_connector.address import is_unspecified, parse_address, parse_host
from tidal_connector.cli.doctor.cluster_wishes import (
    NodeWish,
    PlaceWish,
    engines_on,
    model_wishes,
    node_wish,
    state_wish,
)
from tidal_connector.cli.registry_options import registry_of
from tidal_connector.cluster.agent_settings import read_agent_config
from tidal_connector.cluster.serving import read_serve_config
from tidal_connector.cluster.spec import filled, names_of, read_spec
from tidal_connector.config import DeviceAccess, Offload, PageKind, Protocol, TidalConfig, load_config
from tidal_connector.errors import ConfigError
from tidal_connector.ids import Role
from tidal_connector.proxy.settings import check_config, read_config
from tidal_connector.registry.addresses import check_host, split
from tidal_connector.registry.settings import RegistryConfig
from tidal_connector.tables import read_toml


class PoolWish(msgspec.Struct, frozen=True):
    """A host pool: which file asks for it, its bytes, pages, path and NUMA node, where set, and how NPUs reach it."""

    file: str
    bytes: int
    pages: PageKind | None = None
    path: str | None = None
    node: int | None = None
    register: DeviceAccess = DeviceAccess.AUTO


class PortWish(msgspec.Struct, frozen=True):
    """A port to listen on: which file and field ask for it; port 0 takes any."""

    file: str
    field: str
    host: str
    port: int


class PortRange(msgspec.Struct, frozen=True):
    """A range from which an agent takes ports for its engines."""

    file: str
    first: int
    last: int


class AddressWish(msgspec.Struct, frozen=True):
    """An address that others are told: which file and field, and why nobody could use it (empty: they can)."""

    file: str
    field: str
    text: str
    problem: str


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the files ask for.

    Attributes:
        files: that were read well.
        problems: what is wrong with a file, by file.
        ranges: from which agents take ports.
        protocols: of Mooncake.
        nodes: which node of each cluster this machine is.
        places: folders that have to be here.
        node: this machine's name, as an agent's file has it; empty: its host name.
        registry: the first one that is named.
    """

    files: tuple[str, ...] = ()
    problems: Mapping[str, str] = {}
    pools: tuple[PoolWish, ...] = ()
    ports: tuple[PortWish, ...] = ()
    addresses: tuple[AddressWish, ...] = ()
    ranges: tuple[PortRange, ...] = ()
    nodes: tuple[NodeWish, ...] = ()
    places: tuple[PlaceWish, ...] = ()
    protocols: frozenset[Protocol] = frozenset()
    registry: RegistryConfig | None = None
    node: str = ""

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools together."""
        return sum(pool.bytes for pool in self.pools)

    @property
    def pins(self) -> bool:
        """Whether a transport locks the pool in memory."""
        return bool(self.protocols & {Protocol.RDMA, Protocol.ASCEND})


def read_wishes(files: Sequence[Path], registry_url: str | None = None) -> Wishes:
    """Read files for engines, proxies and clusters; what is wrong with one does not keep the others from being read.

    Args:
        files: as ``tidal serve``, ``tidal proxy`` or ``tidal rollout`` take them.
        registry_url: a registry to ask, instead of the one that the files name.

    Raises:
        ConfigError: a file does not exist.
    """
    found, problems = Wishes(), {}
    for path in files:
        if not path.is_file():
            raise ConfigError(f"configuration {path}: no such file")
    for path in sorted(files, key=_is_cluster):  # an agent's file says which of the cluster's nodes this is
        try:
            found = _joined(found, _read(path, found.node, registry_url or ""))
        except ConfigError as error:
            problems[str(path)] = str(error)
    registry = found.registry
    if registry_url:
        given = registry or RegistryConfig(url=registry_url)
        registry = msgspec.structs.replace(given, url=registry_url)
    return msgspec.structs.replace(found, problems=problems, registry=registry)


_AGENT_KEYS = {"state", "ports", "host", "bind"}


def _is_cluster(path: Path) -> bool:
    try:
        return "group" in _table(path)
    except ConfigError:
        return False


def _table(path: Path) -> dict[str, Any]:
    return read_toml(path, "configuration")


def _read(path: Path, node: str, registry_url: str) -> Wishes:
    given = _table(path)
    if "group" in given:
        return _cluster(path, node, registry_url)
    if "engine" in given:
        return _engine(path)
    if given.keys() & _AGENT_KEYS:
        return _agent(path)
    return _proxy(path)


def _agent(path: Path) -> Wishes:
    config = read_agent_config(path)
    ports = config.port_range()
    return Wishes(
        files=(str(path),),
        addresses=(_address(str(path), "host", config.host),),
        ranges=(PortRange(str(path), ports[0], ports[-1]),),
        places=(state_wish(str(path), config.state),),
        registry=config.registry,
        node=config.node,
    )


def _engine(path: Path) -> Wishes:
    config = read_serve_config(path)
    tidal = load_config(config.tidal, f"{path}: [tidal]")
    ports, addresses = _control(str(path), tidal)
    if config.http.bind:
        host, port = parse_host("http.bind", config.http.bind)
        ports.append(PortWish(str(path), "http.bind", host, port))
        if config.registry is not None:
            addresses.append(_address(str(path), "http.advertise", config.http.advertise or host))
    return Wishes(
        files=(str(path),),
        pools=_pools(str(path), tidal, config.tidal, 1),
        ports=tuple(ports),
        addresses=tuple(addresses),
        protocols=frozenset({tidal.transfer.protocol}),
        registry=config.registry,
    )


def _control(file: str, tidal: TidalConfig) -> tuple[list[PortWish], list[AddressWish]]:
    host, port = parse_address("control.bind", tidal.control.bind)
    given = tidal.control.advertise
    if not given and is_unspecified(host):
        problem = (
            f"control.bind = {host!r} listens on every address, and control.advertise does not say which peers use"
        )
        addresses = [AddressWish(file, "control.bind", host, problem)]
    else:
        addresses = [_address(file, "control.advertise" if given else "control.bind", given or host)]
    if tidal.transfer.host:
        addresses.append(_address(file, "transfer.host", tidal.transfer.host))
    return [PortWish(file, "control.bind", host, port)], addresses


def _pools(file: str, tidal: TidalConfig, given: Mapping[str, Any], engines: int) -> tuple[PoolWish, ...]:
    # "auto" depends on the role, which the file does not say: a pool that is described is meant.
    if tidal.offload is Offload.OFF or (tidal.offload is Offload.AUTO and "pool" not in given):
        return ()
    pool = tidal.pool
    return (PoolWish(file, pool.size, pool.pages, pool.path, pool.numa, pool.register),) * engines


def _proxy(path: Path) -> Wishes:
    config = read_config(path)
    host, port = config.address()
    if config.registry is None:
        check_config(config)
    return Wishes(files=(str(path),), ports=(PortWish(str(path), "listen", host, port),), registry=config.registry)


def _cluster(path: Path, node: str, registry_url: str) -> Wishes:
    spec, pools, protocols = read_spec(path), [], set()
    wish = node_wish(str(path), spec, node or socket.gethostname())
    for group in spec.group:
        given = filled(group.tidal, names_of(group, 0))
        tidal = load_config(given, f"{path}: group {group.name}: tidal")
        # A machine that the file does not know is looked at as the fullest node.
        engines = max(engines_on(group, name) for name in ([wish.here] if wish.known else group.nodes))
        wanted = tidal.offload is not Offload.AUTO or group.role is Role.DECODE
        pools += _pools(str(path), tidal, {"pool": {}} if wanted else {}, engines)
        protocols.add(tidal.transfer.protocol)
    return Wishes(
        files=(str(path),),
        pools=tuple(pools),
        nodes=(wish,),
        places=tuple(model_wishes(str(path), spec, wish)),
        protocols=frozenset(protocols),
        registry=registry_of(spec, registry_url),
    )


def _address(file: str, field: str, text: str) -> AddressWish:
    try:
        check_host(field, split(field, text)[0])
    except ConfigError as error:
        return AddressWish(file, field, text, str(error))
    return AddressWish(file, field, text, "")


def _joined(one: Wishes, other: Wishes) -> Wishes:
    return Wishes(
        files=one.files + other.files,
        pools=one.pools + other.pools,
        ports=one.ports + other.ports,
        addresses=one.addresses + other.addresses,
        ranges=one.ranges + other.ranges,
        nodes=one.nodes + other.nodes,
        places=one.places + other.places,
        protocols=one.protocols | other.protocols,
        node=one.node or other.node,
        registry=one.registry or other.registry,
    )
