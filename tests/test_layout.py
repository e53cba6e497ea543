# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidal_connector.errors import ConfigError, LayoutMismatch
from tidal_connector.layout import Home, KVLayout, Placement, Region, RegionKind, RegionSpec, blocks_within


def layout(layers: int = 3, row: int = 1152, **changes: object) -> KVLayout:
    regions = []
    for layer in range(layers):
        regions.append(RegionSpec(RegionKind.LATENT, layer, row, "bfloat16", "bfloat16", 128))
        regions.append(RegionSpec(RegionKind.INDEX, layer, 132, "uint8"))
    made = KVLayout("deepseek_v32", tuple(regions), 2048, tuple(range(layers)), "{}", "w1", "auto")
    return msgspec.structs.replace(made, **changes)


def region(kind: RegionKind, layer: int, row: int, pages: int = 4, tokens: int = 16) -> Region:
    home = Home.HOST if kind is RegionKind.LATENT else Home.DEVICE
    return Region(kind, layer, row, home, 4096, tokens * row, tokens, pages)


def placement(of: KVLayout) -> Placement:
    return Placement(tuple(region(spec.kind, spec.layer, spec.row_bytes) for spec in of.regions))


def test_equal_layouts_have_equal_fingerprints_in_every_process() -> None:
    # Pinned: a change of this value parts new engines from old ones, and LAYOUT_VERSION must rise with it.
    assert layout().fingerprint() == "eb69ca32c81c2f6c7fe0bd93965be251"


@pytest.mark.parametrize(
    "change",
    [
        {"model": "glm_moe_dsa"},
        {"index_topk": 64},
        {"sharing": (0, 0, 0)},
        {"rope": '{"theta": 1}'},
        {"weights": "w2"},
        {"kv_dtype": "fp8"},
        {"salt": "lora"},
        {"regions": layout(layers=2).regions},
        {"regions": layout(row=656).regions},
    ],
)
def test_every_field_is_part_of_the_fingerprint_and_named_when_it_differs(change: dict[str, object]) -> None:
    other = layout(**change)
    assert other.fingerprint() != layout().fingerprint()
    text = layout().differences(other)
    assert next(iter(change)) in text
    assert "here" in text
    assert "there" in text


def test_both_values_stand_beside_their_places() -> None:
    narrow, other = layout(row=656), layout(weights="rev-b")
    text = layout().differences(narrow, "at 'p'", "at 'd'")
    assert text == "regions, first in the latent rows of layer 0: row_bytes 1152 at 'p', 656 at 'd'"
    fewer = msgspec.structs.replace(other, regions=other.regions[:2])
    assert layout().differences(fewer) == "regions: 6 of 3 layers here, 2 of 1 layers there; weights: " + (
        f"{layout().weights!r} here, 'rev-b' there"
    )
    assert layout().differences(fewer, most=1) == "regions: 6 of 3 layers here, 2 of 1 layers there"


def test_bytes_of_a_transfer_are_rows_times_regions() -> None:
    assert layout().transfer_bytes(10) == 10 * 3 * (1152 + 132)
    assert layout().row_bytes(RegionKind.INDEX) == 3 * 132


@given(page=st.integers(0, 3), row=st.integers(0, 15))
def test_addresses_follow_strides(page: int, row: int) -> None:
    found = region(RegionKind.LATENT, 0, 1152).address(page, row)
    assert found == 4096 + (page * 16 + row) * 1152


@pytest.mark.parametrize(("page", "row"), [(-1, 0), (4, 0), (0, 16), (0, -1)])
def test_an_address_outside_is_refused(page: int, row: int) -> None:
    with pytest.raises(LayoutMismatch, match="outside"):
        region(RegionKind.LATENT, 0, 1152).address(page, row)


def test_a_placement_fits_its_layout_or_is_refused() -> None:
    placement(layout()).check(layout())
    with pytest.raises(LayoutMismatch, match="missing"):
        Placement(placement(layout()).regions[:-1]).check(layout())
    overlapping = msgspec.structs.replace(placement(layout()).regions[0], page_stride=1)
    with pytest.raises(LayoutMismatch, match="overlap"):
        Placement((overlapping, *placement(layout()).regions[1:])).check(layout())


@given(
    pool=st.integers(0, 1 << 40),
    device=st.integers(0, 1 << 36),
    latent=st.integers(1, 1 << 24),
    index=st.integers(1, 1 << 20),
)
def test_blocks_fit_both_memories_and_one_more_does_not(pool: int, device: int, latent: int, index: int) -> None:
    try:
        budget = blocks_within(pool, latent, device, index)
    except ConfigError:
        assert pool < latent or device < index
        return
    assert budget.blocks * latent <= pool
    assert budget.blocks * index <= device
    more = budget.blocks + 1
    assert more * latent > pool or more * index > device
    assert budget.limit is (Home.HOST if more * latent > pool else Home.DEVICE)
