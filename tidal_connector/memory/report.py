# SPDX-License-Identifier: Apache-2.0
"""What a memory region was made of, as a value and as a sentence."""

from __future__ import annotations

import msgspec

from tidal_connector.config import PageKind

MIB, GIB = 1 << 20, 1 << 30
PAGE_NAMES = {
    PageKind.HUGETLBFS: "hugetlbfs pages",
    PageKind.HUGE_1G: "1 GiB hugepages",
    PageKind.HUGE_2M: "2 MiB hugepages",
    PageKind.TRANSPARENT: "transparent hugepages",
    PageKind.PLAIN: "ordinary pages",
}
"""Page kinds as they are called in messages."""


class RegionReport(msgspec.Struct, frozen=True):
    """What a region was made of.

    Attributes:
        wanted: bytes that were asked for.
        pieces: kinds of pages and the bytes on each, in address order.
        hugepage_bytes: bytes that lie on hugepages of any kind (transparent ones as counted by the kernel).
        numa: node that the region is bound to.
        notes: one sentence for each thing that was wanted and not had.
    """

    wanted: int
    pieces: tuple[tuple[PageKind, int], ...]
    hugepage_bytes: int
    numa: int | None
    notes: tuple[str, ...]

    def line(self) -> str:
        """Return everything in one readable line."""
        parts = [f"{size_text(length)} on {PAGE_NAMES[kind]}" for kind, length in self.pieces]
        node = "" if self.numa is None else f", NUMA node {self.numa}"
        notes = "".join(f"; {note}" for note in self.notes)
        return f"pool of {size_text(self.wanted)}: {' + '.join(parts)}{node}{notes}"


def size_text(count: int) -> str:
    """Return bytes in the largest unit that fits, such as ``1.5 GiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"
