# SPDX-License-Identifier: Apache-2.0
"""What the machine has to give: free hugepages, hugetlbfs mounts, transparent hugepages, memory, limits.

Hugepages that are reserved do not count as "available" memory, so the two are asked apart: a pool on
hugepages must never be refused because the ordinary memory is short. Reads the kernel's files at each call;
``root`` lets a test bring its own.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mount:
    """A hugetlbfs mount: where, and its page size in bytes."""

    path: Path
    page: int


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    limit: str
    usage: str
    reclaimable: tuple[str, ...]


_CGROUP = {  # by whether it is the second version
    True: _CgroupFiles("memory.max", "memory.current", ("active_file", "inactive_file")),
    False: _CgroupFiles(
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """The kernel's view of this machine, below ``root``."""

    root: Path = Path("/")

    def free_hugepages(self, page: int, node: int | None = None) -> int:
        """Return how many hugepages of ``page`` bytes are free and not promised to others."""
        name = f"hugepages-{page >> 10}kB"
        base = self.root / "sys/kernel/mm/hugepages" / name
        free = _number(base / "free_hugepages") - _number(base / "resv_hugepages")
        if node is not None:
            local = self.root / f"sys/devices/system/node/node{node}/hugepages" / name / "free_hugepages"
            free = min(free, _number(local))
        return max(0, free)

    def nodes(self) -> list[int]:
        """Return the NUMA nodes; empty where the kernel shows none."""
        found = (self.root / "sys/devices/system/node").glob("node[0-9]*")
        return sorted(int(path.name.removeprefix("node")) for path in found)

    def hugetlbfs(self) -> list[Mount]:
        """Return the hugetlbfs mounts that this process may write to, in the order of the mount table."""
        return [mount for mount in self._mounts() if os.access(mount.path, os.W_OK | os.X_OK)]

    def mount_of(self, path: Path) -> Mount | None:
        """Return the hugetlbfs mount that a path lies in; None if it lies in none."""
        real = path.resolve()
        inside = [mount for mount in self._mounts() if real.is_relative_to(mount.path)]
        return max(inside, key=lambda mount: len(mount.path.parts), default=None)

    def transparent(self) -> bool:
        """Say whether ``madvise`` can ask for transparent hugepages."""
        text = _text(self.root / "sys/kernel/mm/transparent_hugepage/enabled")
        return "[always]" in text or "[madvise]" in text

    def available(self) -> int | None:
        """Return the bytes of ordinary memory that can still be had, the memory cgroups included; None if unknown."""
        found = [value for value in (self._available_memory(), *self._cgroup_room()) if value is not None]
        return min(found, default=None)

    def transparent_bytes(self, address: int, length: int) -> int:
        """Return how much of an address range of this process lies on transparent hugepages, in bytes."""
        total, inside = 0, False
        for line in _text(self.root / "proc/self/smaps").splitlines():
            name, _, rest = line.partition(":")
            if name in ("AnonHugePages", "ShmemPmdMapped"):
                total += (int(rest.split()[0]) << 10) if inside else 0
            elif "-" in line.split(" ", 1)[0]:
                start, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
                inside = start < address + length and end > address
        return min(total, length)

    def cgroups(self, controller: str) -> Iterator[tuple[Path, bool]]:
        """Yield this process's cgroup of a controller and those above it, and whether it is of the second version."""
        for line in _text(self.root / "proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", controller):
                continue
            base = self.root / "sys/fs/cgroup" / controllers
            group = base / path.lstrip("/")
            for each in (group, *group.parents):
                yield each, not controllers
                if each == base:
                    break

    def shared_transparent(self) -> bool:
        """Say whether ``madvise`` can ask for transparent hugepages under memory that processes share."""
        text = _text(self.root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
        return any(word in text for word in ("[always]", "[within_size]", "[advise]", "[force]"))

    def kernel(self) -> tuple[int, int] | None:
        """Return the kernel's version, as (6, 1); None where it cannot be read."""
        found = re.match(r"(\d+)\.(\d+)", _text(self.root / "proc/sys/kernel/osrelease"))
        return None if found is None else (int(found[1]), int(found[2]))

    def memlock(self) -> int | None:
        """Return RLIMIT_MEMLOCK in bytes; None if it binds nobody."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return None if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft

    def _mounts(self) -> list[Mount]:
        found = []
        for line in _text(self.root / "proc/self/mounts").splitlines():
            fields = line.split()
            if len(fields) > 3 and fields[2] == "hugetlbfs":
                path = Path(fields[1].replace("\\040", " "))
                found.append(Mount(path, _page_size(fields[3]) or os.statvfs(path).f_bsize))
        return found

    def _available_memory(self) -> int | None:
        for line in _text(self.root / "proc/meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
        return None

    def _cgroup_room(self) -> list[int | None]:
        rooms: list[int | None] = []
        for group, second in self.cgroups("memory"):
            files = _CGROUP[second]
            limit = _text(group / files.limit)
            if limit.isdigit():
                statistics = _text(group / "memory.stat")
                cache = sum(_statistic(statistics, name) for name in files.reclaimable)
                rooms.append(max(0, int(limit) - _number(group / files.usage) + cache))
        return rooms


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdigit() else 0


def _statistic(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _page_size(options: str) -> int | None:
    for option in options.split(","):
        name, _, value = option.partition("=")
        if name == "pagesize":
            return int(value[:-1]) << {"K": 10, "M": 20, "G": 30}[value[-1].upper()]
    return None
