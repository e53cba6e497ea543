# SPDX-License-Identifier: Apache-2.0
"""The host pool's memory: one contiguous range, on as many hugepages as can be had, and a report of what it got.

Takes the pool's settings and a length; hands on an address, a writable buffer and a report. The range is one
registration for every transport although its pieces may have different page kinds: as many hugepages as are free, the
rest as what follows in the order of :class:`~tidal_connector.config.PageKind`, never silently. Everything is faulted
in before the region is handed on (unless told otherwise), so that a page that cannot be had is an error here and no
SIGBUS in the middle of a request. Nothing has a name in a file system afterwards: a killed process leaves nothing.

The range is not inherited by forked children: a copy-on-write fault under a registration would part the process from
its own transport. Whoever makes the memory known to a device holds the region meanwhile (:meth:`MemoryRegion.hold`), so
that it is never unmapped under a registration. One thread builds and closes a region; any may use its memory.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from contextlib import suppress

from tidal_connector.config import PoolConfig
from tidal_connector.errors import ConfigError, Conflict, TidalError
from tidal_connector.log import get_logger
from tidal_connector.memory import mapping
from tidal_connector.memory.builder import Builder, Progress
from tidal_connector.memory.machine import Machine
from tidal_connector.memory.report import RegionReport, size_text

_log = get_logger(__name__)


class MemoryRegion:
    """A mapped range; close it, or use it as a context manager.

    Attributes:
        address: first byte.
        length: bytes, rounded up to the page size of the last piece.
        report: what it is made of.
    """

    def __init__(
        self, address: int, length: int, report: RegionReport, release: Callable[[], None] | None = None
    ) -> None:
        """Take over a mapped range; ``release`` gives it back, and where it is None the range is unmapped."""
        self.address = address
        self.length = length
        self.report = report
        self._release = release or (lambda: mapping.unmap(address, length))
        self._holds: dict[str, Callable[[], None]] = {}
        owner = (ctypes.c_ubyte * length).from_address(address)
        self._owner = weakref.ref(owner)  # dies with the last view of the memory
        self._buffer = memoryview(owner).cast("B")
        self._open = True

    @property
    def buffer(self) -> memoryview:
        """The memory as writable bytes.

        Raises:
            ValueError: the region is closed.
        """
        if not self._open:
            raise ValueError("the memory region is closed")
        return self._buffer

    def hold(self, name: str, end: Callable[[], None]) -> None:
        """Keep the memory mapped until :meth:`drop` is called with the same name.

        Args:
            name: what the memory is used for, such as ``"registration with NPU 0"``.
            end: called by :meth:`close` where the hold is still there, the newest first; it ends the use and drops the
                hold. Where it raises, the mapping stays.

        Raises:
            ValueError: the region is closed.
            Conflict: it has a hold of this name.
        """
        if not self._open:
            raise ValueError("the memory region is closed")
        if name in self._holds:
            raise Conflict(f"the memory region has a {name} already: close that one first")
        self._holds[name] = end

    def drop(self, name: str) -> None:
        """End a hold; nothing happens where there is none of this name."""
        self._holds.pop(name, None)

    def close(self) -> None:
        """Give the memory back. Idempotent. While it is in use the mapping stays; this is logged."""
        if not self._open:
            return
        self._open = False
        with suppress(BufferError):  # a view of this very view
            self._buffer.release()
        self._end_holds()
        if self._holds or self._owner() is not None:
            use = next(iter(self._holds), "view of the pool")
            _log.warning("a %s is in use: its %s stay until this process ends", use, size_text(self.length))
            return
        self._release()

    def _end_holds(self) -> None:
        for name, end in reversed(list(self._holds.items())):
            _log.info("the pool is closed before its %s: that is ended first", name)
            try:
                end()
            except TidalError as error:
                _log.error("the pool's %s cannot be ended: %s", name, error)

    def __enter__(self) -> MemoryRegion:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_region(
    length: int,
    settings: PoolConfig,
    progress: Progress | None = None,
    machine: Machine | None = None,
) -> MemoryRegion:
    """Map a region of at least ``length`` bytes.

    Args:
        length: bytes wanted; rounded up to the page size of the last piece.
        settings: demanded kind of pages, hugetlbfs path, NUMA node, prefaulting; its size is not used.
        progress: called while pages are faulted in.
        machine: what the machine has; None asks the kernel.

    Raises:
        PoolExhausted: the memory cannot be had, or not as the one kind that ``settings.pages`` demands.
        ConfigError: ``settings.path`` or ``settings.numa`` names nothing that exists, or ``length`` < 1.
    """
    if length < 1:
        raise ConfigError(f"pool of {length} bytes: expected at least 1")
    return MemoryRegion(*Builder(length, settings, progress, machine or Machine()).build())
