# SPDX-License-Identifier: Apache-2.0
"""The lines an administrator types to get hugepages: at boot, now, and for good. Pure; for ``plan`` and ``doctor``."""

from __future__ import annotations

TWO_MIB, ONE_GIB = 2 << 20, 1 << 30
LARGE_POOL = 32 * ONE_GIB
"""From this size on a pool is better off on pages of 1 GiB: the boot reserves them, and page walks get rarer."""


def page_for(pool_bytes: int) -> int:
    """Return the size of hugepages to reserve for a pool."""
    return ONE_GIB if pool_bytes >= LARGE_POOL else TWO_MIB


def pages_for(pool_bytes: int, page: int) -> int:
    """Return how many hugepages of a size a pool takes."""
    return -(-pool_bytes // page)


def boot_line(count: int, page: int) -> str:
    """Return what to add to the kernel's command line, so that memory is not fragmented yet when it is reserved."""
    return f"hugepagesz={'1G' if page == ONE_GIB else '2M'} hugepages={count}"


def reserve_now_line(count: int, page: int, node: int | None = None) -> str:
    """Return the command that reserves them on a running machine; it may get fewer where memory is fragmented.

    Args:
        count: of pages, those that are there already included.
        page: their size in bytes.
        node: NUMA node; None leaves the choice to the kernel.
    """
    if node is not None:
        folder = f"/sys/devices/system/node/node{node}/hugepages/hugepages-{page >> 10}kB"
        return f"echo {count} > {folder}/nr_hugepages"
    if page == TWO_MIB:
        return f"sysctl -w vm.nr_hugepages={count}"
    return f"echo {count} > /sys/kernel/mm/hugepages/hugepages-{page >> 10}kB/nr_hugepages"


def keep_line(count: int) -> str:
    """Return the command that keeps hugepages of 2 MiB over a reboot."""
    return f"echo vm.nr_hugepages={count} > /etc/sysctl.d/60-tidal.conf"
