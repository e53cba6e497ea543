# SPDX-License-Identifier: Apache-2.0
"""The ``[registry]`` table of every file of settings, and the store that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from tidal_connector.address import parse_address
from tidal_connector.config import grpc_environment
from tidal_connector.errors import ConfigError
from tidal_connector.registry.addresses import is_loopback
from tidal_connector.registry.base import Store
from tidal_connector.registry.keys import is_name

_SCHEMES = '"etcd://host:2379" (more, parted by commas), "file:///a/directory" or, in tests, "memory:"'
_ETCD_ONLY = ("user", "password_file", "ca", "certificate", "key")


class RegistryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the cluster's registry is.

    Attributes:
        url: ``etcd://host:2379,host2:2379``, ``file:///run/tidal`` (one machine), ``memory:`` (one process, tests).
        cluster: parts clusters that share a store.
        ttl_s: a dead engine's entry is gone after so many seconds, at most; etcd grants whole ones.
        user: of etcd, with ``password_file``.
        password_file: file whose first line is the password; read anew at each login.
        ca: PEM file of the authority that signed etcd's certificate; turns TLS on.
        certificate: PEM file of this client's certificate, with ``key``.
        key: PEM file of its private key.
    """

    url: str
    cluster: str = "default"
    ttl_s: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 10.0
    user: str = ""
    password_file: str = ""
    ca: str = ""
    certificate: str = ""
    key: str = ""


def endpoints_of(url: str) -> list[tuple[str, int]]:
    """Return host and port of each endpoint in ``etcd://host:port,host:port``.

    Raises:
        ConfigError: one cannot be read.
    """
    parts = [part.strip() for part in url.removeprefix("etcd://").rstrip("/").split(",")]
    return [parse_address("registry.url", part) for part in parts]


def on_one_machine(config: RegistryConfig) -> bool:
    """Whether the registry can only be asked from the machine that it is on."""
    return not config.url.startswith("etcd://") or all(is_loopback(host) for host, _ in endpoints_of(config.url))


def check(config: RegistryConfig) -> None:
    """Check what the types do not say, without opening anything but the files that it names.

    Raises:
        ConfigError: a field is wrong or contradicts another one.
    """
    if not is_name(config.cluster):
        raise ConfigError(f"registry.cluster = {config.cluster!r}: expected letters, digits and . _ : @ + ~ = -")
    if config.url.startswith("etcd://"):
        endpoints_of(config.url)
        _check_etcd(config)
        return
    if config.url.startswith("file://"):
        if not config.url.removeprefix("file://").startswith("/"):
            raise ConfigError(f'registry.url = {config.url!r}: expected an absolute path, as in "file:///run/tidal"')
    elif config.url not in ("memory:", "memory://"):
        raise ConfigError(f"registry.url = {config.url!r}: expected {_SCHEMES}")
    for field in _ETCD_ONLY:
        if getattr(config, field):
            raise ConfigError(f"registry.{field} is set, but registry.url = {config.url!r} is no etcd; take it out")


def _check_etcd(config: RegistryConfig) -> None:
    for one, other in (("user", "password_file"), ("certificate", "key")):
        if bool(getattr(config, one)) != bool(getattr(config, other)):
            lone, lacking = (one, other) if getattr(config, one) else (other, one)
            raise ConfigError(f"registry.{lone} is set without registry.{lacking}; set both, or neither")
    if config.certificate and not config.ca:
        raise ConfigError("registry.certificate is set without registry.ca; TLS needs the authority's certificate")
    for field in ("password_file", "ca", "certificate", "key"):
        path = getattr(config, field)
        try:
            empty = bool(path) and not Path(path).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"registry.{field} = {path!r}: cannot be read ({error.strerror})") from None
        if empty:
            raise ConfigError(f"registry.{field} = {path!r}: the file is empty")


class NothingThere(ConfigError):
    """A directory, or a cluster in it, that nobody has made."""


def refuse_absent(config: RegistryConfig) -> None:
    """Refuse a directory that is not there, for those who only read or give orders.

    Whoever announces an engine, runs an agent or begins the first rollout makes it; to everybody else it is a typing
    error. Of etcd nothing is asked: there a cluster without entries is none.

    Raises:
        ConfigError: a field is wrong.
        NothingThere: there is no such directory, or no such cluster in it.
    """
    check(config)
    if not config.url.startswith("file://"):
        return
    place = Path(config.url.removeprefix("file://"))
    if not place.is_dir():
        raise NothingThere(f"registry.url = {config.url!r}: no such folder; the first agent or engine makes it")
    if not (place / config.cluster).is_dir():
        known = ", ".join(sorted(each.parent.name for each in place.glob("*/entries"))) or "none"
        raise NothingThere(f"registry.cluster = {config.cluster!r}: no such cluster in {config.url}; there: {known}")


def open_store(config: RegistryConfig) -> Store:
    """Open the store; nothing is asked of a server yet, so that one that starts slowly does no harm.

    Raises:
        ConfigError: a field is wrong, or the directory cannot be had.
    """
    check(config)
    if config.url.startswith("etcd://"):
        grpc_environment()
        from tidal_connector.registry.etcd_store import EtcdStore

        return EtcdStore(config)
    if config.url.startswith("file://"):
        from tidal_connector.registry.file import FileStore

        return FileStore(Path(config.url.removeprefix("file://")) / config.cluster)
    from tidal_connector.registry.memory import MemoryStore

    return MemoryStore()
