# SPDX-License-Identifier: Apache-2.0
"""Agents with a real etcd and engines without a model: killed with -9, cut off, and given back what etcd lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.etcd import needs_etcd
from tidal_connector.cluster import rollout as verbs
from tidal_connector.cluster.agent_settings import to_toml
from tidal_connector.cluster.local import LocalCluster
from tidal_connector.cluster.orders import Order, Want, encode_order, order_key
from tidal_connector.cluster.processes import identify, kill_tree
from tidal_connector.cluster.rollout_records import ENGINES, Stage, Status, View
from tidal_connector.cluster.spec import ClusterSpec, build_spec, revision_id
from tidal_connector.registry.base import Delete, Put, Store
from tidal_connector.registry.members import State
from tidal_connector.registry.settings import open_store

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400), needs_etcd]

WAIT_S = 90.0
STANDIN = (sys.executable, "-m", "tidal_connector.cluster.standin")


def spec(tag: str = "1", count: int = 1, **cluster: Any) -> ClusterSpec:
    group = {
        "count": count,
        "nodes": ["n"],
        "command": STANDIN,
        "vllm": ["--served-model-name", "tidal"],
        "environment": {"TAG": tag},
    }
    table = {"max_surge": 1, "max_unavailable": 0, "drain_deadline_s": 10.0, "ready_deadline_s": 30.0, **cluster}
    return build_spec(
        {"cluster": table, "group": [{"role": "prefill", **group}, {"role": "decode", **group}]},
        "test",
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    supervise = {"probe_every_s": 0.3, "settle_s": 0.3}
    folder = tmp_path_factory.mktemp("cluster")
    with LocalCluster(folder, ["n"], ttl_s=2.0, etcd=True, supervise=supervise) as found:
        yield found


@pytest.fixture(scope="module")
def store(cluster: LocalCluster) -> Iterator[Store]:
    with open_store(cluster.registry) as found:
        yield found


@pytest.fixture
def served(cluster: LocalCluster, store: Store) -> View:
    """One pair that serves."""
    verbs.apply(store, spec(), "ann@x")
    return settled(store)


def settled(store: Store) -> View:
    return until(
        store, lambda view: view.rollout is not None and view.rollout.status is Status.DONE and all_ready(view)
    )


def all_ready(view: View) -> bool:
    members = view.members.engines
    return set(pids(view)) == set(view.assignments) != set() and all(
        name in members and members[name].state is State.READY and members[name].revision == item.revision
        for name, item in view.assignments.items()
    )


def until(store: Store, there: Callable[[View], bool]) -> View:
    deadline = time.monotonic() + WAIT_S
    while True:
        view = verbs.read_view(store)
        if there(view):
            return view
        assert time.monotonic() < deadline, f"it did not come: {view}"
        time.sleep(0.1)


def pids(view: View) -> dict[str, int]:
    reports = {name: view.report(item) for name, item in view.assignments.items()}
    return {
        name: report.pid for name, report in reports.items() if report is not None and report.stage is Stage.RUNNING
    }


def test_engines_outlive_their_agent_and_are_kept_again_when_it_is_back(
    cluster: LocalCluster, store: Store, served: View
) -> None:
    before = pids(served)
    cluster.kill_agent("n")
    until(store, lambda view: not view.agents)
    assert all_ready(verbs.read_view(store))
    crashed = identify(before["decode-0"] if "decode-0" in before else before["decode-1"])
    assert crashed is not None
    kill_tree(crashed)  # nobody is there to see it
    cluster.start_agent("n")
    view = until(store, lambda view: bool(view.agents) and all_ready(view) and crashed.pid not in pids(view).values())
    after = pids(view)
    assert [name for name in before if before[name] != after[name]] == [
        name for name, pid in before.items() if pid == crashed.pid
    ]
    assert sum(report.restarts for report in view.reports.values()) == 1


def test_a_crashed_engine_comes_back_and_is_let_in_without_a_rollout(store: Store, served: View) -> None:
    name, pid = next(iter(pids(served).items()))
    process = identify(pid)
    assert process is not None
    os.kill(pid, signal.SIGKILL)  # its supervisor; the engine below it must not stay behind
    view = until(store, lambda view: pids(view).get(name) not in (pid, 0) and all_ready(view))
    assert view.rollout is not None
    assert served.rollout is not None
    assert view.rollout.number == served.rollout.number


def test_a_rollout_goes_on_when_agent_and_operator_are_killed_midway(
    cluster: LocalCluster, store: Store, served: View, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        json_toml(spec("2"), cluster.registry.url),
        encoding="utf-8",
    )
    words = [sys.executable, "-m", "tidal_connector.cli", "rollout", "apply", str(file), "--wait"]
    operator = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        assert served.rollout is not None
        number = served.rollout.number + 1
        until(store, lambda view: view.rollout is not None and view.rollout.number == number and view.rollout.steps > 0)
    finally:
        operator.kill()
        operator.wait(5)
    cluster.kill_agent("n")
    cluster.start_agent("n")
    view = settled(store)
    assert view.rollout is not None
    assert view.rollout.number == number
    assert {item.revision for item in view.assignments.values()} == {revision_id(spec("2"))}


def test_a_registry_that_lost_its_data_gets_the_rollout_back_and_no_engine_ends(
    cluster: LocalCluster, store: Store, served: View
) -> None:
    before = pids(served)
    assert cluster.etcd is not None
    cluster.etcd.kill()
    cluster.etcd.wipe()
    cluster.etcd.start()
    view = settled(store)
    assert pids(view) == before
    assert view.rollout == served.rollout
    assert view.history == served.history
    verbs.apply(store, spec("3"), "ann@x")
    assert {item.revision for item in settled(store).assignments.values()} == {revision_id(spec("3"))}


def test_etcd_may_be_away_for_longer_than_a_lease(cluster: LocalCluster, store: Store, served: View) -> None:
    before = pids(served)
    assert cluster.etcd is not None
    cluster.etcd.kill()
    time.sleep(3.0)  # the lease is 2 s
    cluster.etcd.start()
    assert pids(until(store, all_ready)) == before


def test_an_engine_without_an_assignment_is_drained(store: Store, served: View) -> None:
    name, pid = next(iter(pids(served).items()))
    process = identify(pid)
    assert process is not None
    kept = store.read(ENGINES + name).entries[ENGINES + name]
    store.write([Delete(ENGINES + name)])
    until(store, lambda view: identify(pid) != process)
    store.write([Put(ENGINES + name, kept.value)])
    until(store, all_ready)


def test_an_engine_that_an_operator_drains_stays_down_until_the_order_is_withdrawn(store: Store, served: View) -> None:
    name, pid = next((name, pid) for name, pid in pids(served).items() if name.startswith("decode"))
    process = identify(pid)
    store.write([Put(order_key(name), encode_order(Order(Want.DRAIN, deadline_s=5.0, by="ann@x")))])
    until(store, lambda view: view.reports[name].stage is Stage.DRAINED and name not in view.members.engines)
    assert identify(pid) != process
    store.write([Delete(order_key(name))])
    view = until(store, all_ready)
    assert view.reports[name].restarts == served.reports[name].restarts


def test_a_second_agent_of_the_node_starts_nothing_and_is_told_of_the_first(
    cluster: LocalCluster, store: Store, served: View, tmp_path: Path
) -> None:
    words = ["agent", "--registry", cluster.registry.url, "--node", "n", "--state", str(tmp_path / "other")]
    config = tmp_path / "agent.toml"
    config.write_text(to_toml({"registry": {"url": cluster.registry.url, "ttl_s": 2.0}}), encoding="utf-8")
    command = [sys.executable, "-m", "tidal_connector.cli", *words, "--config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 2
    first = served.agents["n"]
    assert f"node = 'n': process {first.pid} on {first.machine} (host 127.0.0.1) is this node's agent" in ended.stderr
    assert "this agent starts and adopts nothing" in ended.stderr
    assert not list((tmp_path / "other" / "engines").iterdir())
    after = verbs.read_view(store)
    assert (pids(after), after.agents) == (pids(served), served.agents)


def json_toml(of: ClusterSpec, url: str) -> str:
    table = msgspec.to_builtins(of)
    table["cluster"]["registry"] = {"url": url}
    return to_toml(table)


def test_the_command_line_refuses_the_second_operator_and_shows_status_and_history(
    cluster: LocalCluster, store: Store, served: View, tmp_path: Path
) -> None:
    def tidal(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tidal_connector.cli", "rollout", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)

    where = ("--registry", cluster.registry.url)
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text(json_toml(spec("4"), cluster.registry.url), encoding="utf-8")
    two.write_text(json_toml(spec("5"), cluster.registry.url), encoding="utf-8")
    assert tidal("apply", str(one)).returncode == 0
    assert tidal("pause", *where).returncode == 0
    refused = tidal("apply", str(two))
    assert refused.returncode == 2
    assert f"was begun by {verbs.whoami()} at 20" in refused.stderr
    status = tidal("status", "--json", *where)
    assert json.loads(status.stdout)["rollout"]["status"] == "paused"
    assert tidal("resume", "--wait", *where).returncode == 0
    shown = tidal("status", *where).stdout
    assert "2 of 2 engines" in shown
    listed = json.loads(tidal("history", "--json", *where).stdout)
    assert (listed[-1]["revision"], listed[-1]["status"]) == (revision_id(spec("4")), "done")
    assert tidal("undo", *where, "--wait").returncode == 0
    assert tidal("status", "--registry", "etcd://127.0.0.1:1").returncode == 2
