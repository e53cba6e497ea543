# SPDX-License-Identifier: Apache-2.0
"""The few calls of the Ascend runtime that the host pool needs, typed: devices, host registration, pinned memory.

Takes host addresses; hands on device pointers and errors in one line each, with the code, its meaning and the mend.
It never finalises the runtime, which belongs to the whole process (``torch_npu`` shares it), and leaves each thread's
current device as it found it. Calls may come from any thread; what registers must be inside :meth:`AclRuntime.on`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from tidal_connector.errors import DeviceFailed
from tidal_connector.memory.acl.addresses import HostAddress
from tidal_connector.memory.acl.calls import Calls
from tidal_connector.memory.acl.codes import INITIALIZED_BEFORE
from tidal_connector.memory.acl.library import load
from tidal_connector.memory.report import size_text

MAPPED = 0x2  # of aclrtHostRegisterV2: kernels can reach the memory
PINNED = 0x10000000  # the runtime locks the pages; for memory that nobody has locked
_MAPPED_TYPE = 0  # of aclrtHostRegister, which has types and no flags


class AclRuntime:
    """One loaded libascendcl.

    Attributes:
        path: the file that it was loaded from.
        calls: its functions.
    """

    def __init__(self, calls: Calls) -> None:
        self.path = calls.path
        self.calls = calls

    @classmethod
    def open(cls, path: str | None = None) -> AclRuntime:
        """Load the library; see :func:`~tidal_connector.memory.acl.library.load` for where it is looked for.

        Raises:
            DeviceMissing: there is none, or it is too old.
        """
        return cls(Calls(*load(path)))

    def version(self) -> str:
        """Return the runtime's version as ``1.17.0``; empty where it does not tell."""
        numbers = [ctypes.c_int32() for _ in range(3)]
        if not self.calls.has("aclrtGetVersion"):
            return ""
        self.calls("aclrtGetVersion", *map(ctypes.byref, numbers))
        return ".".join(str(number.value) for number in numbers)

    def soc(self) -> str:
        """Return the name of the NPU's chip; empty where the runtime does not tell."""
        return self.calls.text("aclrtGetSocName")

    def devices(self) -> int:
        """Return how many NPUs this process sees.

        Raises:
            DeviceFailed: the driver does not answer.
        """
        count = ctypes.c_uint32()
        self.initialize()
        self.calls("aclrtGetDeviceCount", ctypes.byref(count))
        return count.value

    def initialize(self) -> None:
        """Initialise the runtime, unless somebody in this process has.

        Raises:
            DeviceFailed: it cannot be initialised.
        """
        try:
            self.calls("aclInit", None)
        except DeviceFailed as error:
            if error.code != INITIALIZED_BEFORE:
                raise

    def current(self) -> int | None:
        """Return the calling thread's device; None where it has none."""
        device = ctypes.c_int32(-1)
        try:
            self.calls("aclrtGetDevice", ctypes.byref(device))
        except DeviceFailed:
            return None
        return device.value

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make a device the calling thread's, and give the thread its former one back afterwards.

        A thread that had none keeps this one: its context cannot be taken away without ending that of others.

        Raises:
            DeviceFailed: there is no such device, or it cannot be opened.
        """
        before = self.current()
        if before == device:
            yield
            return
        if before is None:
            self.initialize()
        self.calls("aclrtSetDevice", device, about=f"NPU {device}")
        try:
            yield
        finally:
            if before is not None:
                self.calls("aclrtSetDevice", before, about=f"NPU {before}")

    @property
    def asks_for_alias(self) -> bool:
        """Whether registering and asking for the alias are two calls; otherwise they are one, without flags."""
        return self.calls.has("aclrtHostRegisterV2", "aclrtHostGetDevicePointer")

    def register(self, at: HostAddress, length: int, flags: int) -> None:
        """Register host memory; ``at`` and ``length`` are multiples of 4 KiB, flags :data:`MAPPED` and :data:`PINNED`.

        Raises:
            DeviceFailed: it was refused.
        """
        self.calls("aclrtHostRegisterV2", at, length, flags, about=_range(at, length))

    def register_with_alias(self, at: HostAddress, length: int) -> int:
        """Register host memory by the older call, and return its device pointer; 0 stands for none.

        Raises:
            DeviceFailed: it was refused.
        """
        pointer = ctypes.c_void_p()
        self.calls("aclrtHostRegister", at, length, _MAPPED_TYPE, ctypes.byref(pointer), about=_range(at, length))
        return pointer.value or 0

    def device_pointer(self, at: HostAddress) -> int:
        """Return the device pointer of registered memory; 0 stands for none, which the runtime calls a success.

        Raises:
            DeviceFailed: it was refused.
        """
        pointer = ctypes.c_void_p()
        self.calls("aclrtHostGetDevicePointer", at, ctypes.byref(pointer), 0, about=f"{at.host:#x}")
        return pointer.value or 0

    def unregister(self, at: HostAddress) -> None:
        """End a registration, named by its first byte.

        Raises:
            DeviceFailed: it was refused.
        """
        self.calls("aclrtHostUnregister", at, about=f"{at.host:#x}")

    def allocate(self, length: int) -> HostAddress:
        """Return ``length`` bytes of pinned host memory, aligned to 64 bytes.

        Raises:
            DeviceFailed: it cannot be had.
        """
        pointer = ctypes.c_void_p()
        self.calls("aclrtMallocHost", ctypes.byref(pointer), length, about=size_text(length))
        if not pointer.value:
            raise DeviceFailed(f"aclrtMallocHost of {size_text(length)} returned no memory", "aclrtMallocHost")
        return HostAddress(pointer.value)

    def free(self, at: HostAddress) -> None:
        """Give back what :meth:`allocate` returned.

        Raises:
            DeviceFailed: it was refused.
        """
        self.calls("aclrtFreeHost", at, about=f"{at.host:#x}")


def _range(at: HostAddress, length: int) -> str:
    return f"{size_text(length)} at {at.host:#x}"
