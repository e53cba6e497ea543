# SPDX-License-Identifier: Apache-2.0
"""Who writes what where both engines are split over several ranks: one pure rule that both sides compute.

Every rank of a prefill engine holds the same rows, so each has to send only a share of them. Regions in D's host pool
are the same memory for all of D's ranks: each is written once, through one of them. Regions on D's devices are written
once for each rank. The unit is a layer's regions of one kind, so that neighbouring layers leave through different
network cards while later ones are still computed, and rank k of P writes to rank k of D wherever the numbers allow.
Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidal_connector.layout import Home, Region

SHARE_RULE = 1
"""Number of this rule in the handshake: two engines of several ranks must compute the same one. 0 is a release that
knows none and takes every engine for one rank."""


class Ranks(msgspec.Struct, frozen=True):
    """A rank of P before a rank of D.

    Attributes:
        p_rank, p_size: which rank of the prefill engine, of how many.
        d_rank, d_size: which rank of the decode engine, of how many.
    """

    p_rank: int = 0
    p_size: int = 1
    d_rank: int = 0
    d_size: int = 1


def share(there: Sequence[Region], ranks: Ranks) -> tuple[bool, ...]:
    """Say for each region of D whether this rank of P writes it for this rank of D.

    Args:
        there: D's regions in the order of the layout; only kind, layer and home count.
        ranks: the two ranks.
    """
    return tuple(_writer(place, region.home, ranks) for place, region in zip(_places(there), there, strict=True))


def row_bytes(there: Sequence[Region], ranks: Ranks) -> int:
    """Bytes of one token that this rank of P writes for this rank of D, over all regions."""
    return sum(region.row_bytes for region, mine in zip(there, share(there, ranks), strict=True) if mine)


def _writer(place: int, home: Home, ranks: Ranks) -> bool:
    if home is Home.HOST:
        return (place % ranks.p_size, place % ranks.d_size) == (ranks.p_rank, ranks.d_rank)
    return (place * ranks.d_size + ranks.d_rank) % ranks.p_size == ranks.p_rank


def _places(there: Sequence[Region]) -> list[int]:
    """Number the layers of each kind, from 0: layers without index keys leave no gap among those that have some."""
    layers = {kind: sorted({r.layer for r in there if r.kind is kind}) for kind in {r.kind for r in there}}
    numbers = {kind: {layer: place for place, layer in enumerate(found)} for kind, found in layers.items()}
    return [numbers[region.kind][region.layer] for region in there]
