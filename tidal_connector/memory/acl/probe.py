# SPDX-License-Identifier: Apache-2.0
"""What the Ascend runtime of this machine can do, asked without an engine: for the doctor, and for bug reports.

Loads the library, asks its versions, and on demand registers a few pages for a moment. Nothing raises but a wrong
argument: what is missing is part of the answer. Call it from a thread that may take the device as its own.
"""

from __future__ import annotations

import msgspec

from tidal_connector.config import PageKind, PoolConfig
from tidal_connector.errors import DeviceFailed, PoolExhausted
from tidal_connector.memory.acl.pool import LAST_WITHOUT_PAGES
from tidal_connector.memory.acl.registration import register_host
from tidal_connector.memory.acl.runtime import AclRuntime
from tidal_connector.memory.machine import Machine
from tidal_connector.memory.region import open_region

_TRIAL = 2 << 20  # bytes that are registered for a moment: one hugepage, where one is free


class AclProbe(msgspec.Struct, frozen=True):
    """What was found.

    Attributes:
        library: file of the runtime; empty where none can be loaded.
        version: of the runtime; empty where it does not tell.
        soc: name of the chip; empty where the runtime does not tell.
        devices: NPUs that this process sees.
        two_calls: registering takes flags, and the alias is asked for apart (CANN 8.5 and newer).
        pages: the pool's own pages can be registered as far as the kernel's version tells; else only memory of
            ``aclrtMallocHost``.
        trial: what registering one hugepage came to, in words; empty where it was not tried.
        registered: the trial went well.
        faults: one sentence for each thing that failed, with how to mend it.
    """

    library: str = ""
    version: str = ""
    soc: str = ""
    devices: int = 0
    two_calls: bool = False
    pages: bool = True
    trial: str = ""
    registered: bool = False
    faults: tuple[str, ...] = ()

    def line(self) -> str:
        """Return everything in one readable line."""
        if not self.library:
            return "; ".join(self.faults)
        about = f"{self.library}{self.version and ', version ' + self.version}{self.soc and ', ' + self.soc}"
        memory = "" if self.pages else "; this Linux can register memory of aclrtMallocHost only"
        return "; ".join((f"{about}, {self.devices} NPUs{memory}", *filter(None, (self.trial,)), *self.faults))


def probe(path: str | None = None, device: int | None = None, machine: Machine | None = None) -> AclProbe:
    """Ask the runtime what it can do.

    Args:
        path: its file; None searches as :meth:`~tidal_connector.memory.acl.runtime.AclRuntime.open` does.
        device: an NPU with which one hugepage is registered for a moment; None tries nothing.
        machine: what the machine has; None asks the kernel.
    """
    machine = machine or Machine()
    kernel = machine.kernel()
    pages = kernel is None or kernel > LAST_WITHOUT_PAGES
    try:
        runtime = AclRuntime.open(path)
    except DeviceFailed as error:
        return AclProbe(pages=pages, faults=(str(error),))
    faults: list[str] = []
    devices, trial, registered = 0, "", False
    try:
        devices = runtime.devices()
        if device is not None:
            trial, registered = _try(runtime, device, machine), True
    except (DeviceFailed, PoolExhausted) as error:
        faults.append(str(error))
    return AclProbe(
        library=runtime.path,
        version=_version(runtime),
        soc=runtime.soc(),
        devices=devices,
        two_calls=runtime.asks_for_alias,
        pages=pages,
        trial=trial,
        registered=registered,
        faults=tuple(faults),
    )


def _version(runtime: AclRuntime) -> str:
    try:
        return runtime.version()
    except DeviceFailed:  # told by what else fails
        return ""


def _try(runtime: AclRuntime, device: int, machine: Machine) -> str:
    huge = PageKind.HUGE_2M if machine.free_hugepages(_TRIAL) else PageKind.PLAIN
    settings = PoolConfig(pages=huge)
    with (
        open_region(_TRIAL, settings, machine=machine) as region,
        register_host(region, runtime, device, settings) as registration,
    ):
        return registration.report().line()
