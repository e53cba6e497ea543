# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidal_connector.memory.machine import Machine

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
