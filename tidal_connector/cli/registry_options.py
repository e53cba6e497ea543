# SPDX-License-Identifier: Apache-2.0
"""How commands are told where the registry is: ``--registry URL``, or a file that also says how to log in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tidal_connector.cluster.spec import ClusterSpec, read_spec
from tidal_connector.errors import ConfigError
from tidal_connector.registry.settings import RegistryConfig, refuse_absent
from tidal_connector.tables import convert_strict, read_toml

RegistryUrl = Annotated[
    str, typer.Option("--registry", help="etcd://host:2379 or file:///folder; that of --config where not said.")
]
RegistryFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="Take the registry, with TLS and password, from this file of an engine, an agent, a proxy or a cluster.",
    ),
]
ClusterName = Annotated[str, typer.Option("--cluster", help="Name of the cluster, where several share a registry.")]


def registry_config(file: Path | None, url: str, cluster: str) -> RegistryConfig:
    """Return where the registry is, for commands that make none.

    Args:
        file: a TOML file with a ``[registry]`` or, of a whole cluster, a ``[cluster.registry]`` table.
        url: counts before the file's.
        cluster: counts before the file's.

    Raises:
        ConfigError: nothing says it, the file cannot be read, or it is a folder that is not there.
    """
    given = read_toml(file, "configuration") if file is not None else {}
    if file is not None and ("group" in given or "cluster" in given):
        config = registry_of(read_spec(file), url)
    else:
        config = _joined(given.get("registry", {}), url, f"{file}: [registry]" if file else "--registry")
    if config is None:
        raise ConfigError("no registry; give --registry etcd://host:2379, or --config FILE with a [registry] table")
    config = msgspec.structs.replace(config, cluster=cluster) if cluster else config
    refuse_absent(config)
    return config


def registry_of(spec: ClusterSpec, url: str = "") -> RegistryConfig | None:
    """Return where the registry of a cluster's file is; None where nothing says it.

    Args:
        spec: the file, whose name of the cluster counts.
        url: counts before the file's.

    Raises:
        ConfigError: a field is wrong, or is another cluster's.
    """
    name, table = spec.cluster.name, spec.cluster.registry
    if table.get("cluster", name) != name:
        raise ConfigError(
            f"cluster.name = {name!r}, but cluster.registry.cluster = {table['cluster']!r}; leave the latter out"
        )
    return _joined({**table, "cluster": name}, url, "cluster.registry")


def _joined(table: Mapping[str, object], url: str, where: str) -> RegistryConfig | None:
    table = {**table, **({"url": url} if url else {})}
    return convert_strict(RegistryConfig, table, where) if table.get("url") else None
