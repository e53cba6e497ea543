# SPDX-License-Identifier: Apache-2.0
"""What a cluster's file and an agent's ask of a node beside memory and ports: its name, models, a folder for state."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tidal_connector.cluster.spec import ClusterSpec, Group, filled, names_of, slot_of


class NodeWish(msgspec.Struct, frozen=True):
    """Which of a cluster's nodes this machine is.

    Attributes:
        file: of the cluster.
        here: this machine's name.
        nodes: all that the file names.
        engines: how many of its engines run here; where it does not know this machine, on its fullest node.
    """

    file: str
    here: str
    nodes: tuple[str, ...]
    engines: int

    @property
    def known(self) -> bool:
        """Whether the file names this machine."""
        return self.here in self.nodes


class PlaceWish(msgspec.Struct, frozen=True):
    """A folder that has to be here: which file and field name it, and why it cannot be used (empty: it can)."""

    file: str
    field: str
    path: str
    problem: str


def node_wish(file: str, spec: ClusterSpec, here: str) -> NodeWish:
    """Return which of the cluster's nodes this machine is, and how many engines that means."""
    nodes = tuple(sorted({node for group in spec.group for node in group.nodes}))
    looked_at = [here] if here in nodes else nodes
    counts = (sum(engines_on(group, node) for group in spec.group) for node in looked_at)
    return NodeWish(file, here, nodes, max(counts, default=0))


def engines_on(group: Group, node: str) -> int:
    """Return how many of a group's engines run on a node."""
    return sum(slot_of(group, number).node == node for number in range(group.count))


def model_wishes(file: str, spec: ClusterSpec, wish: NodeWish) -> Iterator[PlaceWish]:
    """Yield the folders of the models that are served here; a name, such as that of a hub's, is none."""
    for group in spec.group:
        for number in range(group.count):
            if wish.known and slot_of(group, number).node != wish.here:
                continue
            path = str(filled(group.model, names_of(group, number)))
            if path.startswith(("/", ".", "~")):
                there = (Path(path) / "config.json").is_file()
                problem = "" if there else "no such folder" if not Path(path).is_dir() else "no config.json in it"
                yield PlaceWish(file, f"model of group {group.name}", path, problem)


def state_wish(file: str, path: str) -> PlaceWish:
    """Return an agent's folder for records and logs; one that is missing is made, if its parents let this user."""
    place = Path(path).absolute()
    nearest = next(each for each in (place, *place.parents) if each.exists())
    problem = ""
    if not nearest.is_dir():
        problem = f"{nearest} is no folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        problem = f"this user may not write {'there' if nearest == place else f'in {nearest}'}"
    return PlaceWish(file, "state", path, problem)
