# SPDX-License-Identifier: Apache-2.0
"""What Mooncake's ``ascend`` transport (ADXL over the NPUs' own network) demands before it may start.

Takes settings, variables of the environment and a view of the NPUs; hands on a device and locations, or one clear
error. The transport checks little of this itself: it aborts, falls silent, or refuses the first write of a peer. Pure,
but for :class:`AclNpu`; called from the thread that opens the plane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from tidal_connector.address import addresses_of
from tidal_connector.errors import ConfigError, TransferFailed
from tidal_connector.layout import Home
from tidal_connector.memory.acl.runtime import AclRuntime

BASE_PORT = 20000
"""First port of ADXL's listeners where ``ASCEND_BASE_PORT`` is not set: so the code, though its guide says 11000."""
PORTS_PER_NPU = 1000
"""The releases count 100 or 1,000 ports for each NPU; the larger is kept free."""
RPC_PORTS = (15000, 17000)
"""Mooncake's RPC ports where ``MC_MIN_RPC_PORT`` and ``MC_MAX_RPC_PORT`` are not set."""
MOST_REGIONS = 256
"""Regions that HCCL registers for one process."""
ATTEMPTS = 2
"""A write that times out is tried once more, after a disconnection."""
_TIMEOUT_MS = 10_000  # of connecting and of one attempt, where the environment says nothing
_LAST_PORT = 65535
_FLAGS = ("MC_FORCE_TCP", "MC_FORCE_HCA")
_ROCE = "roce:device"


class Npu(Protocol):
    """What the transport needs to know and have of the NPUs; the Ascend integration gives it."""

    def current(self) -> int | None:
        """Return the device of the calling thread's ACL context; None where it has none."""

    def devices(self) -> int:
        """Return the number of NPUs of this machine."""

    def enter(self, device: int) -> None:
        """Give the calling thread a context of a device, for good."""


class AclNpu:
    """The NPUs as ACL shows them.

    Args:
        runtime: an opened libascendcl.
    """

    def __init__(self, runtime: AclRuntime) -> None:
        self._runtime = runtime

    def current(self) -> int | None:
        """Return the device of the calling thread's context."""
        return self._runtime.current()

    def devices(self) -> int:
        """Return the number of NPUs."""
        return self._runtime.devices()

    def enter(self, device: int) -> None:
        """Give the calling thread a context: one that had none keeps it."""
        with self._runtime.on(device):
            pass


class AscendRegion(msgspec.Struct, frozen=True):
    """One range to register: bytes at an address, and where they are."""

    address: int
    length: int
    location: str


class Regions:
    """The ranges of one process, collected first and then registered all at once.

    A range that is registered after the first peer has connected stays unknown to that peer, and taking one back
    disconnects every peer; so there is one moment for all, and none for the way back.

    Args:
        device: NPU that holds the device memory.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._planned: list[AscendRegion] = []
        self._sealed = False

    def add(self, address: int, length: int, home: Home) -> None:
        """Plan a range. Lengths are 64-bit; tensors of one storage are one range.

        Raises:
            TransferFailed: peers were told already, or there are more ranges than one process may register.
        """
        if self._sealed:
            raise TransferFailed(
                f"register {length} bytes at {address:#x}: peers know where this process is already; with "
                'transfer.protocol = "ascend" all memory has to be registered before the first of them connects'
            )
        # "*" would ask ACL, which does not know mapped hugepages.
        location = "cpu:0" if home is Home.HOST else f"npu:{self._device}"
        self._planned.append(AscendRegion(address, length, location))
        on_host = sum(region.location == "cpu:0" for region in self._planned)
        if len(self._planned) > MOST_REGIONS:
            raise TransferFailed(
                f"{len(self._planned)} regions ({on_host} of host memory, {len(self._planned) - on_host} of NPU "
                f"{self._device}): HCCL registers {MOST_REGIONS} for one process; let the caches of several layers "
                "share an allocation, so that they are one region"
            )

    def seal(self) -> list[AscendRegion]:
        """Return what is to be registered now; empty from the second call on."""
        if self._sealed:
            return []
        self._sealed = True
        return list(self._planned)


def prepare(host: str, npu: Npu | None, found: Mapping[str, str], quarantine_s: float) -> int:
    """Check everything that can be known before the engine is made, and return the device it will use.

    Args:
        host: address under which peers reach this process.
        npu: the NPUs; None where this engine runs on none.
        found: the environment's variables that the transport or we read.
        quarantine_s: seconds for which pages stay out of use after a transfer that did not end well.

    Raises:
        ConfigError: a setting or a variable of the environment does not fit; the text says how to mend it.
        TransferFailed: there is no NPU, or the calling thread has no ACL context.
    """
    check_environment(found)
    check_host(host)
    check_deadlines(found, quarantine_s)
    if npu is None:
        raise TransferFailed(
            'transfer.protocol = "ascend" needs the NPU of the engine, on the decode side as well, and this engine '
            'runs on none; set transfer.protocol = "rdma" or "tcp" on both sides'
        )
    device = npu.current()
    if device is None:
        raise TransferFailed(
            'transfer.protocol = "ascend": the thread that opens the transfer plane has no ACL context; call '
            "torch.npu.set_device(...) in the worker before its caches are registered"
        )
    least = _number(found, "MC_MIN_RPC_PORT", RPC_PORTS[0])
    rpc = (least, _number(found, "MC_MAX_RPC_PORT", RPC_PORTS[1]))
    conflicts = port_conflicts({"MC_MIN_RPC_PORT..MC_MAX_RPC_PORT": rpc}, npu.devices(), base_port(found))
    if conflicts:
        raise ConfigError("; ".join(conflicts))
    return device


def check_environment(found: Mapping[str, str]) -> None:
    """Refuse the variables that take the transport away: their presence counts, whatever their value.

    Raises:
        ConfigError: one is set.
    """
    for name in _FLAGS:
        if name in found:
            raise ConfigError(
                f'{name} = {found[name]!r} with transfer.protocol = "ascend": Mooncake would run another transport; '
                "unset it (0 counts as set)"
            )


def check_host(host: str) -> None:
    """Refuse a loopback address: peers' NPUs cannot reach it, and the transport starts all the same.

    Raises:
        ConfigError: it is one, or a name that cannot be looked up.
    """
    try:
        loopback = any(address.is_loopback for address in addresses_of(host))
    except OSError as error:
        raise ConfigError(f"transfer.host = {host!r} cannot be looked up: {error}") from None
    if loopback:
        raise ConfigError(
            f'transfer.host = {host!r} is a loopback address: transfer.protocol = "ascend" needs one that peers reach; '
            "set transfer.host or control.advertise"
        )


def longest_write_s(found: Mapping[str, str]) -> float:
    """Return the seconds after which a write has ended or is given up: connecting, then every attempt.

    Raises:
        ConfigError: a timeout is no positive number of milliseconds.
    """
    connect, transfer = (
        _number(found, name, _TIMEOUT_MS) for name in ("ASCEND_CONNECT_TIMEOUT", "ASCEND_TRANSFER_TIMEOUT")
    )
    return (connect + ATTEMPTS * transfer) / 1000


def check_deadlines(found: Mapping[str, str], quarantine_s: float) -> None:
    """Refuse timeouts with which a write could still be tried when its pages are in use again.

    Raises:
        ConfigError: they exceed the quarantine.
    """
    longest = longest_write_s(found)
    if longest > quarantine_s:
        raise ConfigError(
            f"ASCEND_CONNECT_TIMEOUT and {ATTEMPTS} x ASCEND_TRANSFER_TIMEOUT let a write take {longest:g} s, "
            f"control.quarantine_s = {quarantine_s:g}: lower the timeouts (milliseconds) or raise control.quarantine_s"
        )


def base_port(found: Mapping[str, str]) -> int:
    """Return the first port of ADXL's listeners.

    Raises:
        ConfigError: ``ASCEND_BASE_PORT`` is no port.
    """
    return _number(found, "ASCEND_BASE_PORT", BASE_PORT)


def port_conflicts(ports: Mapping[str, tuple[int, int]], npus: int, base: int = BASE_PORT) -> list[str]:
    """Name the ports of ours that ADXL's listeners may want: one line for each, with both ranges and what to set.

    Args:
        ports: by setting, the first and the last port that it stands for; 0 (the kernel chooses) conflicts with none.
        npus: NPUs of the machine.
        base: first port of ADXL.
    """
    last = min(_LAST_PORT, base + PORTS_PER_NPU * npus - 1)
    return [
        f"{name}: {_ports(low, high)} meets {base}..{last}, which the NPUs' listeners take ({PORTS_PER_NPU} ports "
        f"for each of {npus} NPUs, from ASCEND_BASE_PORT on): set {name} to ports outside, or ASCEND_BASE_PORT"
        for name, (low, high) in ports.items()
        if high >= low > 0 and low <= last and high >= base
    ]


def link_note(found: Mapping[str, str]) -> str:
    """Say what the link between two NPUs has to offer for writes into host memory; empty where it is asked for."""
    roce = found.get("HCCL_INTRA_ROCE_ENABLE") == "1" or _ROCE in found.get("ASCEND_GLOBAL_RESOURCE_CONFIG", "")
    staged = found.get("ASCEND_BUFFER_POOL", "0:0") != "0:0"
    if roce or staged:
        return ""
    return (
        "the link writes into host memory over RoCE only: between NPUs of one server, HCCS reaches device memory alone "
        "on A2 and no remote host memory on A3; set HCCL_INTRA_ROCE_ENABLE=1, or stage with ASCEND_BUFFER_POOL=4:8"
    )


def _ports(low: int, high: int) -> str:
    return f"port {low}" if low == high else f"{low}..{high}"


def _number(found: Mapping[str, str], name: str, default: int) -> int:
    text = found.get(name, "") or str(default)
    if not text.isascii() or not text.isdigit() or not int(text):
        raise ConfigError(f"{name} = {text!r}: expected a positive whole number")
    return int(text)


def locations(regions: Sequence[AscendRegion]) -> dict[str, list[AscendRegion]]:
    """Sort regions by location: one call of Mooncake takes many ranges of one location."""
    found: dict[str, list[AscendRegion]] = {}
    for region in regions:
        found.setdefault(region.location, []).append(region)
    return found
