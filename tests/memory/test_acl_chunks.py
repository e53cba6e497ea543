# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidal_connector.memory.acl.chunks import (
    HUGE,
    PAGE,
    SMALLEST,
    Run,
    check_cuts,
    longest_parted,
    next_chunk,
    plan_chunks,
    smaller,
)

GIB = 1 << 30

pages = st.integers(1, 1 << 20).map(lambda count: count * PAGE)
limits = st.integers(1, 1 << 10).map(lambda count: count * HUGE)


@st.composite
def regions(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...], int]:
    """A length, a limit that makes some hundred chunks at most, cuts, and an address."""
    total = draw(pages)
    limit = draw(limits.filter(lambda limit: total // limit < 300))
    cuts = draw(st.lists(st.integers(0, total // PAGE).map(lambda page: page * PAGE), max_size=20))
    return total, limit, check_cuts(cuts, total), draw(st.integers(1, 1 << 34)) * PAGE


@given(regions())
def test_chunks_cover_the_region_once_and_keep_the_limit(region: tuple[int, int, tuple[int, ...], int]) -> None:
    total, limit, cuts, address = region
    chunks = plan_chunks(total, limit, cuts, address)
    assert [chunk.offset for chunk in chunks] == [0, *(chunk.end for chunk in chunks[:-1])]
    assert chunks[-1].end == total
    assert all(0 < chunk.length <= limit for chunk in chunks)
    assert all(chunk.offset % PAGE == 0 for chunk in chunks)


@given(regions())
def test_a_chunk_ends_at_a_cut_or_on_a_hugepages_border(region: tuple[int, int, tuple[int, ...], int]) -> None:
    total, limit, cuts, address = region
    for chunk in plan_chunks(total, limit, cuts, address)[:-1]:
        reachable = [cut for cut in cuts if chunk.offset < cut <= chunk.offset + limit]
        if reachable:
            assert chunk.end == reachable[-1]
        else:
            assert (address + chunk.end) % HUGE == 0 or chunk.length == limit
            assert chunk.length > limit - HUGE


@given(regions())
def test_no_layer_that_fits_a_chunk_has_a_border_inside(region: tuple[int, int, tuple[int, ...], int]) -> None:
    total, limit, cuts, address = region
    layers = list(zip((0, *cuts), (*cuts, total), strict=True))
    ends = {chunk.end for chunk in plan_chunks(total, limit, cuts, address)}
    for start, end in layers:
        if end - start <= limit:
            assert not [border for border in ends if start < border < end]


def test_no_chunk_goes_on_after_the_last() -> None:
    assert plan_chunks(300 * GIB, 64 * GIB) == (
        *(Run(each * 64 * GIB, 64 * GIB) for each in range(4)),
        Run(256 * GIB, 44 * GIB),
    )


def test_a_region_of_exactly_one_limit_is_one_chunk_whatever_is_cut() -> None:
    """Fewer registrations are better, and none of its layers has a border inside."""
    assert plan_chunks(4 * HUGE, 4 * HUGE, (HUGE, 3 * HUGE)) == (Run(0, 4 * HUGE),)
    assert next_chunk(HUGE, 4 * HUGE, 3 * HUGE, (2 * HUGE,)) == Run(HUGE, 3 * HUGE)


@pytest.mark.parametrize(
    ("borders", "longest"),
    [((), 0), ((0, 2, 5, 9), 0), ((0, 1), 2), ((3,), 3), ((1, 8), 4), ((10,), 0), ((2, 5), 0)],
)
def test_the_longest_layer_with_a_border_inside(borders: tuple[int, ...], longest: int) -> None:
    """Layers from 0 to 2, 2 to 5 and 5 to 9; what lies behind is none."""
    assert longest_parted((0, 2, 5, 9), borders) == longest


def test_a_region_that_begins_between_hugepages_is_back_on_their_borders_after_one_chunk() -> None:
    first, second, *_ = plan_chunks(GIB, 8 * HUGE, address=HUGE + PAGE)
    assert first == Run(0, 8 * HUGE - PAGE)
    assert second == Run(8 * HUGE - PAGE, 8 * HUGE)


def test_a_chunk_may_begin_in_the_middle() -> None:
    assert next_chunk(10 * HUGE, 100 * HUGE, 4 * HUGE, (12 * HUGE, 13 * HUGE, 20 * HUGE)) == Run(10 * HUGE, 3 * HUGE)


@pytest.mark.parametrize("cut", [-PAGE, 1, PAGE + 1, 2 * GIB])
def test_a_cut_where_no_registration_can_begin_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match="expected a multiple of 4096 from 0 to 1073741824"):
        check_cuts([0, cut], GIB)


@given(st.integers(PAGE, 1 << 50))
def test_halving_ends_at_the_smallest(length: int) -> None:
    less = smaller(length)
    assert (less is None) == (length <= SMALLEST)
    if less is not None:
        assert less % HUGE == 0
        assert SMALLEST <= less < length
