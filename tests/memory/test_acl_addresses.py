# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch.source import ROOT
from tidal_connector.memory.acl import AclRuntime, DeviceAlias, HostAddress, device_number, host_number

HOST, ALIAS = HostAddress(0x7F00_0000_0000), DeviceAlias(0x1200_0000_0000, 1 << 20, 0)

MIXED = """
from tidal_connector.memory.acl import AclRuntime, DeviceAlias, HostAddress

def mixed(runtime: AclRuntime, host: HostAddress, alias: DeviceAlias) -> None:
    runtime.unregister(host)
    runtime.unregister(alias)
    other: DeviceAlias = host
    number: int = alias
    print(alias.host, host.pointer, int(alias), alias + 1, other, number)
"""


def test_a_host_address_and_an_alias_do_not_convert() -> None:
    assert host_number(HOST) == 0x7F00_0000_0000
    assert device_number(ALIAS) == 0x1200_0000_0000
    with pytest.raises(TypeError, match=r"expected a HostAddress, got DeviceAlias.*for kernels on the NPU only"):
        host_number(ALIAS)
    with pytest.raises(TypeError, match="expected a DeviceAlias, got HostAddress"):
        device_number(HOST)
    for each in (HOST, ALIAS):
        with pytest.raises(TypeError):
            int(each)  # type: ignore[call-overload]
        with pytest.raises(TypeError):
            range(each)  # type: ignore[call-overload]
    assert HostAddress(5) != DeviceAlias(5, 1, 0)


@pytest.mark.parametrize("wrong", [ALIAS, 0x7F00_0000_0000, None])
def test_the_runtime_takes_host_addresses_only(runtime: AclRuntime, wrong: HostAddress) -> None:
    with runtime.on(0):
        for call in (
            lambda: runtime.register(wrong, 4096, 2),
            lambda: runtime.device_pointer(wrong),
            lambda: runtime.unregister(wrong),
            lambda: runtime.free(wrong),
        ):
            with pytest.raises((TypeError, AttributeError)):
                call()


@pytest.mark.parametrize("wrong", [ALIAS, 0x7F00_0000_0000, None])
def test_no_call_into_the_library_takes_anything_else(runtime: AclRuntime, wrong: object) -> None:
    with runtime.on(0), pytest.raises(Exception, match="expected a HostAddress, got"):
        runtime.calls("aclrtHostUnregister", wrong)


def test_mypy_refuses_to_mix_them(tmp_path: Path) -> None:
    source = tmp_path / "mixed.py"
    source.write_text(MIXED)
    command = [sys.executable, "-m", "mypy", "--strict", "--hide-error-context", str(source)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110).stdout
    refused = {int(line.split(":")[1]) for line in said.splitlines() if ": error:" in line}
    assert refused == {6, 7, 8, 9}, said
    assert 'Argument 1 to "unregister" of "AclRuntime" has incompatible type "DeviceAlias"' in said


def test_addresses_reach_to_the_end_of_64_bits() -> None:
    assert HostAddress((1 << 64) - 4096).plus(4095).host == (1 << 64) - 1
    assert DeviceAlias((1 << 64) - 4096, 4096, 3).part(4000, 96) == DeviceAlias((1 << 64) - 96, 96, 3)
    for bad in (lambda: HostAddress(0), lambda: HostAddress(1 << 64), lambda: DeviceAlias(0, 1, 0)):
        with pytest.raises(ValueError, match="expected"):
            bad()
    with pytest.raises(ValueError, match="expected a range below"):
        DeviceAlias((1 << 64) - 4096, 4097, 0)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 0), (0, (1 << 20) + 1), (1 << 20, 1)])
def test_a_part_of_an_alias_lies_within_it(offset: int, length: int) -> None:
    with pytest.raises(ValueError, match="of an alias of 1048576 bytes"):
        ALIAS.part(offset, length)
