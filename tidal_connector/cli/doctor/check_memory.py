# SPDX-License-Identifier: Apache-2.0
"""Checks of memory: hugepages wanted and had, ordinary memory, and limits that end an engine later. Pure."""

from __future__ import annotations

from tidal_connector.cli import hugepage_lines
from tidal_connector.cli.doctor.facts import Facts, HugePages
from tidal_connector.cli.doctor.finding import Finding, fail, good, warn
from tidal_connector.cli.doctor.wishes import PoolWish, Wishes
from tidal_connector.config import PageKind
from tidal_connector.memory.report import GIB, MIB, size_text

_PAGE_OF = {PageKind.HUGE_2M: 2 * MIB, PageKind.HUGE_1G: GIB}
_HOLDERS = 3  # that are named
_ENOUGH_SHARED = GIB
_ENOUGH_FILES = 8192


def check_hugepages(facts: Facts, wishes: Wishes) -> list[Finding]:
    """Hugepages of the size that each pool would take, all pools of this machine together."""
    if not wishes.pools:
        had = ", ".join(f"{each.free} of {each.total} x {size_text(each.page)} free" for each in facts.hugepages)
        return [good("hugepages", f"{had or 'the kernel offers none'}; give --config to compare with a pool")]
    lines, wanted = [], dict[int, list[PoolWish]]()
    for pool in wishes.pools:
        if pool.pages is PageKind.HUGETLBFS or pool.path:
            lines += _mounted(pool, facts, wanted)
        elif pool.pages in (PageKind.TRANSPARENT, PageKind.PLAIN):
            lines.append(_ordinary(pool, facts))
        else:
            wanted.setdefault(_page_of(pool, facts), []).append(pool)
    for page, pools in sorted(wanted.items()):
        lines += _reserved(facts.pages(page), pools, facts)
    return lines


def _page_of(pool: PoolWish, facts: Facts) -> int:
    """The size that a pool takes: what it demands, else the larger one if there is any of it, as ``memory.builder``."""
    if pool.pages in _PAGE_OF:
        return _PAGE_OF[pool.pages]
    return GIB if facts.pages(GIB).free * GIB >= pool.bytes else 2 * MIB


def _reserved(have: HugePages, pools: list[PoolWish], facts: Facts) -> list[Finding]:
    name = f"hugepages {size_text(have.page)}"
    need = sum(hugepage_lines.pages_for(pool.bytes, have.page) for pool in pools)
    size = size_text(need * have.page)
    demanded = any(pool.pages in _PAGE_OF for pool in pools)
    say = fail if demanded else warn
    lines = []
    if have.free < need:
        total = have.total + need - have.free
        held = f", {have.total - have.free} are taken{_holders(facts)}" if have.total > have.free else ""
        then = "; pool.pages demands them" if demanded else "; the rest falls back to other pages"
        fix = _lines_to_type(total, have.page, demanded)
        lines.append(say(name, f"{need} wanted ({size}), {have.free} free{held}{then}", fix))
        room = facts.available
        if demanded and room is not None and room < (need - have.free) * have.page:
            lines.append(_no_room(need - have.free, have.page, room))
    else:
        lines.append(good(name, f"{need} wanted ({size}), {have.free} free"))
    lines += _on_nodes(name, have, pools)
    if have.limit is not None and have.limit - have.used < need * have.page:
        text = (
            f"this container may use {size_text(have.limit)} of them ({size_text(have.used)} are used), {size} "
            "are wanted: the engine would die of SIGBUS at the first touch"
        )
        name_of = "hugepages-1Gi" if have.page == GIB else "hugepages-2Mi"
        lines.append(fail(name, text, f"raise the container's hugetlb limit (Kubernetes: limits {name_of})"))
    if any(pool.bytes % have.page for pool in pools):
        over = sum(-pool.bytes % have.page for pool in pools)
        lines.append(warn(name, f"pool.bytes is no multiple of the page: {size_text(over)} stay unused", "round it"))
    return lines


def _lines_to_type(count: int, page: int, demanded: bool) -> str:
    """What reserves so many hugepages in all: now, at boot, and for good. A large pool boots with larger ones."""
    boot = page if demanded else hugepage_lines.page_for(count * page)
    lines = [
        f"now: {hugepage_lines.reserve_now_line(count, page)}",
        f"at boot: {hugepage_lines.boot_line(hugepage_lines.pages_for(count * page, boot), boot)}",
    ]
    if boot == hugepage_lines.TWO_MIB:
        lines.append(f"over reboots: {hugepage_lines.keep_line(count)}")
    return "; ".join(lines)


def _holders(facts: Facts) -> str:
    """Name those that hold hugepages: an engine of these very settings that is running already is no fault."""
    named = [f"pid {user.pid} ({user.command}) {size_text(user.bytes)}" for user in facts.huge_users[:_HOLDERS]]
    return f" by {', '.join(named)}" if named else ""


def _no_room(pages: int, page: int, room: int) -> Finding:
    text = f"{pages} more cannot be reserved now: {size_text(pages * page)} are needed, {size_text(room)} are available"
    return fail("hugepages", text, "lower pool.bytes, or end what holds the memory (reserved hugepages do not count)")


def _on_nodes(name: str, have: HugePages, pools: list[PoolWish]) -> list[Finding]:
    lines = []
    for node in sorted({pool.node for pool in pools if pool.node is not None}):
        need = sum(hugepage_lines.pages_for(pool.bytes, have.page) for pool in pools if pool.node == node)
        free = have.node_free.get(node, 0)
        if free < need and have.free >= need:
            fix = hugepage_lines.reserve_now_line(need, have.page, node)
            lines.append(warn(name, f"{need} wanted on NUMA node {node}, {free} free there", fix))
    return lines


def _mounted(pool: PoolWish, facts: Facts, wanted: dict[int, list[PoolWish]]) -> list[Finding]:
    """A pool in a hugetlbfs file: the path, the mount, its page size and its own limit (FR-46)."""
    if pool.path is None:
        wanted.setdefault(2 * MIB, []).append(pool)
        return []
    mount, name = facts.mounts.get(pool.path), f"hugetlbfs {pool.path}"
    make = f"mkdir -p {pool.path} && mount -t hugetlbfs -o pagesize=2M none {pool.path}"
    if mount is None or not mount.exists:
        return [fail(name, f"pool.path of {pool.file} does not exist", make)]
    if not mount.page:
        return [fail(name, f"pool.path of {pool.file} lies in no hugetlbfs mount", make)]
    if not mount.writable:
        return [
            fail(name, "this user may not write there", f"mount it with -o uid=...,mode=0770, or chmod {pool.path}")
        ]
    if mount.room is not None and mount.room < pool.bytes:
        text = f"the mount's size leaves {size_text(mount.room)}, {size_text(pool.bytes)} are wanted"
        return [fail(name, text, f"mount -o remount,size={pool.bytes} {pool.path}")]
    wanted.setdefault(mount.page, []).append(pool)
    return [good(name, f"a mount of {size_text(mount.page)} pages")]


def _ordinary(pool: PoolWish, facts: Facts) -> Finding:
    if pool.pages is PageKind.TRANSPARENT and not facts.transparent:
        fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return fail("hugepages", f'{pool.file}: pool.pages = "thp", and these are switched off', fix)
    fix = f"take pool.pages out of {pool.file}, so that hugepages are used where there are any"
    return warn("hugepages", f'{pool.file}: pool.pages = "{pool.pages}" is slower than reserved hugepages', fix)


def check_memory(facts: Facts, wishes: Wishes) -> list[Finding]:
    """What the pools take besides free hugepages, against ordinary memory, of which reserved pages are no part."""
    if facts.available is None:
        return [warn("memory", "the kernel does not say how much is available", "look at /proc/meminfo")]
    huge = sum(each.free * each.page for each in facts.hugepages)
    rest = max(0, wishes.pool_bytes - huge)
    where = f"{size_text(facts.available)} available"
    if facts.cgroup_limit is not None and (facts.memory is None or facts.cgroup_limit < facts.memory):
        where += f" (memory cgroup: {size_text(facts.cgroup_limit)} in all)"
    if rest > facts.available:
        text = f"pools take {size_text(rest)} besides free hugepages, {where}: the kernel would end the engine"
        return [fail("memory", text, "reserve hugepages, lower pool.bytes, or raise the container's memory limit")]
    if rest:
        return [good("memory", f"pools take {size_text(rest)} besides free hugepages, {where}")]
    return [good("memory", where)]


def check_memlock(facts: Facts, wishes: Wishes) -> list[Finding]:
    """Whether a transport that pins the pool may: RLIMIT_MEMLOCK and CAP_IPC_LOCK."""
    if facts.may_lock or facts.memlock is None:
        why = "CAP_IPC_LOCK" if facts.may_lock else "unlimited"
        return [good("memlock", why)]
    need = wishes.pool_bytes
    text = f"RLIMIT_MEMLOCK is {size_text(facts.memlock)}"
    fix = {
        "Docker": "docker run --ulimit memlock=-1 (or --cap-add IPC_LOCK)",
        "Podman": "podman run --ulimit memlock=-1",
        "Kubernetes": 'securityContext.capabilities.add: ["IPC_LOCK"]',
    }.get(facts.container, "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity)")
    if wishes.pins and facts.memlock < need:
        return [fail("memlock", f"{text}, a pool of {size_text(need)} is to be pinned for RDMA or an NPU", fix)]
    if wishes.protocols and not wishes.pins:
        return [good("memlock", f"{text}; tcp pins nothing")]
    return [warn("memlock", f"{text}: enough for tcp, not to pin a pool for RDMA or an NPU", fix)]


def check_limits(facts: Facts, _: Wishes) -> list[Finding]:
    """Shared memory for vLLM's processes, and open files for many streams."""
    lines = []
    if facts.shared_memory is not None and facts.shared_memory < _ENOUGH_SHARED:
        text = f"/dev/shm holds {size_text(facts.shared_memory)}; vLLM's processes talk through it"
        fix = "docker run --shm-size=8g, or in Kubernetes an emptyDir of medium Memory at /dev/shm"
        lines.append(warn("limits", text, fix))
    if facts.open_files is not None and facts.open_files < _ENOUGH_FILES:
        text = f"{facts.open_files} open files; a stream takes three in the proxy"
        lines.append(warn("limits", text, f"ulimit -n {_ENOUGH_FILES * 8} (systemd: LimitNOFILE={_ENOUGH_FILES * 8})"))
    return lines or [good("limits", f"open files {facts.open_files or 'unlimited'}, shared memory")]
