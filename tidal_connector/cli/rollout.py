# SPDX-License-Identifier: Apache-2.0
"""``tidal rollout``: options, tables and exit statuses; what it does is in ``cluster.rollout``.

Exit status 0: done; 1: the rollout halted, or another one took its place while it was waited for; 2: refused, for
example because another operator's goes on; 3: the time of ``--timeout`` is over and it goes on.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidal_connector.cli.ends import clear_ends, leaves, print_json
from tidal_connector.cli.registry_options import ClusterName, RegistryFile, RegistryUrl, registry_config, registry_of
from tidal_connector.cli.rollout_wait import has_ended, wait_for
from tidal_connector.cluster import rollout as verbs
from tidal_connector.cluster.rollout_records import Rollout, Status
from tidal_connector.cluster.rollout_status import RolloutStatus, rollout_status
from tidal_connector.cluster.spec import read_spec
from tidal_connector.errors import ConfigError
from tidal_connector.registry.base import Store
from tidal_connector.registry.settings import open_store

rollout = typer.Typer(
    help="Upgrade the engines of a cluster step by step, and return. cluster/ROLLOUTS.md tells how it works.",
    no_args_is_help=True,
)

_WAIT_S = 7200.0

SpecFile = Annotated[Path, typer.Argument(help="What the cluster shall be, such as configs/cluster.toml.")]
Wait = Annotated[bool, typer.Option("--wait", help="Stay until it is done or halted; Ctrl-C leaves it going on.")]
WaitS = Annotated[
    float, typer.Option("--timeout", help="Seconds that --wait stays; it goes on after them, exit status 3.", min=0.0)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@rollout.command()
def apply(
    file: SpecFile,
    registry: Annotated[
        str, typer.Option(help="etcd://host:2379 or file:///folder; that of the file's [cluster.registry] if not said.")
    ] = "",
    wait: Wait = False,
    timeout: WaitS = _WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Bring the cluster to what a file says; refused while another rollout goes on."""
    with clear_ends():
        spec = read_spec(file)
        config = registry_of(spec, registry)
        if config is None:
            raise ConfigError("no registry; write [cluster.registry] url = ... into the file, or give --registry URL")
        with open_store(config) as store:
            _say(store, verbs.apply(store, spec, verbs.whoami()), wait, timeout, as_json)


@rollout.command()
def undo(
    to: Annotated[str, typer.Option(help="Revision to return to; the last one that was reached, where not said.")] = "",
    registry: RegistryUrl = "",
    config: RegistryFile = None,
    cluster: ClusterName = "",
    wait: Wait = False,
    timeout: WaitS = _WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Return to the revision before this one; also while a rollout goes on, or after it halted."""
    with clear_ends(), open_store(registry_config(config, registry, cluster)) as store:
        begun = verbs.undo(store, verbs.whoami(), to)
        doubt = verbs.never_reached(verbs.read_view(store), begun)
        if doubt:
            typer.echo(f"tidal: warning: {doubt}; another undo takes its place", err=True)
        _say(store, begun, wait, timeout, as_json)


@rollout.command()
def pause(
    registry: RegistryUrl = "", config: RegistryFile = None, cluster: ClusterName = "", as_json: AsJson = False
) -> None:
    """Begin no further step; what is on its way comes to its end."""
    with clear_ends(), open_store(registry_config(config, registry, cluster)) as store:
        _say(store, verbs.pause(store, verbs.whoami()), False, 0, as_json)


@rollout.command()
def resume(
    registry: RegistryUrl = "",
    config: RegistryFile = None,
    cluster: ClusterName = "",
    wait: Wait = False,
    timeout: WaitS = _WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Go on after a pause; after a halt, start what failed once more."""
    with clear_ends(), open_store(registry_config(config, registry, cluster)) as store:
        _say(store, verbs.resume(store, verbs.whoami()), wait, timeout, as_json)


@rollout.command()
def status(
    registry: RegistryUrl = "",
    config: RegistryFile = None,
    cluster: ClusterName = "",
    wait: Wait = False,
    timeout: WaitS = _WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Show the rollout, its engines and what it waits for. Exit status 1 if it is halted."""
    with clear_ends(), open_store(registry_config(config, registry, cluster)) as store:
        now = verbs.read_view(store).rollout
        if now is None:
            typer.echo("{}" if as_json else "nothing was ever rolled out in this cluster")
            return
        _say(store, now, wait, timeout, as_json)


@rollout.command()
def history(
    registry: RegistryUrl = "", config: RegistryFile = None, cluster: ClusterName = "", as_json: AsJson = False
) -> None:
    """Show the last rollouts: when, by whom, to which revision, and how they ended."""
    with clear_ends(), open_store(registry_config(config, registry, cluster)) as store:
        found = verbs.read_view(store).history
        if as_json:
            print_json(found)
            return
        if not found:
            typer.echo("nothing was ever rolled out in this cluster")
            return
        table = Table("No.", "begun", "took", "what", "revision", "by", "outcome")
        for item in reversed(found):
            table.add_row(
                str(item.number),
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.at)),
                f"{item.ended_at - item.at:.0f} s" if item.ended_at is not None else "",
                str(item.kind),
                item.revision,
                item.by,
                str(item.status) + (f" by {item.changed_by}" if item.status is Status.REPLACED else ""),
            )
        console = Console()
        console.print(table)
        for item in reversed(found):
            if item.reason:
                console.print(f"{item.number}: {item.reason}", highlight=False, markup=False, soft_wrap=True)


def _say(store: Store, begun: Rollout, wait: bool, timeout_s: float, as_json: bool) -> None:
    """Print where a rollout is, after waiting for its end where that is wanted, and exit as the module says."""
    with leaves("the rollout goes on; look at it with: tidal rollout status --wait"):
        found = wait_for(store, begun.number, timeout_s, Console(stderr=True)) if wait else _status(store)
    if as_json:
        print_json(found)
    else:
        show_status(found, Console())
    now = found.rollout
    if now.number != begun.number:
        if wait:
            typer.echo(
                f"tidal: rollout {begun.number} was replaced by rollout {now.number}, {now.kind} of {now.revision} by "
                f"{now.by}",
                err=True,
            )
            raise typer.Exit(1)
    elif now.status is Status.HALTED:
        raise typer.Exit(1)
    elif wait and not has_ended(found, begun.number):
        typer.echo(
            f"tidal: rollout {now.number} is still {now.status} after {timeout_s:g} s, and goes on without this "
            "command; look again with: tidal rollout status --wait",
            err=True,
        )
        raise typer.Exit(3)


def _status(store: Store) -> RolloutStatus:
    return rollout_status(verbs.read_view(store))


def show_status(found: RolloutStatus, console: Console) -> None:
    """Print a rollout and its engines."""
    now = found.rollout
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now.at))
    line = f"rollout {now.number}: {now.kind} of {now.revision}, begun {begun} by {now.by}: {found.summary}"
    console.print(line, soft_wrap=True)
    if now.reason:
        console.print(f"  {now.reason}", highlight=False, markup=False, soft_wrap=True)
    if not found.conductor:
        console.print("  no agent conducts it at the moment")
    table = Table("engine", "node", "revision", "is", "phase", "state", "restarts", "note")
    for item in found.engines:
        table.add_row(
            item.engine,
            item.node + ("" if item.agent else " (no agent)"),
            item.revision,
            "new" if item.new else "old",
            item.phase,
            item.state,
            str(item.restarts or ""),
            Text(item.note),
        )
    console.print(table)
