# SPDX-License-Identifier: Apache-2.0
"""What the doctor reads: a kernel's files in a folder, files of settings, and this machine as it is."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.cli.machines import asks, write
from tidal_connector.cli.doctor import gather as gathering
from tidal_connector.cli.doctor.clock import read_clock
from tidal_connector.cli.doctor.cluster_wishes import NodeWish, state_wish
from tidal_connector.cli.doctor.facts import Facts, HugeMount, HugePages, NumaNode
from tidal_connector.cli.doctor.gather import gather
from tidal_connector.cli.doctor.wishes import PoolWish, Wishes, read_wishes
from tidal_connector.config import PageKind, Protocol
from tidal_connector.errors import ConfigError
from tidal_connector.memory.report import GIB, MIB
from tidal_connector.registry.settings import RegistryConfig

ROOT = Path(__file__).resolve().parents[2]
HUGE = "sys/kernel/mm/hugepages/hugepages-{}kB/{}"
CLUSTER = """
[cluster]
allow_outage = true
[cluster.registry]
url = "etcd://10.0.0.9:2379"
[[group]]
role = "prefill"
count = 1
nodes = ["a"]
model = "m"
[[group]]
role = "decode"
count = 3
nodes = ["a", "b"]
model = "m"
[group.tidal.pool]
bytes = "2GiB"
"""


@pytest.fixture(autouse=True)
def nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "IMPORTS", {})  # seconds in each test; one test below imports for real


def facts_of(root: Path, files: dict[str, str], wishes: Wishes | None = None) -> Facts:
    return gather(write(root, files), wishes or asks())


def test_a_folder_without_anything_gives_facts_of_nothing(tmp_path: Path) -> None:
    facts = gather(tmp_path, asks())
    assert (facts.hugepages, facts.available, facts.memlock, facts.nodes, facts.rdma) == ((), None, None, (), ())
    assert (facts.ascend.devices, facts.listeners, facts.shared_memory, facts.cgroup_limit) == ((), (), None, None)


def test_hugepages_with_their_nodes_and_the_container_s_limit(tmp_path: Path) -> None:
    node = "sys/devices/system/node/node{}/hugepages/hugepages-2048kB/free_hugepages"
    facts = facts_of(
        tmp_path,
        {
            HUGE.format(2048, "nr_hugepages"): "100",
            HUGE.format(2048, "free_hugepages"): "60",
            HUGE.format(2048, "resv_hugepages"): "10",
            HUGE.format(1048576, "nr_hugepages"): "0",
            node.format(0): "40",
            node.format(1): "20",
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/hugetlb.2MB.max": "max",
            "sys/fs/cgroup/pod/hugetlb.2MB.max": str(64 * MIB),
            "sys/fs/cgroup/pod/hugetlb.2MB.current": str(2 * MIB),
        },
    )
    assert facts.pages(2 * MIB) == HugePages(2 * MIB, 100, 50, {0: 40, 1: 20}, 64 * MIB, 2 * MIB)
    assert facts.pages(GIB).limit is None
    assert facts.pages(512 * MIB) == HugePages(512 * MIB, 0, 0)


def test_who_holds_hugepages(tmp_path: Path) -> None:
    files = {
        "proc/5/status": "Name:\ta\nHugetlbPages:\t    4096 kB\n",
        "proc/5/cmdline": "python\0-m\0x",
        "proc/6/status": "Name:\tb\nHugetlbPages:\t       0 kB\n",
        "proc/7/status": "Name:\tc\nHugetlbPages:\t    8192 kB\n",
    }
    users = facts_of(tmp_path, files).huge_users
    assert [(user.pid, user.command, user.bytes) for user in users] == [(7, "", 8 * MIB), (5, "python -m x", 4 * MIB)]


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/a/b", {"sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/memory.max": "5000"}, 5000),
        ("0::/a/b", {"sys/fs/cgroup/a/b/memory.max": "9000", "sys/fs/cgroup/a/memory.max": "5000"}, 5000),
        ("4:memory:/x", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "7000"}, 7000),
        ("4:memory:/x", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": str((1 << 63) - 4096)}, None),
    ],
)
def test_the_smallest_memory_limit_counts(
    tmp_path: Path, cgroup: str, files: dict[str, str], limit: int | None
) -> None:
    assert facts_of(tmp_path, {"proc/self/cgroup": cgroup + "\n", **files}).cgroup_limit == limit


def test_limits_and_capabilities(tmp_path: Path) -> None:
    heading = "Limit                     Soft Limit           Hard Limit           Units     \n"
    files = {
        "proc/self/limits": heading
        + "Max open files            1024                 4096                 files     \n"
        + "Max locked memory         65536                unlimited            bytes     \n"
        + "Max file size             unlimited            unlimited            bytes     \n",
        "proc/self/status": "Name:\tx\nCapEff:\t0000000000004000\n",
        "proc/1/cgroup": "0::/kubepods/burstable/pod1/x\n",
    }
    facts = facts_of(tmp_path, files)
    assert (facts.open_files, facts.memlock, facts.may_lock, facts.container) == (1024, 65536, True, "Kubernetes")
    files["proc/self/status"] = "CapEff:\t0000000000003fff\n"
    assert not facts_of(tmp_path, files).may_lock


def test_nodes_and_cards(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        {
            "sys/devices/system/node/node0/distance": "10 21\n",
            "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       1048576 kB\n",
            "sys/devices/system/node/node0/cpulist": "0-7\n",
            "sys/devices/system/node/node1/distance": "21 10\n",
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet\n",
            "sys/class/infiniband/mlx5_0/device/numa_node": "1\n",
            "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
        },
    )
    assert facts.nodes == (NumaNode(0, (10, 21), GIB, "0-7"), NumaNode(1, (21, 10), 0, ""))
    assert [(card.name, card.states, card.layers, card.node) for card in facts.rdma] == [
        ("mlx5_0", ("ACTIVE",), ("Ethernet",), 1),
        ("mlx5_1", ("DOWN",), ("",), -1),
    ]


def test_listeners_of_both_families_with_their_processes(tmp_path: Path) -> None:
    heading = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    four = "   0: 0100007F:1C20 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 111 1 0 100\n"
    open_one = (
        "   1: 0100007F:1C21 0100007F:0001 01 00000000:00000000 00:00000000 00000000     0        0 112 1 0 100\n"
    )
    six = (
        "   0: 000080FE000000000000000001000000:1F40 00000000000000000000000000000000:0000 0A 00000000:00000000 "
        "00:00000000 00000000     0        0 113 1 0 100\n"
    )
    write(
        tmp_path,
        {"proc/net/tcp": heading + four + open_one, "proc/net/tcp6": heading + six, "proc/77/cmdline": "vllm\0-x"},
    )
    (tmp_path / "proc/77/fd").mkdir()
    os.symlink("socket:[111]", tmp_path / "proc/77/fd/3")
    found = gather(tmp_path, asks()).listeners
    assert [(each.address, each.port, each.pid, each.command) for each in found] == [
        ("127.0.0.1", 7200, 77, "vllm -x"),
        ("fe80::1", 8000, 0, ""),
    ]


def test_a_socket_of_this_process_is_found_on_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (mine,) = [found for found in gather(Path("/"), asks()).listeners if found.port == port]
    assert (mine.address, mine.pid) == ("127.0.0.1", os.getpid())
    assert "pytest" in mine.command


def test_a_path_of_the_pool_is_looked_at(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    wishes = asks(PoolWish("d", GIB, path=str(place)), PoolWish("d", GIB, path=str(tmp_path / "absent")))
    files = {"proc/self/mounts": f"huge {place} hugetlbfs rw,pagesize=2M 0 0\n"}
    mounts = facts_of(tmp_path, files, wishes).mounts
    assert mounts[str(place)].page == 2 * MIB
    assert mounts[str(tmp_path / "absent")] == HugeMount(str(tmp_path / "absent"), False, False, 0, None)


def test_the_kernel_s_clock_can_be_asked(tmp_path: Path) -> None:
    clock = read_clock(write(tmp_path, {"sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n"}))
    assert clock.source == "tsc"
    assert abs(clock.stepped_s) < 0.05


def test_what_cannot_be_imported_says_why() -> None:
    assert gathering._import("import json") == ""
    assert "No module named 'absent_module'" in gathering._import("import absent_module")
    assert gathering._import("import os; os._exit(7)") == "exit status 7"


def test_the_example_files_say_what_they_want() -> None:
    wishes = read_wishes([ROOT / f"configs/{name}.toml" for name in ("decode", "prefill", "proxy")])
    assert [pool.bytes for pool in wishes.pools] == [GIB]
    assert {(port.field, port.port) for port in wishes.ports} >= {("control.bind", 7200), ("listen", 8000)}
    assert (wishes.protocols, wishes.problems, len(wishes.files)) == ({Protocol.TCP}, {}, 3)


def test_an_engine_that_listens_on_every_address_has_to_say_which_peers_use(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text('engine = "e"\n[tidal.control]\nbind = "0.0.0.0:7200"\n')
    (address,) = read_wishes([file]).addresses
    assert address.problem == (
        "control.bind = '0.0.0.0' listens on every address, and control.advertise does not say which peers use"
    )


def test_a_pool_is_wanted_by_those_that_offload(tmp_path: Path) -> None:
    wanted = {"on": 1, "adaptive": 1, "off": 0}
    for offload, count in wanted.items():
        file = tmp_path / "e.toml"
        file.write_text(
            f'engine = "e"\n[tidal]\noffload = "{offload}"\n[tidal.pool]\nbytes = "3MiB"\npages = "2m"\nnuma = 1\n'
        )
        pools = read_wishes([file]).pools
        assert pools == (PoolWish(str(file), 3 * MIB, PageKind.HUGE_2M, None, 1),) * count


def test_a_cluster_s_file_counts_the_engines_of_one_node(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    wishes = read_wishes([file])
    assert wishes.problems == {}
    assert [pool.bytes for pool in wishes.pools] == [2 * GIB, 2 * GIB]  # two of three decode engines are on node a
    assert wishes.registry is not None
    assert wishes.registry.url == "etcd://10.0.0.9:2379"
    assert read_wishes([file], "file:///run/x").registry.url == "file:///run/x"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("more", "url", "problem"),
    [
        ("", '"etcd://10.0.0.9:2379"', None),
        ("", "5", "cluster.registry: url = 5: expected `str`, got `int`"),
        ('cluster = "other"', '"etcd://h:1"', "cluster.name = 'prod', but cluster.registry.cluster = 'other'"),
    ],
)
def test_the_registry_of_a_cluster_s_file_is_that_of_its_name(
    tmp_path: Path, more: str, url: str, problem: str | None
) -> None:
    file = tmp_path / "cluster.toml"
    named = CLUSTER.replace("[cluster]", '[cluster]\nname = "prod"', 1)
    file.write_text(named.replace('url = "etcd://10.0.0.9:2379"', f"url = {url}\n{more}"))
    wishes = read_wishes([file])
    if problem is None:
        assert wishes.registry == RegistryConfig(url="etcd://10.0.0.9:2379", cluster="prod")
        assert wishes.problems == {}
    else:
        assert wishes.registry is None
        assert problem in wishes.problems[str(file)]


def test_a_registry_that_is_given_is_asked_for_the_file_s_cluster(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    named = CLUSTER.replace("[cluster]", '[cluster]\nname = "prod"', 1)
    file.write_text(named.replace('url = "etcd://10.0.0.9:2379"', ""))
    wishes = read_wishes([file], "etcd://10.0.0.7:2379")
    assert wishes.registry == RegistryConfig(url="etcd://10.0.0.7:2379", cluster="prod")


def test_an_agent_s_file_says_which_node_this_is(tmp_path: Path) -> None:
    file, agent = tmp_path / "cluster.toml", tmp_path / "agent.toml"
    file.write_text(CLUSTER)
    for node, pools in (("a", 2), ("b", 1), ("c", 2)):  # c is no node of it, so the fullest one is looked at
        agent.write_text(f'node = "{node}"\nhost = "10.0.0.7"\n[registry]\nurl = "etcd://10.0.0.9:2379"\n')
        wishes = read_wishes([file, agent])
        assert (wishes.problems, len(wishes.pools), wishes.node) == ({}, pools, node)
        engines = {"a": 3, "b": 1, "c": 3}[node]
        assert wishes.nodes == (NodeWish(str(file), node, ("a", "b"), engines),)
    assert [(each.first, each.last) for each in wishes.ranges] == [(21000, 21999)]
    assert [(each.text, each.problem) for each in wishes.addresses] == [("10.0.0.7", "")]
    assert [(each.field, each.path) for each in wishes.places] == [("state", "/var/lib/tidal")]
    example = read_wishes([ROOT / "configs/agent.toml", ROOT / "configs/cluster.toml"])
    assert (example.problems, len(example.files)) == ({}, 2)
    assert [pool.bytes for pool in example.pools] == [256 * GIB]
    assert "no such folder" in {each.problem for each in example.places if each.field.startswith("model")}


def test_models_are_looked_for_where_they_are_served(tmp_path: Path) -> None:
    file, model = tmp_path / "cluster.toml", tmp_path / "model"
    file.write_text(CLUSTER.replace('"m"', f'"{model}"'))

    def problems() -> set[str]:
        return {each.problem for each in read_wishes([file]).places}

    assert problems() == {"no such folder"}
    model.mkdir()
    assert problems() == {"no config.json in it"}
    (model / "config.json").write_text("{}")
    assert problems() == {""}
    file.write_text(CLUSTER)  # a name
    assert problems() == set()


def test_an_agent_s_folder_has_to_be_one_that_can_be_written(tmp_path: Path) -> None:
    assert state_wish("agent.toml", str(tmp_path / "a/b")).problem == ""
    (tmp_path / "a").write_text("")
    assert state_wish("agent.toml", str(tmp_path / "a/b")).problem == f"{tmp_path}/a is no folder"
    assert state_wish("agent.toml", "/proc/tidal").problem == "this user may not write in /proc" or not os.getuid()


def test_what_is_wrong_with_a_file_hides_no_other(tmp_path: Path) -> None:
    odd, broken = tmp_path / "odd.toml", tmp_path / "broken.toml"
    odd.write_text('engine = "e"\n[tidal.pol]\nbytes = 1\n')
    broken.write_text("=")
    wishes = read_wishes([odd, broken, ROOT / "configs/decode.toml"])
    assert "did you mean 'pool'" in wishes.problems[str(odd)]
    assert str(broken) in wishes.problems
    assert len(wishes.pools) == 1


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_wishes([tmp_path / "absent.toml"])
