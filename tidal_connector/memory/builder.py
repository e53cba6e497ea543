# SPDX-License-Identifier: Apache-2.0
"""How a memory region is put together: one reserved address range, filled with one kind of pages after the other."""

from __future__ import annotations

import errno
import itertools
import mmap as constants
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from tidal_connector.config import PageKind, PoolConfig
from tidal_connector.errors import ConfigError, PoolExhausted
from tidal_connector.memory import mapping
from tidal_connector.memory.machine import Machine, Mount
from tidal_connector.memory.pages import PageSource, PrivatePages
from tidal_connector.memory.report import GIB, MIB, PAGE_NAMES, RegionReport, size_text

Progress = Callable[[int, int], None]
"""Called with the bytes that are faulted in and the bytes in all."""

_SMALL = constants.PAGESIZE
_STEP = 64 * MIB  # bytes faulted in between two calls of the progress function
_EHWPOISON = 133  # a page with a memory fault; Python has no name for it


class Builder:
    """Fills one reserved address range from its start, one kind of pages after the other."""

    def __init__(
        self,
        length: int,
        settings: PoolConfig,
        progress: Progress | None,
        machine: Machine,
        source: PageSource | None = None,
    ) -> None:
        self.wanted = length
        self.settings = settings
        self.progress = progress
        self.machine = machine
        self.source: PageSource = source or PrivatePages()
        self.notes: list[str] = []
        self.shortages: list[str] = []  # hugepages that were not there; no news where other hugepages were
        self.pieces: list[tuple[PageKind, int]] = []
        self.cursor = 0
        self.base = 0

    @property
    def rest(self) -> int:
        """Bytes that no piece covers yet."""
        return max(0, self.wanted - self.cursor)

    def build(self) -> tuple[int, int, RegionReport]:
        """Return address, length and report of the finished range; leave nothing mapped on failure.

        Raises:
            PoolExhausted: the memory cannot be had.
            ConfigError: the path or the NUMA node does not exist.
        """
        self._check_node()
        space = _up(self.wanted, GIB) + GIB  # room to align the base for the largest page
        start = mapping.reserve(space)
        self.base = _up(start, GIB)
        try:
            for kind in [self.settings.pages] if self.settings.pages else PageKind:
                if self.rest:
                    self._add(kind)
            if self.rest:
                raise PoolExhausted(self._shortage())
            with suppress(OSError):  # a kernel without it only lacks the protection
                mapping.advise(self.base, self.cursor, constants.MADV_DONTFORK)
        except BaseException:
            mapping.unmap(start, space)
            raise
        mapping.unmap(start, self.base - start)
        mapping.unmap(self.base + self.cursor, start + space - self.base - self.cursor)
        return self.base, self.cursor, self._report()

    def _add(self, kind: PageKind) -> None:
        match kind:
            case PageKind.HUGETLBFS:
                self._add_hugetlbfs()
            case PageKind.HUGE_1G:
                self._add_hugepages(kind, GIB)
            case PageKind.HUGE_2M:
                self._add_hugepages(kind, 2 * MIB)
            case PageKind.TRANSPARENT:
                if self.source.transparent(self.machine):
                    self._add_plain(kind)
                else:
                    self.notes.append("transparent hugepages are switched off")
            case PageKind.PLAIN:
                self._add_plain(kind)

    def _add_hugetlbfs(self) -> None:
        mount = self._mount()
        if mount is None:
            if self.settings.pages is PageKind.HUGETLBFS:
                self.notes.append("no writable hugetlbfs mount was found; mount one or set pool.path")
            return
        path, page = mount.path, mount.page
        try:
            descriptor, name = tempfile.mkstemp(prefix="tidal-", dir=path)
        except OSError as error:
            self.notes.append(f"no file could be made in {str(path)!r}: {error.strerror}")
            return
        try:
            os.unlink(name)
            quota = os.fstatvfs(descriptor)
            free = self.machine.free_hugepages(page, self.settings.numa)
            if quota.f_blocks:  # the mount has a limit of its own
                free = min(free, quota.f_bavail)
            self._fill(PageKind.HUGETLBFS, page, free, lambda at, size: self._place_file(descriptor, at, size))
        finally:
            os.close(descriptor)

    def _mount(self) -> Mount | None:
        if self.settings.path is None:
            return next(iter(self.machine.hugetlbfs()), None)
        path = Path(self.settings.path)
        try:
            path.stat()
        except OSError as error:
            raise ConfigError(
                f"pool.path = {str(path)!r}: expected a directory inside a hugetlbfs mount, but: {error.strerror}"
            ) from None
        found = self.machine.mount_of(path)
        if found is None:
            raise ConfigError(f"pool.path = {str(path)!r}: it lies in no hugetlbfs mount (see /proc/self/mounts)")
        return Mount(path, found.page)

    def _place_file(self, descriptor: int, at: int, size: int) -> None:
        # one piece only: the file starts at the region's start
        if self.cursor:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        os.ftruncate(descriptor, size)
        self.source.file(at, size, descriptor)

    def _add_hugepages(self, kind: PageKind, page: int) -> None:
        free = self.machine.free_hugepages(page, self.settings.numa)
        self._fill(kind, page, free, lambda at, size: self.source.hugepages(at, size, page))

    def _fill(self, kind: PageKind, page: int, free: int, place: Callable[[int, int], None]) -> None:
        """Take as many pages as can be had: halve the attempt while it is refused, go on while something is left."""
        if self.cursor % page:
            return
        # A whole gigabyte for the last few bytes is only taken if nothing else is allowed.
        needed = self.rest // page if page == GIB and self.settings.pages is None else -(-self.rest // page)
        had, attempt = 0, min(needed, free)
        while attempt:
            at, size = self.base + self.cursor, attempt * page
            try:
                place(at, size)
                self._bind(at, size)
                populated = self._populate(at, size, page)
            except OSError as error:
                if error.errno not in (errno.ENOMEM, errno.ENOSPC, errno.EINVAL, errno.EPERM):
                    raise
                self.source.drop(at, size)
                attempt //= 2
                continue
            if populated < size:
                self.source.drop(at + populated, size - populated)
            self._count(kind, populated)
            had += populated // page
            attempt = min(needed - had, attempt) if populated == size else 0
        if had < needed:
            self.shortages.append(
                f"{needed} {PAGE_NAMES[kind]} wanted ({size_text(page)} each), {free} free, {had} had"
            )

    def _add_plain(self, kind: PageKind) -> None:
        page = 2 * MIB if kind is PageKind.TRANSPARENT and self.settings.pages else _SMALL
        size = _up(self.rest, page)
        available = self.machine.available()
        if available is not None and size > available:
            self.notes.append(f"{size_text(size)} on {PAGE_NAMES[kind]} wanted, {size_text(available)} available")
            return
        at = self.base + self.cursor
        self.source.plain(at, size)
        advice = constants.MADV_HUGEPAGE if kind is PageKind.TRANSPARENT else constants.MADV_NOHUGEPAGE
        try:
            mapping.advise(at, size, advice)
        except OSError as error:
            if kind is PageKind.TRANSPARENT:
                self.notes.append(f"transparent hugepages were refused: {error.strerror}")
                self.source.drop(at, size)
                return
        self._bind(at, size)
        populated = self._populate(at, size, _SMALL)
        if populated < size:
            self.source.drop(at, size)
            self.notes.append(
                f"only {size_text(populated)} of {size_text(size)} on {PAGE_NAMES[kind]} could be faulted in"
            )
            return
        self._count(kind, size)

    def _populate(self, at: int, size: int, page: int) -> int:
        """Fault pages in, in steps; return the bytes that could be had."""
        if not self.settings.prefault:
            return size
        offset, step = 0, max(page, _STEP)
        while offset < size:
            part = min(step, size - offset)
            try:
                mapping.populate(at + offset, part, page)
            except OSError as error:
                if error.errno not in (errno.ENOMEM, errno.EFAULT, _EHWPOISON):
                    raise
                if step == page:
                    return offset
                step = page  # find the last page that can be had
                continue
            offset += part
            if self.progress is not None:
                self.progress(min(self.wanted, self.cursor + offset), self.wanted)
        return size

    def _bind(self, at: int, size: int) -> None:
        if self.settings.numa is None:
            return
        try:
            mapping.bind(at, size, self.settings.numa)
        except OSError as error:
            self._note_once(f"the pool could not be bound to NUMA node {self.settings.numa}: {error.strerror}")

    def _check_node(self) -> None:
        nodes = self.machine.nodes()
        if self.settings.numa is not None and self.settings.numa not in nodes:
            known = ", ".join(map(str, nodes)) or "none"
            raise ConfigError(f"pool.numa = {self.settings.numa}: no such NUMA node; there are: {known}")

    def _count(self, kind: PageKind, size: int) -> None:
        if size and self.pieces and self.pieces[-1][0] is kind:
            self.pieces[-1] = (kind, self.pieces[-1][1] + size)
        elif size:
            self.pieces.append((kind, size))
        self.cursor += size

    def _note_once(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _shortage(self) -> str:
        had = [
            f"{self.machine.free_hugepages(page)} hugepages of {size_text(page)} are free" for page in (2 * MIB, GIB)
        ]
        available = self.machine.available()
        if available is not None:
            had.append(f"{size_text(available)} of ordinary memory are available")
        if self.settings.pages:
            mend = f"pool.pages = {self.settings.pages.value!r} allows nothing else: reserve more or leave it out"
        else:
            mend = "lower pool.bytes or reserve hugepages"
        tried = "; ".join((*self.shortages, *self.notes))
        return (
            f"a pool of {self.wanted} bytes ({size_text(self.wanted)}) cannot be had: {tried}; {', '.join(had)}; "
            f"{mend} (sysctl vm.nr_hugepages)"
        )

    def _report(self) -> RegionReport:
        limit = self.machine.memlock()
        if limit is not None and limit < self.cursor:
            self.notes.append(f"RLIMIT_MEMLOCK is {size_text(limit)}: RDMA cannot pin the pool (ulimit -l unlimited)")
        explicit = (PageKind.HUGETLBFS, PageKind.HUGE_1G, PageKind.HUGE_2M)
        if any(kind not in explicit for kind, _ in self.pieces):
            self.notes = [*self.shortages, *self.notes]
        huge = 0
        for (kind, size), offset in zip(self.pieces, self._offsets(), strict=True):
            if kind in explicit:
                huge += size
            elif kind is PageKind.TRANSPARENT:
                huge += self.machine.transparent_bytes(self.base + offset, size)
        return RegionReport(self.wanted, tuple(self.pieces), huge, self.settings.numa, tuple(self.notes))

    def _offsets(self) -> Iterator[int]:
        return itertools.accumulate((size for _, size in self.pieces[:-1]), initial=0)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
