# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tidal_connector.errors import LayoutMismatch
from tidal_connector.selection.groups import index_groups


@pytest.mark.parametrize(
    ("layers", "leaders", "members"),
    [
        ([0, 1, 2], {0, 1, 2}, [(0,), (1,), (2,)]),
        ([0, 1, 2, 3, 4, 5], {0, 4}, [(0, 1, 2, 3), (4, 5)]),
        ([3, 4, 7], {3, 7}, [(0, 1), (2,)]),  # members are places among the latent caches, not layer numbers
    ],
)
def test_followers_belong_to_the_leader_before_them(
    layers: list[int], leaders: set[int], members: list[tuple[int, ...]]
) -> None:
    groups = index_groups(layers, leaders)
    assert [group.members for group in groups] == members
    assert [group.leader for group in groups] == [m[0] for m in members]


def test_a_first_layer_without_an_indexer_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="layer 0 has no indexer"):
        index_groups([0, 1], {1})
