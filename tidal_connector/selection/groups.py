# SPDX-License-Identifier: Apache-2.0
"""Index groups: a layer that selects (the leader) and the layers after it that reuse its selection (the followers).

Pure. The members of a group select the same positions in each step, so one residency and one plan serve all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tidal_connector.errors import LayoutMismatch


@dataclass(frozen=True, slots=True)
class IndexGroup:
    """Layers that share one selection, as indices into the model's latent caches.

    Attributes:
        members: the leader first, then its followers, in the model's order.
    """

    members: tuple[int, ...]

    @property
    def leader(self) -> int:
        """The layer whose indexer selects."""
        return self.members[0]


def index_groups(layers: Sequence[int], leaders: Collection[int]) -> tuple[IndexGroup, ...]:
    """Group layers by whose selection they read: their own, else that of the nearest leader before them.

    Args:
        layers: decoder-layer numbers of the latent caches, ascending.
        leaders: those that have an indexer.

    Raises:
        LayoutMismatch: the first layer has no indexer, so that nobody selects for it.
    """
    groups: list[list[int]] = []
    for at, layer in enumerate(layers):
        if layer in leaders:
            groups.append([at])
        elif groups:
            groups[-1].append(at)
        else:
            raise LayoutMismatch(f"layer {layer} has no indexer and no layer before it has one to share")
    return tuple(IndexGroup(tuple(members)) for members in groups)
