# SPDX-License-Identifier: Apache-2.0
"""The rule by which ranks divide the rows: every row once, nobody idle, neighbouring layers through different cards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidal_connector.control.shares import Ranks, row_bytes, share
from tidal_connector.layout import Home, Region, RegionKind

SIZES = st.integers(1, 17)


def region(kind: RegionKind, layer: int, size: int, home: Home) -> Region:
    return Region(kind, layer, size, home, 4096, 16 * size, 16, 4)


def model(layers: int, every: int, *, offload: bool, split: bool = False) -> list[Region]:
    """Latents in every layer (in two regions where an engine keeps its rope apart), index keys in every so-many-th."""
    home = Home.HOST if offload else Home.DEVICE
    found: list[Region] = []
    for layer in range(layers):
        for size in (1024, 128) if split else (1152,):
            found.append(region(RegionKind.LATENT, layer, size, home))
        if layer % every == 0:
            found.append(region(RegionKind.INDEX, layer, 132, Home.DEVICE))
    return found


MODELS = st.builds(model, st.integers(1, 80), st.integers(1, 5), offload=st.booleans(), split=st.booleans())


def pairs(p_size: int, d_size: int) -> Iterator[Ranks]:
    for p_rank in range(p_size):
        for d_rank in range(d_size):
            yield Ranks(p_rank, p_size, d_rank, d_size)


@given(MODELS, SIZES, SIZES)
def test_every_row_is_written_once_where_memory_is_shared_and_once_for_each_rank_elsewhere(
    there: list[Region], p_size: int, d_size: int
) -> None:
    written = {ranks: share(there, ranks) for ranks in pairs(p_size, d_size)}
    for place, each in enumerate(there):
        writers = [ranks for ranks, mine in written.items() if mine[place]]
        if each.home is Home.HOST:
            assert len(writers) == 1
        else:
            assert sorted(ranks.d_rank for ranks in writers) == list(range(d_size))


@given(MODELS, SIZES, SIZES)
def test_no_rank_carries_more_than_one_layer_of_each_kind_above_another(
    there: list[Region], p_size: int, d_size: int
) -> None:
    load = {p: sum(row_bytes(there, r) for r in pairs(p_size, d_size) if r.p_rank == p) for p in range(p_size)}
    assert max(load.values()) - min(load.values()) <= 1152 + 132
    pool = [each for each in there if each.home is Home.HOST]
    through = {d: sum(row_bytes(pool, r) for r in pairs(p_size, d_size) if r.d_rank == d) for d in range(d_size)}
    assert max(through.values()) - min(through.values()) <= 1152


@given(MODELS, SIZES, SIZES)
def test_the_regions_of_one_layer_and_kind_stay_together(there: list[Region], p_size: int, d_size: int) -> None:
    for ranks in pairs(p_size, d_size):
        mine: dict[tuple[RegionKind, int], bool] = {}
        for each, write in zip(there, share(there, ranks), strict=True):
            assert mine.setdefault((each.kind, each.layer), write) is write


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_engines_of_equally_many_ranks_need_one_connection_for_each(size: int) -> None:
    there = model(61, 1, offload=True)
    assert [r for r in pairs(size, size) if row_bytes(there, r)] == [Ranks(k, size, k, size) for k in range(size)]


def test_neighbouring_layers_leave_through_different_ranks() -> None:
    there = model(78, 4, offload=True)
    writers = [next(r.p_rank for r in pairs(4, 2) if share(there, r)[place]) for place in range(len(there))]
    latents = [writer for writer, each in zip(writers, there, strict=True) if each.kind is RegionKind.LATENT]
    assert latents[:6] == [0, 1, 2, 3, 0, 1]


def test_one_rank_before_one_rank_writes_everything() -> None:
    there = model(61, 1, offload=True)
    assert row_bytes(there, Ranks()) == 61 * (1152 + 132)
