# SPDX-License-Identifier: Apache-2.0
"""``tidal doctor``: options, lines and exit status; the work is beside this file and imported late."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidal_connector.cli.ends import clear_ends, print_json

if TYPE_CHECKING:
    from tidal_connector.cli.doctor.examine import Diagnosis

_COLOURS = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    config: Annotated[
        list[Path] | None,
        typer.Option(help="File of an engine, a proxy or a cluster; repeatable: all that shall run on this machine."),
    ] = None,
    registry: Annotated[
        str | None, typer.Option(help="Registry to ask, such as etcd://host:2379; that of the files if not said.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look for what keeps engines from starting or from being fast; each line says how to mend it.

    Exit status 1 if a line fails; warnings alone give 0. Nothing is changed, but for one key in the registry, which is
    deleted again.
    """
    import msgspec

    from tidal_connector.cli.doctor.ask_registry import ask_registry
    from tidal_connector.cli.doctor.examine import examine
    from tidal_connector.cli.doctor.gather import gather
    from tidal_connector.cli.doctor.wishes import read_wishes

    with clear_ends():
        wishes = read_wishes(config or [], registry)
        facts = gather(Path("/"), wishes)
        if wishes.registry is not None:
            facts = msgspec.structs.replace(facts, registry=ask_registry(wishes.registry))
        found = examine(facts, wishes)
    if as_json:
        print_json(found)
    else:
        _show(found)
    raise typer.Exit(1 if found.failed else 0)


def _show(found: Diagnosis) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, max_width=34)
    table.add_column(overflow="fold")
    for line in found.findings:
        body = Text(line.text)
        if line.fix:
            body.append(f"\n-> {line.fix}", style="cyan")
        table.add_row(Text(line.state.value, style=_COLOURS[line.state.value]), line.what, body)
    console = Console()
    console.print(table)
    console.print(f"{found.passed} pass, {found.warned} warn, {found.failed} fail", highlight=False)
