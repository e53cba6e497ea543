# SPDX-License-Identifier: Apache-2.0
"""Where a region's pages come from: the steps of its builder that differ between private and shared memory.

:class:`PrivatePages` maps memory that only this process sees; :class:`~tidal_connector.memory.shared_pages.SharedPages`
maps files without a name that other processes can map, too. The builder's thread calls both.
"""

from __future__ import annotations

from typing import Protocol

from tidal_connector.memory import mapping
from tidal_connector.memory.machine import Machine


class PageSource(Protocol):
    """Maps pages at fixed addresses. Every method raises ``OSError`` with the kernel's number where it is refused."""

    def file(self, at: int, size: int, descriptor: int) -> None:
        """Map the first bytes of a hugetlbfs file; the descriptor is the caller's to close."""

    def hugepages(self, at: int, size: int, page: int) -> None:
        """Map hugepages of ``page`` bytes, all or none."""

    def plain(self, at: int, size: int) -> None:
        """Map memory on ordinary pages, which may be advised to become transparent hugepages."""

    def drop(self, at: int, size: int) -> None:
        """Give pages back that were mapped last, or were to be; their addresses stay reserved."""

    def transparent(self, machine: Machine) -> bool:
        """Say whether plain memory of this source can become transparent hugepages."""


class PrivatePages:
    """Pages of this process alone."""

    def file(self, at: int, size: int, descriptor: int) -> None:
        """Map the first bytes of a file."""
        mapping.place_file(at, size, descriptor)

    def hugepages(self, at: int, size: int, page: int) -> None:
        """Map anonymous hugepages."""
        mapping.place_hugepages(at, size, page)

    def plain(self, at: int, size: int) -> None:
        """Map anonymous memory."""
        mapping.place_plain(at, size)

    def drop(self, at: int, size: int) -> None:
        """Unmap, and keep the addresses."""
        mapping.unmake(at, size)

    def transparent(self, machine: Machine) -> bool:
        """What the kernel says of anonymous memory."""
        return machine.transparent()
