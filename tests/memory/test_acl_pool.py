# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pytest

from tests.standins.ascendcl import Standin
from tidal_connector.config import DeviceAccess, PageKind, PoolConfig, load_config
from tidal_connector.errors import ConfigError, DeviceFailed
from tidal_connector.memory import Share, SharedRegion
from tidal_connector.memory.acl import AclRuntime, open_device_pool, probe
from tidal_connector.memory.machine import Machine

MIB = 1 << 20


def machine(root: Path, kernel: str) -> Machine:
    """A machine with this kernel and nothing else."""
    (root / "proc/sys/kernel").mkdir(parents=True)
    (root / "proc/sys/kernel/osrelease").write_text(f"{kernel}\n")
    return Machine(root)


@pytest.mark.parametrize("kernel", ["5.11.0", "6.6.0-95.oe2403", "5.15.0-91-generic"])
def test_newer_kernels_register_the_pools_own_pages(runtime: AclRuntime, tmp_path: Path, kernel: str) -> None:
    settings = PoolConfig(pages=PageKind.PLAIN)
    with open_device_pool(4 * MIB, settings, runtime, 0, machine=machine(tmp_path, kernel)) as pool:
        assert pool.region.report.notes == ()
        assert pool.registration is not None
        assert pool.registration.report().how == ("aclrtHostRegisterV2(MAPPED|PINNED)",)


@pytest.mark.parametrize("kernel", ["5.10.0-216.0.0.115.oe2203sp4", "4.19.90-89.11", "5.4.0"])
def test_older_kernels_get_memory_of_the_runtime_and_it_is_said(
    runtime: AclRuntime, standin: Standin, tmp_path: Path, kernel: str
) -> None:
    standin.set("runtime_memory_only", 1)
    with open_device_pool(4 * MIB + 1, PoolConfig(), runtime, 0, machine=machine(tmp_path, kernel)) as pool:
        assert pool.region.address % 4096 == 0
        assert pool.region.length == 4 * MIB + 4096
        assert pool.registration is not None
        assert pool.registration.report().how == ("aclrtHostRegisterV2(MAPPED)",)
        short = ".".join(kernel.split(".")[:2])
        assert f"memory of aclrtMallocHost (pool.register = 'auto', Linux {short})" in pool.region.report.line()
        memory = np.frombuffer(pool.region.buffer, np.uint8)
        memory[:] = 7
        del memory
    assert [call.name for call in standin.calls()][-2:] == ["aclrtGetDevice", "aclrtFreeHost"]
    order = ["aclrtMallocHost", "aclrtHostRegisterV2", "aclrtHostUnregister", "aclrtFreeHost"]
    assert [call.name for call in standin.calls(*order)] == order


def test_pages_that_cannot_be_registered_are_an_error_that_offers_the_runtimes_memory(
    runtime: AclRuntime, standin: Standin
) -> None:
    standin.set("runtime_memory_only", 1)
    settings = PoolConfig(pages=PageKind.PLAIN, register=DeviceAccess.PAGES)
    with pytest.raises(DeviceFailed, match=r'207000.*or set pool.register = "runtime" .* or "off"'):
        open_device_pool(4 * MIB, settings, runtime, 0)
    with open_device_pool(4 * MIB, PoolConfig(register=DeviceAccess.RUNTIME), runtime, 0) as pool:
        assert pool.registration is not None


def test_a_pool_that_is_not_registered_says_so(
    runtime: AclRuntime, standin: Standin, caplog: pytest.LogCaptureFixture
) -> None:
    settings = PoolConfig(pages=PageKind.PLAIN, register=DeviceAccess.OFF)
    with open_device_pool(4 * MIB, settings, runtime, 0) as pool:
        assert pool.registration is None
    assert 'pool.register = "off": kernels on the NPU cannot read the pool' in caplog.text
    assert standin.calls() == []


def test_the_runtimes_memory_has_a_largest_size(runtime: AclRuntime) -> None:
    with pytest.raises(DeviceFailed, match="aclrtMallocHost of 300 GiB: 207001"):
        open_device_pool(300 << 30, PoolConfig(register=DeviceAccess.RUNTIME), runtime, 0)


def test_a_failed_registration_gives_the_runtimes_memory_back(runtime: AclRuntime, standin: Standin) -> None:
    standin.fail("aclrtHostRegisterV2", 207006)
    with pytest.raises(DeviceFailed, match="207006"):
        open_device_pool(4 * MIB, PoolConfig(register=DeviceAccess.RUNTIME), runtime, 0)
    assert len(standin.calls("aclrtFreeHost")) == 1


def test_memory_of_the_runtime_has_no_kind_of_pages_to_demand(runtime: AclRuntime, tmp_path: Path) -> None:
    old = machine(tmp_path, "5.10.0")
    with pytest.raises(ConfigError, match=r"pool.pages = '2m' with memory of aclrtMallocHost .*'auto', Linux 5.10"):
        open_device_pool(4 * MIB, PoolConfig(pages=PageKind.HUGE_2M), runtime, 0, machine=old)


def test_a_numa_node_that_the_runtimes_memory_cannot_have_is_noted(runtime: AclRuntime) -> None:
    settings = PoolConfig(register=DeviceAccess.RUNTIME, numa=0)
    with open_device_pool(MIB, settings, runtime, 0) as pool:
        assert "it could not be bound to NUMA node 0" in pool.region.report.line()


@pytest.mark.parametrize("chunk", ["3MiB", 4096, "1GB", "nothing"])
def test_a_chunk_that_would_part_a_hugepage_is_a_wrong_setting(chunk: str | int) -> None:
    with pytest.raises(ConfigError, match=r"pool\.register_chunk = "):
        load_config({"pool": {"register_chunk": chunk}})


def test_a_way_that_is_unknown_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="register"):
        load_config({"pool": {"register": "maybe"}})


def test_the_probe_tells_what_there_is_and_that_registering_works(standin: Standin, tmp_path: Path) -> None:
    found = probe(standin.path, device=1, machine=machine(tmp_path, "6.6.0"))
    assert found.library == standin.path
    assert (found.version, found.soc, found.devices) == ("1.17.0", "AscendStandIn", 8)
    assert found.two_calls
    assert found.pages
    assert found.registered
    assert found.line() == (
        f"{standin.path}, version 1.17.0, AscendStandIn, 8 NPUs; registered with NPU 1: 1 x 2 MiB by "
        "aclrtHostRegisterV2(MAPPED|PINNED)"
    )
    assert standin.registrations == 0


def test_the_probe_tells_what_is_wrong(standin: Standin, tmp_path: Path) -> None:
    standin.set("runtime_memory_only", 1)
    found = probe(standin.path, device=0, machine=machine(tmp_path, "5.10.0"))
    assert not found.registered
    assert not found.pages
    assert "this Linux can register memory of aclrtMallocHost only" in found.line()
    assert "207000, this NPU, driver or machine cannot do it" in found.line()
    missing = probe(str(tmp_path / "libascendcl.so"))
    assert not missing.library
    assert "cannot be loaded" in missing.line()


def test_a_shared_pool_is_registered_by_each_rank(runtime: AclRuntime, standin: Standin) -> None:
    share = Share(f"test-{uuid.uuid4()}", 0, 1, "f")
    with open_device_pool(4 * MIB, PoolConfig(pages=PageKind.PLAIN), runtime, 0, share=share) as pool:
        assert isinstance(pool.region, SharedRegion)
        assert pool.registration is not None
        assert standin.library.standin_is_real(pool.region.address)


def test_memory_of_the_runtime_cannot_be_shared(runtime: AclRuntime, tmp_path: Path) -> None:
    old = machine(tmp_path, "5.10.0")
    with pytest.raises(ConfigError, match=r"shared by 8 ranks with memory of aclrtMallocHost .*Linux 5.10.*5.11"):
        open_device_pool(4 * MIB, PoolConfig(), runtime, 0, share=Share("x", 0, 8, "f"), machine=old)
