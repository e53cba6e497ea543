# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.standins.ascendcl import Standin
from tests.standins.build import ascendcl
from tidal_connector.memory import mapping
from tidal_connector.memory.acl import AclRuntime
from tidal_connector.memory.machine import Machine
from tidal_connector.memory.region import MemoryRegion
from tidal_connector.memory.report import RegionReport

NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
# What tidal_connector.cluster.hugepages locks, too: either would restore the other's number.
LOCK = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
TWO_MIB = 2 << 20


@pytest.fixture
def hugepages() -> Iterator[Callable[[int], None]]:
    """A function that makes exactly so many 2 MiB hugepages free; the machine's setting is restored afterwards."""
    if not os.access(NR_HUGEPAGES, os.W_OK):
        pytest.skip("hugepages can be reserved by root only")
    with LOCK.open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = int(NR_HUGEPAGES.read_text())

        def reserve(pages: int) -> None:
            used = int(NR_HUGEPAGES.read_text()) - Machine().free_hugepages(TWO_MIB)
            NR_HUGEPAGES.write_text(str(used + pages))
            if Machine().free_hugepages(TWO_MIB) != pages:
                pytest.skip(f"the kernel did not reserve {pages} hugepages (memory is fragmented or short)")

        try:
            yield reserve
        finally:
            NR_HUGEPAGES.write_text(str(before))


@pytest.fixture
def standin() -> Iterator[Standin]:
    """The stand-in for libascendcl, as a fresh process finds it; no rule may have been broken at the end."""
    library = Standin(ascendcl())
    yield library
    assert library.violations() == []
    assert library.registrations == 0
    library.reset()


@pytest.fixture
def runtime(standin: Standin) -> AclRuntime:
    """The runtime that the stand-in plays."""
    return AclRuntime.open(standin.path)


@pytest.fixture
def mere_space() -> Iterator[Callable[[int], MemoryRegion]]:
    """A function that makes a region of any size out of address space alone; nothing may touch it."""
    regions = []

    def make(length: int) -> MemoryRegion:
        space = length + (1 << 30)
        start = mapping.reserve(space)
        address = -(-start // (1 << 30)) * (1 << 30)
        report = RegionReport(length, (), 0, None, ())
        regions.append(MemoryRegion(address, length, report, lambda: mapping.unmap(start, space)))
        return regions[-1]

    yield make
    for region in regions:
        region.close()
