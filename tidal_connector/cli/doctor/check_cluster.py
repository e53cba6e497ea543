# SPDX-License-Identifier: Apache-2.0
"""Checks of a node's part in a cluster: that it is one of its nodes, models, the agents and their folders. Pure."""

from __future__ import annotations

from tidal_connector.cli.doctor.facts import Facts
from tidal_connector.cli.doctor.finding import Finding, fail, good, warn
from tidal_connector.cli.doctor.wishes import Wishes


def check_nodes(facts: Facts, wishes: Wishes) -> list[Finding]:
    """Whether the cluster knows this machine, and whether each of its nodes has an agent."""
    lines = []
    for wish in wishes.nodes:
        name = f"node {wish.here}"
        if wish.known:
            lines.append(good(name, f"runs {wish.engines} engines of {wish.file}"))
        else:
            text = f"is no node of {wish.file} ({', '.join(wish.nodes)}); looked at as its fullest one would be"
            fix = 'write node = "...", as the cluster calls this machine, into agent.toml, and give it with --config'
            lines.append(warn(name, text, fix))
        agents = facts.registry.agents if facts.registry is not None else None
        if agents is None:
            continue
        lacking = [node for node in wish.nodes if node not in agents]
        if lacking:
            text = f"none runs on {', '.join(lacking)}: their engines would not start"
            lines.append(warn("agents", text, "tidal agent --config configs/agent.toml --node NAME, on each of them"))
        else:
            lines.append(good("agents", f"one on each of {', '.join(wish.nodes)}"))
    return lines


def check_places(_: Facts, wishes: Wishes) -> list[Finding]:
    """Whether the folders that the files name can be used here: models, and the agent's state."""
    sure = all(wish.known for wish in wishes.nodes)
    lines = []
    for place in dict.fromkeys(wishes.places):
        name = "state" if place.field == "state" else "model"
        if not place.problem:
            lines.append(good(name, f"{place.path}, {place.field} of {place.file}"))
            continue
        text = f"{place.path}, {place.field} of {place.file}: {place.problem}"
        if name == "state":
            lines.append(fail(name, text, f"choose another folder, or let the agent write: chown USER {place.path}"))
        else:
            say = fail if sure else warn
            lines.append(say(name, text, "copy or mount the checkpoint on every node that serves it"))
    return lines
