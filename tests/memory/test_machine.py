# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tidal_connector.memory.machine import Machine, Mount

TWO_MIB = 2 << 20


@pytest.fixture
def fake(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def write(machine: Machine, path: str, text: str) -> None:
    target = machine.root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def test_hugepages_that_are_promised_to_others_are_not_free(fake: Machine) -> None:
    write(fake, "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "10\n")
    write(fake, "sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "4\n")
    assert fake.free_hugepages(TWO_MIB) == 6
    assert fake.free_hugepages(1 << 30) == 0


def test_a_node_has_only_its_own_hugepages(fake: Machine) -> None:
    write(fake, "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "10\n")
    write(fake, "sys/devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages", "3\n")
    assert fake.free_hugepages(TWO_MIB, node=1) == 3
    assert fake.free_hugepages(TWO_MIB, node=0) == 0
    assert fake.nodes() == [1]


def test_a_path_belongs_to_the_nearest_hugetlbfs_mount(fake: Machine, tmp_path: Path) -> None:
    outer, inner = tmp_path / "a", tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    write(
        fake,
        "proc/self/mounts",
        f"proc /proc proc rw 0 0\nhuge {outer} hugetlbfs rw,pagesize=2M 0 0\n"
        f"huge {inner} hugetlbfs rw,pagesize=1024M 0 0\n",
    )
    assert fake.mount_of(inner / "x") == Mount(inner, 1 << 30)
    assert fake.mount_of(outer) == Mount(outer, TWO_MIB)
    assert fake.mount_of(Path("/")) is None


@pytest.mark.parametrize(
    ("text", "expected"), [("always [madvise] never", True), ("always madvise [never]", False), ("", False)]
)
def test_transparent_hugepages(fake: Machine, text: str, expected: bool) -> None:
    write(fake, "sys/kernel/mm/transparent_hugepage/enabled", text)
    assert fake.transparent() is expected


def test_available_memory_is_bounded_by_every_cgroup_above(fake: Machine) -> None:
    write(fake, "proc/meminfo", "MemTotal: 100 kB\nMemAvailable:   90 kB\n")
    assert fake.available() == 90 << 10
    write(fake, "proc/self/cgroup", "0::/a/b\n")
    write(fake, "sys/fs/cgroup/a/b/memory.max", "max\n")
    write(fake, "sys/fs/cgroup/a/memory.max", "50000\n")
    write(fake, "sys/fs/cgroup/a/memory.current", "30000\n")
    write(fake, "sys/fs/cgroup/a/memory.stat", "anon 1\nactive_file 1000\ninactive_file 2000\n")
    assert fake.available() == 23000


def test_the_older_cgroups_are_read_too(fake: Machine) -> None:
    write(fake, "proc/self/cgroup", "4:cpu:/x\n3:memory:/x\n")
    write(fake, "sys/fs/cgroup/memory/x/memory.limit_in_bytes", "5000\n")
    write(fake, "sys/fs/cgroup/memory/x/memory.usage_in_bytes", "6000\n")
    assert fake.available() == 0


def test_what_cannot_be_read_is_unknown(fake: Machine) -> None:
    assert fake.available() is None
    assert fake.nodes() == []
    assert fake.hugetlbfs() == []


def test_transparent_bytes_count_the_range_only(fake: Machine) -> None:
    write(
        fake,
        "proc/self/smaps",
        "10000-20000 rw-p 0 0:0 0\nAnonHugePages:       4 kB\n20000-40000 rw-p 0 0:0 0\nAnonHugePages:      64 kB\n",
    )
    assert fake.transparent_bytes(0x20000, 0x20000) == 64 << 10
    assert fake.transparent_bytes(0x10000, 0x1000) == 4096
    assert fake.transparent_bytes(0x50000, 0x1000) == 0
