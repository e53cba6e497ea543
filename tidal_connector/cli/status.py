# SPDX-License-Identifier: Apache-2.0
"""``tidal status``: one table of the cluster, once or again and again.

Exit status 0: every engine is ready; 1: something is not; 2: the registry cannot be reached.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from tidal_connector.cli.ends import clear_ends
from tidal_connector.cli.registry_options import ClusterName, RegistryFile, RegistryUrl, registry_config
from tidal_connector.registry.settings import open_store


def status(
    registry: RegistryUrl = "",
    config: RegistryFile = None,
    cluster: ClusterName = "",
    watch: Annotated[bool, typer.Option("--watch", help="Stay and show it again and again; Ctrl-C ends it.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks, with --watch.", min=0.2)] = 2.0,
    timeout: Annotated[float, typer.Option(help="Seconds that an engine's metrics may take.", min=0.1)] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch one object a line.")] = False,
) -> None:
    """Show a cluster: engines, states, requests and transfers in flight, pool and slots, hit rate, agents, rollout.

    Exit status 0: every engine is ready; 1: something is not; 2: the registry cannot be reached.
    """
    # Here, because it needs an HTTP client, which no other command shall load.
    from rich.console import Console

    from tidal_connector.cli.status_table import drawn, watch_cluster
    from tidal_connector.cluster.overview import overview

    with clear_ends(), open_store(registry_config(config, registry, cluster)) as store:
        if watch:
            watch_cluster(store, every, timeout, as_json)
            return
        found = overview(store, timeout)
        if as_json:
            typer.echo(msgspec.json.encode(found).decode())
        else:
            Console().print(drawn(found))
    if found.problems:
        raise typer.Exit(1)
