# SPDX-License-Identifier: Apache-2.0
"""The memory system calls that Python's ``mmap`` lacks: fixed addresses, hugepages, NUMA binding,
prefaulting.

Addresses and lengths are bytes. Every function raises ``OSError`` with the kernel's number; none keeps state.
"""

from __future__ import annotations

import ctypes
import errno
import mmap as constants
import os
import platform

MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
MAP_HUGETLB = 0x40000
MAP_HUGE_SHIFT = 26
MADV_POPULATE_WRITE = 23
_MPOL_BIND = 2
_MBIND = {"x86_64": 237, "aarch64": 235}
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.syscall.restype = ctypes.c_long


def reserve(length: int) -> int:
    """Set aside address space without memory; return its address."""
    flags = constants.MAP_PRIVATE | constants.MAP_ANONYMOUS | MAP_NORESERVE
    return _map(None, length, _NOTHING, flags, -1)


def unmake(address: int, length: int) -> None:
    """Turn mapped pages back into mere address space."""
    flags = constants.MAP_PRIVATE | constants.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
    _map(address, length, _NOTHING, flags, -1)


def place_file(address: int, length: int, descriptor: int) -> None:
    """Map the first bytes of a file, shared, at an address."""
    _map(address, length, _READ_WRITE, constants.MAP_SHARED | MAP_FIXED, descriptor)


def place_hugepages(address: int, length: int, page: int) -> None:
    """Map anonymous hugepages of one size at an address; the kernel reserves them all at once or refuses."""
    size = (page.bit_length() - 1) << MAP_HUGE_SHIFT
    _map(address, length, _READ_WRITE, constants.MAP_SHARED | _ANONYMOUS | MAP_HUGETLB | MAP_FIXED | size, -1)


def place_plain(address: int, length: int) -> None:
    """Map ordinary anonymous memory at an address."""
    _map(address, length, _READ_WRITE, constants.MAP_PRIVATE | _ANONYMOUS | MAP_FIXED, -1)


def unmap(address: int, length: int) -> None:
    """Give a range back."""
    if length:
        _check(_libc.munmap(address, length))


def advise(address: int, length: int, advice: int) -> None:
    """Call ``madvise``."""
    _check(_libc.madvise(address, length, advice))


def bind(address: int, length: int, node: int) -> None:
    """Take the range's pages from one NUMA node only; before they are touched."""
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"mbind is not known for {platform.machine()}")
    words = node // 64 + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // 64] = 1 << node % 64
    bits = ctypes.c_ulong(words * 64 + 1)  # the kernel reads one bit less than it is told
    _check(
        _libc.syscall(
            ctypes.c_long(number),
            ctypes.c_void_p(address),
            ctypes.c_ulong(length),
            ctypes.c_int(_MPOL_BIND),
            mask,
            bits,
            ctypes.c_uint(0),
        )
    )


def populate(address: int, length: int, page: int) -> None:
    """Fault all pages in, writable. A page that cannot be had is an error, never a signal (Linux 5.14).

    Older kernels have no such call: there each page is touched, which is safe for what was reserved when
        mapped.
    """
    try:
        advise(address, length, MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        for offset in range(0, length, page):
            ctypes.c_ubyte.from_address(address + offset).value = 0


_NOTHING = 0
_READ_WRITE = constants.PROT_READ | constants.PROT_WRITE
_ANONYMOUS = constants.MAP_ANONYMOUS


def _map(address: int | None, length: int, protection: int, flags: int, descriptor: int) -> int:
    found = _libc.mmap(address, length, protection, flags, descriptor, 0)
    if found is None or found == _FAILED:
        _raise()
    return int(found)


def _check(code: int) -> None:
    if code != 0:
        _raise()


def _raise() -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))
