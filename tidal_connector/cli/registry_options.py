# SPDX-License-Identifier: Apache-2.0
"""How commands are told where the registry is: ``--registry URL``, or a file that also says how to log in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tidal_connector.cluster.spec import read_spec
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
    table = _table_of(file) if file is not None else {}
    if url:
        table["url"] = url
    if not table.get("url"):
        raise ConfigError("no registry; give --registry etcd://host:2379, or --config FILE with a [registry] table")
    config = convert_strict(RegistryConfig, table, f"{file}: [registry]" if file else "--registry")
    config = msgspec.structs.replace(config, cluster=cluster) if cluster else config
    refuse_absent(config)
    return config


def _table_of(file: Path) -> dict[str, object]:
    given = read_toml(file, "configuration")
    if "group" in given or "cluster" in given:
        spec = read_spec(file)
        return {"cluster": spec.cluster.name, **spec.cluster.registry}
    return dict(given.get("registry", {}))
