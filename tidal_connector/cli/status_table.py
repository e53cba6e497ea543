# SPDX-License-Identifier: Apache-2.0
"""The table of ``tidal status``, and how it is shown again and again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tidal_connector.cluster.overview import Load, Overview, overview
from tidal_connector.errors import RegistryLost
from tidal_connector.registry.base import Store

_COLOURS = {"ready": "green", "starting": "yellow", "draining": "yellow", "down": "red", "absent": "red"}


def watch_cluster(store: Store, every_s: float, timeout_s: float, as_json: bool) -> None:
    """Look again and again until Ctrl-C; a registry that is gone is said, and asked again."""
    last: Overview | None = None
    console = Console()
    live_table = console.is_terminal and not as_json
    shown = Live(console=console, auto_refresh=False) if live_table else contextlib.nullcontext(None)
    with shown as live, contextlib.suppress(KeyboardInterrupt):
        while True:
            began = time.monotonic()
            try:
                found, lost = overview(store, timeout_s), ""
            except RegistryLost as error:
                found, lost = last or Overview(engines=()), str(error)
            if live is not None:
                live.update(drawn(found, last, lost), refresh=True)
            elif as_json:
                typer.echo(msgspec.json.encode({"lost": lost, **msgspec.to_builtins(found)}).decode())
            else:  # into a file or a pipe: one table after another
                console.print(time.strftime("%Y-%m-%d %H:%M:%S"), drawn(found, last, lost), "", sep="\n")
            last = found if not lost else last
            time.sleep(max(0.0, every_s - (time.monotonic() - began)))


def drawn(found: Overview, before: Overview | None = None, lost: str = "") -> Group:
    """Return the cluster as a table with a few lines below.

    Args:
        found: what was seen.
        before: an earlier look, since when hits are counted; None: since each engine's start.
        lost: why ``found`` is old; empty where it is not.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("ENGINE", "ROLE", "STATE", "NODE", "REVISION", "ADDRESS"):
        table.add_column(name, no_wrap=name in ("ENGINE", "STATE"), overflow="fold")
    for name in ("REQUESTS", "TRANSFERS", "POOL", "SLOTS", "HITS"):
        table.add_column(name, justify="right", no_wrap=True)
    earlier = _loads(before)
    for line in found.engines:
        table.add_row(
            line.engine,
            line.role,
            Text(line.state, _COLOURS.get(line.state, "")),
            line.node,
            line.revision or "-",
            Text(line.http.partition("//")[2] or "-"),  # [::1] would be taken for markup
            *_cells(line.load, earlier.get(line.incarnation)),
        )
    lines: list[Table | Text] = [table] if found.engines else []
    if found.rollout:
        lines.append(Text(f"\nrollout {found.rollout}"))
    if found.agents:
        lines.append(Text(("" if found.rollout else "\n") + f"agents {', '.join(found.agents)}"))
    if lost:
        lines.append(Text(f"\nthis is old: {lost}" if found.engines else f"nothing is known yet: {lost}", "red"))
    if found.problems:
        lines.append(Text(("\n" if lines else "") + "\n".join(f"! {problem}" for problem in found.problems), "yellow"))
    return Group(*lines)


def _loads(found: Overview | None) -> Mapping[str, Load]:
    if found is None:
        return {}
    return {line.incarnation: line.load for line in found.engines if line.load is not None and line.incarnation}


def _cells(load: Load | None, before: Load | None) -> list[str]:
    if load is None:
        return ["?"] * 5
    rate = load.hit_rate(before)
    return [
        f"{load.running}+{load.waiting}" if load.waiting else str(load.running),
        str(load.transfers),
        _share(load.pool_used, load.pool_pages),
        _share(load.slots_used, load.slots),
        "-" if rate is None else f"{100 * rate:.1f} %",
    ]


def _share(used: int, of: int) -> str:
    return f"{100 * used / of:.0f} %" if of else "-"
