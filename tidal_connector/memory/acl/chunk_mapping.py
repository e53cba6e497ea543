# SPDX-License-Identifier: Apache-2.0
"""Registering one chunk and asking for its alias, as one step that succeeds or leaves nothing registered.

The runtime has three habits to be met here. It reports success and gives no alias (NULL) where its flags and the
memory's origin do not suit one another, so each way is tried in turn. It refuses flags that its version does not know.
And it refuses memory that another component has registered (507910), whose alias serves as long as that one keeps it.
Called by the thread that registers, inside :meth:`~tidal_connector.memory.acl.runtime.AclRuntime.on`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidal_connector.errors import DeviceFailed
from tidal_connector.memory.acl.addresses import HostAddress
from tidal_connector.memory.acl.chunks import HUGE, PAGE
from tidal_connector.memory.acl.codes import BAD_PARAMETER, NOT_SUPPORTED, REGISTERED
from tidal_connector.memory.acl.runtime import MAPPED, PINNED, AclRuntime

PAGES = (MAPPED | PINNED, MAPPED)
"""Flags for memory that nobody has locked, in the order in which they are tried."""
LOCKED = (MAPPED, MAPPED | PINNED)
"""Flags for memory of ``aclrtMallocHost``: the runtime's documents forbid PINNED there, some versions want it."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A chunk that kernels can reach.

    Attributes:
        pointer: its first byte on the NPU.
        how: the call and the flags that did it.
        ours: False where another component's registration is used, which is not ours to end.
    """

    pointer: int
    how: str
    ours: bool = True


def map_chunk(runtime: AclRuntime, at: HostAddress, length: int, ways: tuple[int, ...]) -> Mapped:
    """Register a chunk and return its alias.

    Args:
        runtime: the calling thread's, with its device set.
        at: first byte, on a 4 KiB border.
        length: bytes, a multiple of 4 KiB.
        ways: flags to try, in order: :data:`PAGES` or :data:`LOCKED`.

    Raises:
        DeviceFailed: it cannot be registered, or has no alias in any way; nothing of it is left registered.
    """
    if not runtime.asks_for_alias:
        return _map_by_one_call(runtime, at, length)
    without: list[str] = []
    for flags in ways:
        try:
            runtime.register(at, length, flags)
        except DeviceFailed as error:
            if error.code == REGISTERED:
                return _borrow(runtime, at, length, error)
            if error.code in (BAD_PARAMETER, NOT_SUPPORTED) and flags != ways[-1]:
                without.append(f"{flag_text(flags)} was refused ({error.code})")
                continue
            raise
        pointer = _alias_or_nothing(runtime, at)
        if pointer:
            return Mapped(pointer, f"aclrtHostRegisterV2({flag_text(flags)})")
        without.append(f"{flag_text(flags)} gave none")
    raise DeviceFailed(
        f"aclrtHostGetDevicePointer of {at.host:#x}: no alias (NULL), though registering was reported as a success: "
        f"{', '.join(without)}; upgrade driver and CANN",
        "aclrtHostGetDevicePointer",
    )


def flag_text(flags: int) -> str:
    """Return registration flags by name."""
    names = [name for bit, name in ((MAPPED, "MAPPED"), (PINNED, "PINNED")) if flags & bit]
    return "|".join(names)


def _alias_or_nothing(runtime: AclRuntime, at: HostAddress) -> int:
    """Ask for the alias of what was just registered; unregister it where there is none."""
    try:
        pointer = runtime.device_pointer(at)
    except DeviceFailed:
        runtime.unregister(at)
        raise
    if not pointer:
        runtime.unregister(at)
    return pointer


def _map_by_one_call(runtime: AclRuntime, at: HostAddress, length: int) -> Mapped:
    pointer = runtime.register_with_alias(at, length)
    if pointer:
        return Mapped(pointer, "aclrtHostRegister")
    runtime.unregister(at)
    raise DeviceFailed(
        f"aclrtHostRegister of {at.host:#x}: no alias (NULL), though it was reported as a success; upgrade driver and "
        "CANN (8.5 has aclrtHostRegisterV2)",
        "aclrtHostRegister",
    )


def _borrow(runtime: AclRuntime, at: HostAddress, length: int, refused: DeviceFailed) -> Mapped:
    """Use the registration of another component, if its alias covers the chunk without a gap or a border."""
    try:
        first = runtime.device_pointer(at)
        steps = (*range(HUGE, length, HUGE), length - PAGE)
        whole = first and all(runtime.device_pointer(at.plus(step)) == first + step for step in steps)
    except DeviceFailed:
        raise refused from None
    if not whole:
        raise refused
    return Mapped(first, "a registration of another component", ours=False)
