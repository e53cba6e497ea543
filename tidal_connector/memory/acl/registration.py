# SPDX-License-Identifier: Apache-2.0
"""A memory region made known to one NPU: its chunks, their aliases, and their end in reverse order.

Takes an open region; hands on aliases for kernels. While it lives it holds the region, so that the memory is never
unmapped under it: a region that is closed first ends it first. If a chunk fails, those before it are unregistered
again, the last first, and the error says what else may be done. One thread registers and closes (each sets the device
that it needs, and puts the thread's own back); any may ask for aliases.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tidal_connector.config import PoolConfig
from tidal_connector.errors import DeviceFailed
from tidal_connector.log import get_logger
from tidal_connector.memory.acl.addresses import DeviceAlias, HostAddress
from tidal_connector.memory.acl.chunk_mapping import PAGES, Mapped, map_chunk
from tidal_connector.memory.acl.chunks import HUGE, PAGE, Run, check_cuts, longest_parted, next_chunk, smaller
from tidal_connector.memory.acl.codes import NO_MEMORY, NOT_REGISTERED
from tidal_connector.memory.acl.report import RegistrationReport
from tidal_connector.memory.acl.runtime import AclRuntime
from tidal_connector.memory.region import MemoryRegion
from tidal_connector.memory.report import MIB, size_text

_log = get_logger(__name__)

_ELSE = (
    'or set pool.register = "runtime" (memory of aclrtMallocHost, all that Linux up to 5.10 can register) or "off" '
    "(kernels on the NPU then cannot read the pool)"
)


@dataclass(frozen=True, slots=True)
class _Chunk:
    run: Run
    mapped: Mapped

    def reaches(self, other: _Chunk) -> bool:
        """Say whether the other's alias begins where this one's ends."""
        return self.mapped.pointer + self.run.length == other.mapped.pointer


class HostRegistration:
    """The registration of one region with one NPU; close it, or use it as a context manager.

    Attributes:
        region: the memory.
        device: the NPU's number.
    """

    def __init__(self, region: MemoryRegion, runtime: AclRuntime, device: int) -> None:
        self.region = region
        self.device = device
        self._runtime = runtime
        self._name = f"registration with NPU {device}"
        self._chunks: list[_Chunk] = []
        self._runs: tuple[Run, ...] = ()
        self._pointers: tuple[int, ...] = ()
        self._notes: list[str] = []
        self._asked = self._limit = 0  # most bytes of a chunk: as set, and as the runtime takes them

    def alias(self, offset: int, length: int) -> DeviceAlias:
        """Return where kernels find ``length`` bytes of the region from ``offset`` on.

        Raises:
            DeviceFailed: the range crosses a border at which the alias jumps, or is too long for one registration.
            ValueError: the range is not within the region, or the registration is closed.
        """
        if not self._runs:
            raise ValueError(f"the {self._name} is closed")
        if not (offset >= 0 and 0 < length <= self.region.length - offset):
            raise ValueError(f"bytes {offset} to {offset + length} of a region of {self.region.length} bytes")
        found = bisect_right(self._runs, offset, key=lambda run: run.offset) - 1
        run = self._runs[found]
        if offset + length > run.end:
            if length > self._limit:
                raise self._too_long(length)
            raise DeviceFailed(
                f"bytes {offset} to {offset + length} of the pool: the alias on NPU {self.device} jumps at {run.end}; "
                "place each layer within one of contiguous_runs(), or name the layers' starts as cuts when registering"
            )
        return DeviceAlias(self._pointers[found] + offset - run.offset, length, self.device)

    def contiguous_runs(self) -> tuple[Run, ...]:
        """Return the ranges of the region within which the alias has no border, in order; together they cover it."""
        return self._runs

    def report(self) -> RegistrationReport:
        """Return what the registration came to."""
        return RegistrationReport(
            device=self.device,
            library=self._runtime.path,
            chunks=tuple(chunk.run.length for chunk in self._chunks),
            runs=tuple(run.length for run in self._runs),
            how=tuple(dict.fromkeys(chunk.mapped.how for chunk in self._chunks)),
            borrowed=sum(chunk.run.length for chunk in self._chunks if not chunk.mapped.ours),
            notes=tuple(self._notes),
        )

    def close(self) -> None:
        """Unregister everything, the last chunk first. Idempotent.

        Raises:
            DeviceFailed: a chunk cannot be unregistered. The others are; the region stays mapped for this one, and a
                further call tries it again.
        """
        self._runs = ()
        if not self._chunks:
            self.region.drop(self._name)
            return
        left: list[_Chunk] = []
        failed: DeviceFailed | None = None
        with self._runtime.on(self.device):
            while self._chunks:
                chunk = self._chunks.pop()
                try:
                    self._unregister(chunk)
                except DeviceFailed as error:
                    left.insert(0, chunk)
                    failed = failed or error
        if failed is not None:
            self._chunks = left
            raise failed
        self.region.drop(self._name)

    def __enter__(self) -> HostRegistration:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _register(self, limit: int, cuts: Sequence[int], ways: tuple[int, ...]) -> None:
        self._asked = self._limit = limit
        self.region.hold(self._name, self.close)
        try:
            with self._runtime.on(self.device):
                while self._end < self.region.length:
                    self._add(cuts, ways)
        except DeviceFailed as error:
            done = f"{size_text(self._end)} of {size_text(self.region.length)}"
            self._roll_back()
            text = f"the pool cannot be registered with NPU {self.device} ({done} were): {error}; {_ELSE}"
            raise DeviceFailed(text, error.call, error.code) from error
        except BaseException:
            self._roll_back()
            raise
        starts = [0, *(b.run.offset for a, b in itertools.pairwise(self._chunks) if not a.reaches(b))]
        pointer = {chunk.run.offset: chunk.mapped.pointer for chunk in self._chunks}
        self._pointers = tuple(pointer[start] for start in starts)
        ends = [*starts[1:], self.region.length]
        self._runs = tuple(Run(start, end - start) for start, end in zip(starts, ends, strict=True))
        if parted := longest_parted(cuts, starts):
            failure = self._too_long(parted)  # what it says ends with the registration
            self._roll_back()
            raise failure

    def _too_long(self, length: int) -> DeviceFailed:
        largest = max(chunk.run.length for chunk in self._chunks)
        mends = []
        if length > self._asked:
            mends.append(f'set pool.register_chunk = "{-(-length // HUGE) * HUGE // MIB}MiB" or more')
        if self._limit < self._asked:
            mends.append(f"the runtime refused more at once ({NO_MEMORY}): upgrade the driver")
        return DeviceFailed(
            f"a tensor over {size_text(length)} of the pool (a layer's rows) must lie within one registration with NPU "
            f"{self.device}, and the largest that was taken has {size_text(largest)} (pool.register_chunk = "
            f"{size_text(self._asked)}); {'; '.join(mends)}, or lower pool.bytes"
        )

    def _roll_back(self) -> None:
        try:
            self.close()
        except DeviceFailed as error:
            _log.error("the pool stays mapped: a part of it cannot be unregistered: %s", error)

    @property
    def _end(self) -> int:
        return self._chunks[-1].run.end if self._chunks else 0

    def _add(self, cuts: Sequence[int], ways: tuple[int, ...]) -> None:
        """Register the next chunk, or find that it was too large and lower the limit."""
        run = next_chunk(self._end, self.region.length, self._limit, cuts, self.region.address)
        try:
            mapped = map_chunk(self._runtime, self._at(run), run.length, ways)
        except DeviceFailed as error:
            less = smaller(run.length)
            if error.code != NO_MEMORY or less is None:
                raise
            self._notes.append(f"{size_text(run.length)} at once were refused ({NO_MEMORY})")
            self._limit = less
            return
        self._chunks.append(_Chunk(run, mapped))

    def _unregister(self, chunk: _Chunk) -> None:
        if not chunk.mapped.ours:
            return
        try:
            self._runtime.unregister(self._at(chunk.run))
        except DeviceFailed as error:
            if error.code != NOT_REGISTERED:
                raise
            _log.warning("the %s was ended elsewhere for a part: %s", self._name, error)

    def _at(self, run: Run) -> HostAddress:
        return HostAddress(self.region.address + run.offset)


def register_host(
    region: MemoryRegion,
    runtime: AclRuntime,
    device: int,
    settings: PoolConfig,
    cuts: Sequence[int] = (),
    ways: tuple[int, ...] = PAGES,
) -> HostRegistration:
    """Register a whole region with an NPU.

    Args:
        region: the memory; it stays its owner's, who closes the registration before it.
        runtime: the loaded runtime.
        device: the NPU's number in this process.
        settings: the size of a chunk.
        cuts: offsets at which chunks should end: where layers begin, so that none has a border inside. Multiples of
            4 KiB.
        ways: flags to try, in order; :data:`~tidal_connector.memory.acl.chunk_mapping.LOCKED` for memory that the
            runtime gave.

    Raises:
        DeviceFailed: a part cannot be registered, or what lies between two cuts is too long for one registration;
            nothing is left registered.
        Conflict: the region is registered with this NPU already.
        ConfigError: ``pool.register_chunk`` is no multiple of 2 MiB.
        ValueError: the region is closed or on no 4 KiB border, or a cut is.
    """
    if region.address % PAGE or region.length % PAGE:
        raise ValueError(f"region of {region.length} bytes at {region.address:#x}: expected multiples of {PAGE}")
    ordered = check_cuts(cuts, region.length)
    registration = HostRegistration(region, runtime, device)
    registration._register(settings.chunk, ordered, ways)
    report = registration.report()
    (_log.warning if report.borrowed else _log.info)("%s", report.line())
    return registration
