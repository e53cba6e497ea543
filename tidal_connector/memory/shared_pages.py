# SPDX-License-Identifier: Apache-2.0
"""Pages that several processes map: files without a name, made by one process and handed on as descriptors.

Takes the builder's steps of the process that makes a shared pool (its thread alone calls them); hands on the files, in
address order. A ``memfd`` has no name and a file in a hugetlbfs mount loses its own before a page of it is used, so the
kernel takes the pages back when the last process that maps them has ended, however it ends.
"""

from __future__ import annotations

import fcntl
import mmap as constants
import os
from contextlib import suppress
from dataclasses import dataclass

from tidal_connector.errors import LayoutMismatch
from tidal_connector.memory import mapping
from tidal_connector.memory.machine import Machine
from tidal_connector.memory.report import GIB


@dataclass(slots=True)
class PoolFile:
    """One file of a pool, mapped whole.

    Attributes:
        descriptor: open as long as the file may be handed on.
        at: where this process maps it.
        size: bytes.
    """

    descriptor: int
    at: int
    size: int


class SharedPages:
    """The files of a pool that is being built: a :class:`~tidal_connector.memory.pages.PageSource`."""

    def __init__(self) -> None:
        self.files: list[PoolFile] = []

    def file(self, at: int, size: int, descriptor: int) -> None:
        """Map the first bytes of a hugetlbfs file."""
        mapping.place_file(at, size, descriptor)
        self.files.append(PoolFile(os.dup(descriptor), at, size))

    def hugepages(self, at: int, size: int, page: int) -> None:
        """Make and map a file on hugepages of ``page`` bytes."""
        self._make(at, size, os.MFD_HUGETLB | (page.bit_length() - 1) << mapping.MAP_HUGE_SHIFT)

    def plain(self, at: int, size: int) -> None:
        """Make and map a file on ordinary pages."""
        self._make(at, size, 0)

    def drop(self, at: int, size: int) -> None:
        """Unmap, and cut what lies there off its file."""
        mapping.unmake(at, size)
        while self.files and self.files[-1].at + self.files[-1].size > at:
            last = self.files[-1]
            last.size = max(0, at - last.at)
            if last.size:
                os.ftruncate(last.descriptor, last.size)
                return
            os.close(self.files.pop().descriptor)

    def transparent(self, machine: Machine) -> bool:
        """What the kernel says of memory that processes share."""
        return machine.shared_transparent()

    def seal(self) -> None:
        """Fix the files' sizes, so that no process can take pages from under the others."""
        for each in self.files:
            with suppress(OSError):  # a file in a hugetlbfs mount cannot be sealed
                fcntl.fcntl(each.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    def close(self) -> None:
        """Close the descriptors; what is mapped stays. Idempotent."""
        while self.files:
            os.close(self.files.pop().descriptor)

    def _make(self, at: int, size: int, flags: int) -> None:
        descriptor = os.memfd_create("tidal-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        try:
            os.ftruncate(descriptor, size)
            mapping.place_file(at, size, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self.files.append(PoolFile(descriptor, at, size))


def map_files(sizes: tuple[int, ...], descriptors: list[int], prefault: bool) -> tuple[int, int]:
    """Map another process's files one behind the other, as that process does; return address and length.

    Args:
        sizes: bytes of each file.
        descriptors: the files, which stay open.
        prefault: enter every page into this process's tables, too. The pages are there already, and as nobody uses
            them before all ranks have them, an old kernel's way of touching each does no harm.

    Raises:
        LayoutMismatch: a file is not of its size.
        OSError: the kernel refuses.
    """
    length = sum(sizes)
    space = -(-length // GIB) * GIB + GIB  # room to align the base as the builder does
    start = mapping.reserve(space)
    base = at = -(-start // GIB) * GIB
    try:
        for size, descriptor in zip(sizes, descriptors, strict=True):
            status = os.fstat(descriptor)
            if status.st_size != size:
                raise LayoutMismatch(f"a file of the shared pool has {status.st_size} bytes: expected {size}")
            mapping.place_file(at, size, descriptor)
            if prefault:
                mapping.populate(at, size, status.st_blksize)
            at += size
        with suppress(OSError):  # a kernel without it only lacks the protection
            mapping.advise(base, length, constants.MADV_DONTFORK)
    except BaseException:
        mapping.unmap(start, space)
        raise
    mapping.unmap(start, base - start)
    mapping.unmap(base + length, start + space - base - length)
    return base, length
