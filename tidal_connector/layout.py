# SPDX-License-Identifier: Apache-2.0
"""The only owner of addresses: layer, region kind and page become (address, length).

A *region* is one cache of one layer: its latents, a part of them, or its index keys. A :class:`KVLayout` says what
a model's regions are (it is what two engines must agree on, by :meth:`KVLayout.fingerprint`); a :class:`Placement`
says where one process keeps them (page size, page count and addresses may differ between peers).
"""

from __future__ import annotations

import enum
import hashlib

import msgspec

from tidal_connector.errors import ConfigError, LayoutMismatch

LAYOUT_VERSION = 1


class RegionKind(enum.StrEnum):
    """What a region holds, in the order in which a layer's regions are listed.

    A host keeps a layer's latents in one region, or their two parts (without and with rope) in one each.
    """

    LATENT = "latent"
    LATENT_NOPE = "latent-nope"
    LATENT_ROPE = "latent-rope"
    INDEX = "index"
    INDEX_SCALE = "index-scale"

    @property
    def latent(self) -> bool:
        """Whether it holds latents, or a part of them; otherwise index keys, or their scales."""
        return self in (RegionKind.LATENT, RegionKind.LATENT_NOPE, RegionKind.LATENT_ROPE)


class Home(enum.StrEnum):
    """Which memory a region lives in, and so which page ids address it."""

    DEVICE = "device"
    HOST = "host"


class RegionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One region as the model defines it.

    Attributes:
        kind: latents or index keys.
        layer: position of the decoder layer, counted from 0.
        row_bytes: bytes of one token's row.
        latent_dtype: dtype name of the latent part (of the whole row for index keys).
        rope_dtype: dtype name of the rope part; empty for index keys.
        rope_bytes: trailing bytes of the row that hold the rope part.
    """

    kind: RegionKind
    layer: int
    row_bytes: int
    latent_dtype: str
    rope_dtype: str = ""
    rope_bytes: int = 0


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What two engines must agree on before a byte moves.

    Attributes:
        model: model kind, such as ``deepseek_v32``.
        regions: all regions, in layer order, latents before index keys within a layer.
        index_topk: entries that a query selects; 0 for dense attention.
        sharing: per layer, the layer whose index selection it uses (itself for a leader); empty for dense.
        rope: canonical text of the rope parameters that change cached keys.
        weights: revision or digest of the checkpoint.
        kv_dtype: vLLM's ``cache_dtype`` after resolution.
        salt: canonical text of LoRA and cache-salt policy.
    """

    model: str
    regions: tuple[RegionSpec, ...]
    index_topk: int
    sharing: tuple[int, ...]
    rope: str
    weights: str
    kv_dtype: str
    salt: str = ""

    def fingerprint(self) -> str:
        """Return 32 hexadecimal digits over everything above and the layout version."""
        body = msgspec.json.encode((LAYOUT_VERSION, self), order="sorted")
        return hashlib.blake2b(body, digest_size=16).hexdigest()

    def differences(self, other: KVLayout, here: str = "here", there: str = "there", most: int | None = None) -> str:
        """Name the fields in which two layouts differ, with both values (mine first), in one line.

        Args:
            other: the other layout.
            here: what the text calls the place of this layout.
            there: what it calls the other's.
            most: so many fields at most, the first ones; None for all.
        """
        found = []
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                found.append(_difference(name, mine, theirs, here, there))
        return "; ".join(found[:most]) or "no difference"

    def row_bytes(self, kind: RegionKind) -> int:
        """Bytes of one token over all regions of a kind."""
        return sum(region.row_bytes for region in self.regions if region.kind is kind)

    @property
    def latent_bytes(self) -> int:
        """Bytes of one token's latents over all layers, in however many regions they are."""
        return sum(region.row_bytes for region in self.regions if region.kind.latent)

    @property
    def index_bytes(self) -> int:
        """Bytes of one token's index keys over all layers, their scales included."""
        return sum(region.row_bytes for region in self.regions if not region.kind.latent)

    def transfer_bytes(self, tokens: int) -> int:
        """Bytes that a hand-over of so many tokens moves: every region's rows, nothing else."""
        return tokens * sum(region.row_bytes for region in self.regions)


def _difference(name: str, mine: object, theirs: object, here: str, there: str) -> str:
    if name != "regions":
        return f"{name}: {mine!r} {here}, {theirs!r} {there}"
    assert isinstance(mine, tuple)
    assert isinstance(theirs, tuple)
    if len(mine) != len(theirs):
        return f"regions: {_count(mine)} {here}, {_count(theirs)} {there}"
    one, other = next((a, b) for a, b in zip(mine, theirs, strict=True) if a != b)
    fields = [field for field in one.__struct_fields__ if getattr(one, field) != getattr(other, field)]
    values = (f"{field} {_shown(one, field)} {here}, {_shown(other, field)} {there}" for field in fields)
    return f"regions, first in the {one.kind} rows of layer {one.layer}: {', '.join(values)}"


def _count(regions: tuple[RegionSpec, ...]) -> str:
    return f"{len(regions)} of {len({region.layer for region in regions})} layers"


def _shown(region: RegionSpec, field: str) -> str:
    value = getattr(region, field)
    return str(value) if isinstance(value, int | RegionKind) else repr(value)


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one process keeps one region.

    Attributes:
        kind, layer, row_bytes: as in :class:`RegionSpec`.
        home: memory, and so the kind of page ids, that the region lives in.
        base: address of page 0 of this layer.
        page_stride: bytes from one page of this layer to its next.
        page_tokens: rows of a page.
        pages: number of pages.
    """

    kind: RegionKind
    layer: int
    row_bytes: int
    home: Home
    base: int
    page_stride: int
    page_tokens: int
    pages: int

    def address(self, page: int, row: int) -> int:
        """Return the address of a row.

        Raises:
            LayoutMismatch: the page or the row lies outside the region.
        """
        if not (0 <= page < self.pages and 0 <= row < self.page_tokens):
            raise LayoutMismatch(
                f"{self.kind} layer {self.layer}: page {page} row {row} is outside "
                f"{self.pages} pages of {self.page_tokens} rows"
            )
        return self.base + page * self.page_stride + row * self.row_bytes

    @property
    def extent(self) -> int:
        """Bytes from ``base`` to the end of the last page."""
        return (self.pages - 1) * self.page_stride + self.page_tokens * self.row_bytes


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All regions of one process, in the order of its :class:`KVLayout`."""

    regions: tuple[Region, ...]

    def check(self, layout: KVLayout) -> None:
        """Verify that the regions are those of the layout, in its order, and do not overlap row for row.

        Raises:
            LayoutMismatch: a region is missing, surplus, of another row size, or empty.
        """
        want = [(spec.kind, spec.layer, spec.row_bytes) for spec in layout.regions]
        have = [(region.kind, region.layer, region.row_bytes) for region in self.regions]
        if want != have:
            missing = [item for item in want if item not in have]
            surplus = [item for item in have if item not in want]
            raise LayoutMismatch(
                f"regions differ from the layout: missing {missing}, surplus {surplus} (kind, layer, row bytes)"
            )
        for region in self.regions:
            if region.pages < 1 or region.page_tokens < 1 or region.page_stride < region.page_tokens * region.row_bytes:
                raise LayoutMismatch(f"{region.kind} layer {region.layer}: pages overlap or are empty: {region!r}")


class BlockBudget(msgspec.Struct, frozen=True):
    """How many blocks there are, and which memory binds.

    Attributes:
        blocks: the smaller of the two limits.
        pool_blocks: blocks that the host pool holds.
        device_blocks: blocks that the device budget holds.
        limit: memory that binds: ``host`` or ``device``.
    """

    blocks: int
    pool_blocks: int
    device_blocks: int
    limit: Home


def blocks_within(pool_bytes: int, latent_block_bytes: int, device_bytes: int, index_block_bytes: int) -> BlockBudget:
    """Divide host pool and device budget into blocks: their number is the smaller of what either holds.

    Args:
        pool_bytes: bytes of the host pool.
        latent_block_bytes: bytes of one block's latents over all layers.
        device_bytes: bytes of the device budget for index keys.
        index_block_bytes: bytes of one block's index keys over all layers.

    Raises:
        ConfigError: not even one block fits.
    """
    pool_blocks = pool_bytes // latent_block_bytes
    device_blocks = device_bytes // index_block_bytes
    blocks = min(pool_blocks, device_blocks)
    if blocks < 1:
        raise ConfigError(
            f"no KV block fits: pool.bytes = {pool_bytes} holds {pool_blocks} blocks of "
            f"{latent_block_bytes} bytes, the device budget of "
            f"{device_bytes} bytes holds {device_blocks} blocks of {index_block_bytes} bytes; "
            "raise the smaller one"
        )
    return BlockBudget(blocks, pool_blocks, device_blocks, Home.HOST if pool_blocks <= device_blocks else Home.DEVICE)
