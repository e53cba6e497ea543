# SPDX-License-Identifier: Apache-2.0
"""The two addresses of one byte of registered host memory, as two types that cannot stand for one another.

The host finds the byte at its :class:`HostAddress`, a kernel on the NPU at its :class:`DeviceAlias`. Both are 64-bit
numbers, and by default they differ; a kernel that is given the host's reads elsewhere or faults, and so does a host
copy through the alias. So neither type converts to the other or to an integer, their fields have different names, and
the runtime's calls look at the type before they pass a number on. Values; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

_END = 1 << 64


@dataclass(frozen=True, slots=True)
class HostAddress:
    """Where host code, transports and registrations find memory.

    Attributes:
        host: the address in this process.
    """

    host: int

    def __post_init__(self) -> None:
        if not 0 < self.host < _END:
            raise ValueError(f"host address {self.host:#x}: expected 1 to 2**64 - 1")

    def plus(self, count: int) -> HostAddress:
        """Return the address ``count`` bytes further on."""
        return HostAddress(self.host + count)


@dataclass(frozen=True, slots=True)
class DeviceAlias:
    """Where kernels on one NPU find a range of host memory.

    Attributes:
        pointer: the address on that NPU; never to be dereferenced or copied through by the host.
        length: bytes that may be reached from there.
        device: the NPU's number in this process.
    """

    pointer: int
    length: int
    device: int

    def __post_init__(self) -> None:
        if not (0 < self.pointer < _END and 0 < self.length <= _END - self.pointer):
            raise ValueError(f"device alias {self.pointer:#x} of {self.length} bytes: expected a range below 2**64")

    def part(self, offset: int, length: int) -> DeviceAlias:
        """Return ``length`` bytes from ``offset`` on.

        Raises:
            ValueError: they are not within this range.
        """
        if not (offset >= 0 and 0 < length <= self.length - offset):
            raise ValueError(f"bytes {offset} to {offset + length} of an alias of {self.length} bytes")
        return DeviceAlias(self.pointer + offset, length, self.device)


def host_number(address: object) -> int:
    """Return the number of a host address, for a call that takes a host pointer.

    Raises:
        TypeError: it is something else, such as a device alias.
    """
    if not isinstance(address, HostAddress):
        raise TypeError(f"expected a HostAddress, got {address!r}: an alias is for kernels on the NPU only")
    return address.host


def device_number(alias: object) -> int:
    """Return the number of a device alias, for what a kernel is given.

    Raises:
        TypeError: it is something else, such as a host address.
    """
    if not isinstance(alias, DeviceAlias):
        raise TypeError(f"expected a DeviceAlias, got {alias!r}: kernels on the NPU cannot use the host's address")
    return alias.pointer
