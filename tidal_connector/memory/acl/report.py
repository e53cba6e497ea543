# SPDX-License-Identifier: Apache-2.0
"""What a registration came to, as a value and as a sentence. Pure."""

from __future__ import annotations

import msgspec

from tidal_connector.memory.report import size_text


class RegistrationReport(msgspec.Struct, frozen=True):
    """What a registration came to.

    Attributes:
        device: the NPU's number.
        library: the runtime's file.
        chunks: bytes of each registration, in address order.
        runs: bytes of each range whose alias has no border, in address order.
        how: calls and flags that did it, each once.
        borrowed: bytes that another component had registered.
        notes: one sentence for each thing that was tried in vain.
    """

    device: int
    library: str
    chunks: tuple[int, ...]
    runs: tuple[int, ...]
    how: tuple[str, ...]
    borrowed: int
    notes: tuple[str, ...]

    def line(self) -> str:
        """Return everything in one readable line."""
        sizes = " + ".join(f"{self.chunks.count(each)} x {size_text(each)}" for each in dict.fromkeys(self.chunks))
        borders = f", aliases in {len(self.runs)} parts" if len(self.runs) > 1 else ""
        borrowed = f"; {size_text(self.borrowed)} registered by another component" if self.borrowed else ""
        notes = "".join(f"; {note}" for note in self.notes)
        return f"registered with NPU {self.device}: {sizes} by {', '.join(self.how)}{borders}{borrowed}{notes}"
