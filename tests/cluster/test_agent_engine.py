# SPDX-License-Identifier: Apache-2.0
"""One engine's life on a node, with a small process in the place of its supervisor."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cluster.standins import until
from tidal_connector.cluster import agent_engine, processes
from tidal_connector.cluster.agent_engine import EngineKeeper
from tidal_connector.cluster.agent_folder import AgentFolder, Record
from tidal_connector.cluster.agent_ports import Ports
from tidal_connector.cluster.agent_settings import (
    AgentConfig,
    check_agent_config,
    read_agent_config,
    serve_settings,
    to_toml,
)
from tidal_connector.cluster.rollout_records import Assignment, Report, Stage, Work
from tidal_connector.cluster.serving import read_serve_config
from tidal_connector.cluster.spec import ClusterSpec, build_spec, revision_id, template_id
from tidal_connector.errors import ConfigError
from tidal_connector.ids import Role
from tidal_connector.registry.settings import RegistryConfig

SLEEPER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("up", flush=True)
time.sleep(120)
"""


def spec(**group: Any) -> ClusterSpec:
    table = {"nodes": ["n"], "model": "m", "count": 2, **group}
    return build_spec(
        {
            "cluster": {"drain_deadline_s": 5.0},
            "group": [{"role": "prefill", **table}, {"role": "decode", **table}],
        },
        "test",
    )


def assignment(of: ClusterSpec, **more: Any) -> Assignment:
    group = of.groups()["decode"]
    base = Assignment(
        engine="decode-1",
        group="decode",
        slot=1,
        node="n",
        role=Role.DECODE,
        template=template_id(of, group),
        revision=revision_id(of),
    )
    return msgspec.structs.replace(base, **more)


class Bed:
    """A node's folder, a clock to set, and keepers that come and go as agents do."""

    def __init__(self, folder: AgentFolder, path: Path) -> None:
        self.folder = folder
        self.now = 1000.0
        self.spec = spec()
        self.config = check_agent_config(
            AgentConfig(registry=RegistryConfig(url=f"file://{path}/reg"), node="n"), "test"
        )
        self.pids: list[int] = []
        self.code = SLEEPER

    def command(self, of: ClusterSpec, item: Assignment, file: Path) -> list[str]:
        return [sys.executable, "-c", self.code, str(file)]

    def keeper(self) -> EngineKeeper:
        ports = Ports("127.0.0.1", self.config.port_range())
        record = self.folder.records().get("decode-1")
        return EngineKeeper(self.config, self.folder, ports, "decode-1", record, lambda: self.now)

    def step(self, keeper: EngineKeeper, drained: bool = False, **more: Any) -> Report:
        report = keeper.step(assignment(self.spec, **more), self.spec, drained)
        self.pids += [report.pid] if report.pid else []
        return report

    def log(self) -> str:
        return self.folder.log("decode-1").read_text()

    def record(self) -> Record:
        return self.folder.records()["decode-1"]


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    with AgentFolder(tmp_path / "state") as folder:
        found = Bed(folder, tmp_path)
        monkeypatch.setattr(agent_engine, "serve_command", found.command)
        yield found
        for pid in found.pids:
            process = processes.identify(pid)
            if process is not None:
                processes.kill_tree(process)


def test_an_engine_is_started_and_its_settings_are_those_of_its_group(bed: Bed) -> None:
    report = bed.step(bed.keeper())
    assert (report.stage, report.restarts) == (Stage.RUNNING, 0)
    config = read_serve_config(Path(bed.record().file))
    assert (config.engine, config.revision, config.node, config.admission) == (
        "decode-1",
        revision_id(bed.spec),
        "n",
        True,
    )
    assert config.registry == bed.config.registry
    assert config.supervise.drain_s == 5.0
    assert config.http.bind == f"127.0.0.1:{bed.record().ports[0]}"
    assert config.tidal["control"] == {"bind": f"127.0.0.1:{bed.record().ports[1]}"}


def test_an_engine_outlives_its_agent_and_is_adopted(bed: Bed) -> None:
    pid = bed.step(bed.keeper()).pid
    report = bed.step(bed.keeper())
    assert (report.stage, report.pid, report.restarts) == (Stage.RUNNING, pid, 0)


def test_an_agent_that_ended_between_start_and_record_finds_the_process(bed: Bed) -> None:
    pid = bed.step(bed.keeper()).pid
    bed.folder.keep(msgspec.structs.replace(bed.record(), process=None))
    assert bed.step(bed.keeper()).pid == pid


def test_a_crash_is_followed_by_a_pause_that_grows_and_a_new_start(bed: Bed) -> None:
    bed.code = "print('cannot find the model'); raise SystemExit(3)"
    keeper = bed.keeper()
    for restart, pause in ((1, 1.0), (2, 2.0), (3, 4.0)):
        first = bed.step(keeper)
        assert first.stage is Stage.RUNNING
        until(lambda first=first: processes.identify(first.pid) is None, 10)
        report = bed.step(keeper)
        assert (report.stage, report.restarts) == (Stage.BACKOFF, restart)
        assert report.why == "it ended with status 3; the end of its log: cannot find the model"
        bed.now += pause - 0.1
        assert bed.step(keeper).stage is Stage.BACKOFF
        bed.now += 0.2
    bed.code = SLEEPER
    report = bed.step(bed.keeper())  # an agent that comes back meanwhile goes on counting
    assert report.restarts == 4
    bed.now += 30
    keeper = bed.keeper()
    for _ in range(2):
        bed.step(keeper)
        bed.now += 30
    assert bed.step(keeper).stage is Stage.RUNNING
    bed.now += 301
    assert bed.step(keeper).restarts == 0


def test_what_a_dead_supervisor_leaves_behind_ends_before_a_new_start(bed: Bed) -> None:
    bed.code = (
        "import subprocess, sys; "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True); sys.exit(1)"
    )
    keeper = bed.keeper()
    first = bed.step(keeper)
    until(lambda: processes.identify(first.pid) is None, 10)
    (left,) = processes.marked(agent_engine.MARK, bed.record().file)
    bed.code = SLEEPER
    bed.step(keeper)
    bed.now += 2  # the pause is over, but what holds the device is still there
    assert bed.step(keeper).stage is Stage.BACKOFF
    bed.now += agent_engine.LEFT_BEHIND_S
    assert bed.step(keeper).stage is Stage.RUNNING
    assert not processes.alive(left)


def test_an_engine_that_ended_as_it_was_told_to_is_started_again_at_once(bed: Bed) -> None:
    bed.code = "pass"
    keeper = bed.keeper()
    first = bed.step(keeper)
    until(lambda: processes.identify(first.pid) is None, 10)
    bed.code = SLEEPER
    second = bed.step(keeper)
    assert (second.stage, second.restarts) == (Stage.RUNNING, 0)
    assert second.pid != first.pid


def test_an_order_to_drain_keeps_an_engine_down_until_it_is_withdrawn(bed: Bed) -> None:
    bed.code = "raise SystemExit(1)"
    keeper = bed.keeper()
    first = bed.step(keeper)
    until(lambda: processes.identify(first.pid) is None, 10)
    assert bed.step(keeper, drained=True).stage is Stage.DRAINED
    bed.code = SLEEPER
    bed.step(keeper)
    bed.now += 2
    assert bed.step(keeper).stage is Stage.RUNNING


def test_an_engine_is_asked_once_to_end_however_often_its_agent_comes_back(bed: Bed) -> None:
    keeper = bed.keeper()
    bed.step(keeper)
    until(lambda: "up" in bed.log(), 10)
    for _ in range(3):
        assert bed.step(keeper, want=Work.STOP).stage is Stage.STOPPING
        until(lambda: "asked" in bed.log(), 10)
        time.sleep(0.1)
        keeper = bed.keeper()
    assert bed.log().count("asked") == 1


def test_an_engine_that_does_not_end_is_killed_after_its_deadline(bed: Bed) -> None:
    keeper = bed.keeper()
    pid = bed.step(keeper).pid
    until(lambda: "up" in bed.log(), 10)
    bed.step(keeper, want=Work.STOP)
    bed.now += 5.0 + agent_engine.KILL_AFTER_S - 1
    assert bed.step(keeper, want=Work.STOP).stage is Stage.STOPPING
    bed.now += 2
    bed.step(keeper, want=Work.STOP)
    assert processes.identify(pid) is None
    assert bed.step(keeper, want=Work.STOP).stage is Stage.STOPPED
    assert keeper.idle
    assert not bed.folder.records()


def test_another_attempt_or_revision_ends_the_process_first(bed: Bed) -> None:
    bed.code = "import time; print('up', flush=True); time.sleep(60)"
    keeper = bed.keeper()
    first = bed.step(keeper).pid
    assert bed.step(keeper, attempt=2).stage is Stage.STOPPING
    until(lambda: processes.identify(first) is None, 10)
    second = bed.step(keeper, attempt=2)
    assert (second.stage, second.attempt) == (Stage.RUNNING, 2)
    assert second.pid != first


def test_a_specification_that_is_missing_or_another_one_is_refused(bed: Bed) -> None:
    keeper = bed.keeper()
    report = keeper.step(assignment(bed.spec), None, False)
    assert report.stage is Stage.REFUSED
    assert revision_id(bed.spec) in report.why
    assert keeper.step(assignment(bed.spec, template="other"), bed.spec, False).stage is Stage.REFUSED
    assert bed.step(keeper).stage is Stage.RUNNING


def test_two_agents_never_share_a_folder(bed: Bed, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another agent works in it"), AgentFolder(tmp_path / "state"):
        pass


def test_a_broken_record_is_left_out(bed: Bed) -> None:
    bed.step(bed.keeper())
    path = bed.folder.engine("decode-1") / "record.json"
    path.write_bytes(path.read_bytes()[:-5])
    assert bed.folder.records() == {}


def test_places_and_fixed_ports_reach_the_engine(bed: Bed) -> None:
    of = build_spec(
        {
            "group": [
                {"role": "prefill", "count": 2, "nodes": ["n"], "model": "m"},
                {
                    "role": "decode",
                    "count": 2,
                    "nodes": ["n"],
                    "model": "m",
                    "port": 18100,
                    "control_port": 17100,
                    "tidal": {"control": {"lease_s": 4.0}},
                },
            ]
        },
        "test",
    )
    config = msgspec.structs.replace(bed.config, host="10.0.0.7", bind="0.0.0.0")
    found = serve_settings(config, of, assignment(of), agent_engine.wanted_ports(of, assignment(of)))
    assert found["http"] == {"bind": "0.0.0.0:18101", "advertise": "10.0.0.7"}
    assert found["tidal"]["control"] == {"lease_s": 4.0, "bind": "0.0.0.0:17101", "advertise": "10.0.0.7"}
    assert "decode-1" in to_toml(found)


def test_the_example_is_valid_as_it_is_and_with_all_that_it_offers(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "configs/agent.toml"
    assert read_agent_config(example).host == "127.0.0.1"
    everything = tmp_path / "agent.toml"
    everything.write_text(re.sub(r"(?m)^# (\[\w+\]|[\w-]+ = )", r"\1", example.read_text()))
    found = read_agent_config(everything)
    assert (found.node, found.host, found.bind) == ("node-a", "10.0.0.1", "0.0.0.0")


def test_an_agent_of_several_machines_must_say_where_it_is() -> None:
    config = AgentConfig(registry=RegistryConfig(url="etcd://10.0.0.1:2379"))
    with pytest.raises(ConfigError, match="host is missing"):
        check_agent_config(config, "agent")
    with pytest.raises(ConfigError, match='expected "FIRST-LAST"'):
        check_agent_config(msgspec.structs.replace(config, ports="1"), "agent")
