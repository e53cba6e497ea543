# SPDX-License-Identifier: Apache-2.0
"""``tidal drain``: options, what is said, and the exit status.

Exit status 0: ordered, or, with ``--wait``, gone; 1: not gone in time; 2: no such engine, or the registry cannot be
reached.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from tidal_connector.cli.ends import clear_ends, leaves
from tidal_connector.cli.registry_options import ClusterName, RegistryFile, RegistryUrl, registry_config
from tidal_connector.cluster.drain import await_end, order_drain, withdraw_drain
from tidal_connector.cluster.rollout import whoami
from tidal_connector.ids import EngineId
from tidal_connector.registry.members import Member
from tidal_connector.registry.settings import open_store

_STOP_S = 30.0  # beyond the deadline: the engine's own end


def drain(
    engine: Annotated[str, typer.Argument(help="Its name, as tidal status shows it.")],
    registry: RegistryUrl = "",
    config: RegistryFile = None,
    cluster: ClusterName = "",
    deadline: Annotated[float, typer.Option(help="Seconds that its running requests have.", min=0.001)] = 60.0,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until it has stopped.")] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Withdraw the order: an agent starts the engine again.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Take an engine out of service: no new requests, the running ones finish, then it stops.

    An engine that an agent keeps stays down until the order is withdrawn (--cancel).

    Exit status 0: ordered, or, with --wait, stopped; 1: not stopped in time; 2: no such engine, or no registry.
    """
    with clear_ends(), open_store(registry_config(config, registry, cluster)) as store:
        name = EngineId(engine)
        if cancel:
            found = withdraw_drain(store, name)
            _say(as_json, {"engine": engine, "cancelled": found}, "withdrawn" if found else "there was no order")
            return
        member = order_drain(store, name, deadline, whoami())
        ended = None
        with leaves(f"the order to {engine} stands; tidal drain {engine} --cancel withdraws it"):
            if wait:
                ended = await_end(store, member, deadline + _STOP_S, _Progress(member, as_json))
        text = (
            "ordered to drain and stop"
            if ended is None
            else "it has stopped"
            if ended
            else "it has not stopped in time"
        )
        if member.revision and ended is not False:  # else its order goes with it
            text += f", and stays down until: tidal drain {engine} --cancel"
        _say(as_json, {"engine": engine, "was": member.state, "ended": ended}, text)
    if ended is False:
        raise typer.Exit(1)


class _Progress:
    """Says each new state once."""

    def __init__(self, member: Member, silent: bool) -> None:
        self._silent = silent
        self._last = str(member.state)

    def __call__(self, member: Member) -> None:
        text = str(member.state)
        if text != self._last and not self._silent:
            typer.echo(f"{member.engine}: {text}")
        self._last = text


def _say(as_json: bool, result: dict[str, object], text: str) -> None:
    typer.echo(msgspec.json.encode(result).decode() if as_json else f"{result['engine']}: {text}")
