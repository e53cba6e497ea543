# SPDX-License-Identifier: Apache-2.0
"""The host pool of an engine on an NPU: memory of the right origin, registered, and one owner for both.

Takes the pool's settings; hands on a region and its registration. Which memory it is follows ``pool.register`` and is
never changed silently: what was taken in place of the pages that were asked for stands in the region's report, and
where the pages cannot be registered the start fails with what else may be set. One thread opens and closes.
"""

from __future__ import annotations

import mmap as constants
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from tidal_connector.config import DeviceAccess, PageKind, PoolConfig
from tidal_connector.errors import ConfigError
from tidal_connector.log import get_logger
from tidal_connector.memory import mapping
from tidal_connector.memory.acl.addresses import HostAddress
from tidal_connector.memory.acl.chunk_mapping import LOCKED, PAGES
from tidal_connector.memory.acl.chunks import PAGE
from tidal_connector.memory.acl.registration import HostRegistration, register_host
from tidal_connector.memory.acl.runtime import AclRuntime
from tidal_connector.memory.builder import Progress
from tidal_connector.memory.machine import Machine
from tidal_connector.memory.region import MemoryRegion, open_region
from tidal_connector.memory.report import RegionReport
from tidal_connector.memory.shared import Share, open_shared

_log = get_logger(__name__)

LAST_WITHOUT_PAGES = (5, 10)
"""The newest Linux on which only memory of ``aclrtMallocHost`` can be registered."""


class DevicePool:
    """A region and what makes it reachable; close it, or use it as a context manager.

    Attributes:
        region: the memory.
        registration: with the NPU; None where ``pool.register`` is ``off``.
    """

    def __init__(self, region: MemoryRegion, registration: HostRegistration | None, stack: ExitStack) -> None:
        self.region = region
        self.registration = registration
        self._stack = stack

    def close(self) -> None:
        """Unregister, then give the memory back. Idempotent."""
        self._stack.close()

    def __enter__(self) -> DevicePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_device_pool(
    length: int,
    settings: PoolConfig,
    runtime: AclRuntime,
    device: int,
    *,
    cuts: Sequence[int] = (),
    share: Share | None = None,
    progress: Progress | None = None,
    machine: Machine | None = None,
) -> DevicePool:
    """Open a pool of at least ``length`` bytes that kernels on an NPU can read and write.

    Args:
        length: bytes wanted.
        settings: pages, way and chunks of registration; its size is not used.
        runtime: the loaded runtime.
        device: the NPU's number in this process.
        cuts: offsets at which registrations should end, as for
            :func:`~tidal_connector.memory.acl.registration.register_host`.
        share: the ranks of this machine that share the pool, each of which registers it with its own NPU; None: nobody.
        progress: called while pages are faulted in.
        machine: what the machine has; None asks the kernel.

    Raises:
        DeviceFailed: the memory cannot be registered; nothing is left of it.
        PoolExhausted: the memory cannot be had.
        ConfigError: a setting contradicts another or names nothing that exists.
        TidalError: what :func:`~tidal_connector.memory.shared.open_shared` raises, where the pool is shared.
    """
    machine = machine or Machine()
    way = access(settings, machine)
    with ExitStack() as stack:
        region: MemoryRegion
        if way is DeviceAccess.RUNTIME:
            if share is not None:
                raise ConfigError(
                    f"a pool shared by {share.world} ranks with memory of aclrtMallocHost (pool.register = "
                    f"{settings.register.value!r}, Linux {_version(machine)}): that memory belongs to one process; use "
                    "Linux 5.11 or newer, or one rank for each engine"
                )
            region = open_runtime_region(length, settings, runtime, device, machine)
        elif share is not None:
            region = open_shared(length, settings, share, progress, machine)
        else:
            region = open_region(length, settings, progress, machine)
        stack.callback(region.close)
        registration = None
        if way is DeviceAccess.OFF:
            _log.warning('pool.register = "off": kernels on the NPU cannot read the pool')
        else:
            flags = LOCKED if way is DeviceAccess.RUNTIME else PAGES
            registration = register_host(region, runtime, device, settings, cuts, flags)
            stack.callback(registration.close)
        return DevicePool(region, registration, stack.pop_all())


def access(settings: PoolConfig, machine: Machine) -> DeviceAccess:
    """Return the way to the pool that counts here: ``auto`` becomes what the kernel's version allows.

    Raises:
        ConfigError: pages are demanded of a pool whose memory the runtime would give.
    """
    way = settings.register
    if way is DeviceAccess.AUTO:
        kernel = machine.kernel()
        old = kernel is not None and kernel <= LAST_WITHOUT_PAGES
        way = DeviceAccess.RUNTIME if old else DeviceAccess.PAGES
    if way is DeviceAccess.RUNTIME and settings.pages is not None:
        raise ConfigError(
            f"pool.pages = {settings.pages.value!r} with memory of aclrtMallocHost (pool.register = "
            f"{settings.register.value!r}, Linux {_version(machine)}): its pages are the runtime's choice; leave "
            'pool.pages out, or set pool.register = "pages"'
        )
    return way


def open_runtime_region(
    length: int, settings: PoolConfig, runtime: AclRuntime, device: int, machine: Machine
) -> MemoryRegion:
    """Return a region of memory that the runtime gives, which is locked already and comes in one piece.

    Raises:
        DeviceFailed: it cannot be had (of one piece, not more than some 200 GB).
    """
    size = -(-length // PAGE) * PAGE
    with runtime.on(device):
        given = runtime.allocate(size + PAGE)  # aligned to 64 bytes only, as far as is documented
    start = HostAddress(-(-given.host // PAGE) * PAGE)
    notes = [f"memory of aclrtMallocHost (pool.register = {settings.register.value!r}, Linux {_version(machine)})"]
    if settings.numa is not None:
        notes.append(f"it could not be bound to NUMA node {settings.numa}")
    with suppress(OSError):  # a kernel without it only lacks the protection
        mapping.advise(start.host, size, constants.MADV_DONTFORK)

    def release() -> None:
        with runtime.on(device):
            runtime.free(given)

    report = RegionReport(length, ((PageKind.PLAIN, size),), 0, None, tuple(notes))
    return MemoryRegion(start.host, size, report, release)


def _version(machine: Machine) -> str:
    return ".".join(map(str, machine.kernel() or ())) or "of an unknown version"
