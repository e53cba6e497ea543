# SPDX-License-Identifier: Apache-2.0
"""One engine's life on a node: started, adopted, restarted after a crash with growing pauses, drained, ended.

Called again and again by the agent's thread; never blocks for longer than it takes to start or kill a process.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import msgspec

from tidal_connector.address import join_address
from tidal_connector.cluster import processes
from tidal_connector.cluster.agent_folder import AgentFolder, Record, last_line, turn_over
from tidal_connector.cluster.agent_ports import Ports
from tidal_connector.cluster.agent_settings import (
    AgentConfig,
    serve_command,
    serve_environment,
    serve_settings,
    to_toml,
    wanted_ports,
)
from tidal_connector.cluster.rollout_records import Assignment, Report, Stage, Work
from tidal_connector.cluster.spec import ClusterSpec, template_id
from tidal_connector.config import child_environment
from tidal_connector.errors import ConfigError
from tidal_connector.log import get_logger

_log = get_logger(__name__)

BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
STABLE_S = 300.0
"""An engine that has run for so long begins to count its restarts anew."""
LEFT_BEHIND_S = 15.0
"""Seconds that an engine has to end by itself when its supervisor has died; it notices that."""
MARK = "TIDAL_LAUNCH"
"""Variable by which everything that belongs to one start of an engine is found."""
KILL_AFTER_S = 30.0
"""Seconds beyond its drain deadline that an engine has to end."""


class EngineKeeper:
    """Keeps one engine as its assignment wants it.

    Args:
        agent: this node's settings.
        folder: where records are.
        ports: where free ports come from.
        name: the engine's id.
        record: what is known of it from an earlier life of the agent.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        agent: AgentConfig,
        folder: AgentFolder,
        ports: Ports,
        name: str,
        record: Record | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agent = agent
        self._folder = folder
        self._ports = ports
        self._name = name
        self._record = record
        self._clock = clock
        self._child: subprocess.Popen[bytes] | None = None
        self._began = clock()
        self._start_at: float | None = None
        self._kill_at: float | None = None
        self._adopt()

    @property
    def idle(self) -> bool:
        """Whether there is neither a process nor a record of one."""
        return self._record is None

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self._alive()

    def step(self, assignment: Assignment, spec: ClusterSpec | None, drained: bool) -> Report:
        """Do what is due, and say where the engine is.

        Args:
            assignment: what is wanted.
            spec: of its revision; None where the registry lacks it.
            drained: whether an operator wants the engine down for now.
        """
        alive = self._alive()
        if assignment.want is Work.STOP:
            if alive:
                return self._report(assignment, self._stop())
            self._drop()
            return self._report(assignment, Stage.STOPPED)
        record = self._record
        if record is not None and (record.revision, record.attempt) != (assignment.revision, assignment.attempt):
            if alive:
                self._stop()
                return self._report(assignment, Stage.STOPPING, "its last process still drains")
            self._drop()
        elif record is not None and alive:
            if record.stopping:  # its stop was withdrawn, but what is drained cannot be called back
                self._stop()
                return self._report(assignment, Stage.STOPPING, "its last process still drains")
            if record.restarts and self._clock() - self._began > STABLE_S:
                self._keep(msgspec.structs.replace(record, restarts=0, why=""))
            return self._report(assignment, Stage.RUNNING)
        elif record is not None:
            if drained:
                return self._report(assignment, Stage.DRAINED, "drained by an operator's order, which still stands")
            return self._after_end(assignment, spec, record)
        return self._start(assignment, spec, restarts=0)

    def abandon(self) -> None:
        """Drain and end an engine that has no assignment any more."""
        if self._alive():
            self._stop()
        else:
            self._drop()

    # --- inside ---

    def _adopt(self) -> None:
        """Find the process of a record that was written just before its start."""
        record = self._record
        if record is not None and record.process is None:
            self._keep(msgspec.structs.replace(record, process=processes.find(record.file)))
        if self._alive():
            _log.info("%s: adopted, process %d", self._name, self._pid())

    def _alive(self) -> bool:
        if self._child is not None and self._child.poll() is not None:
            self._child = None if self._record is None else self._child
        record = self._record
        return record is not None and record.process is not None and processes.alive(record.process)

    def _pid(self) -> int:
        record = self._record
        return record.process.pid if record is not None and record.process is not None else 0

    def _stop(self) -> Stage:
        record = self._record
        assert record is not None
        assert record.process is not None
        if self._kill_at is None:
            self._kill_at = self._clock() + record.drain_s + KILL_AFTER_S
        if not record.stopping:
            self._keep(msgspec.structs.replace(record, stopping=True))
            processes.terminate(record.process)
            _log.info("%s: drains", self._name)
        elif self._clock() > self._kill_at:
            _log.error("%s: has not ended %g s after its drain deadline; it is killed", self._name, KILL_AFTER_S)
            processes.kill_tree(record.process)
        return Stage.STOPPING

    def _after_end(self, assignment: Assignment, spec: ClusterSpec | None, record: Record) -> Report:
        """Wait for the end of the pause after a crash, then start again."""
        if self._start_at is None and self._child is not None and self._child.poll() == 0:
            _log.info("%s: ended as it was told to, and is started again", self._name)
            return self._start(assignment, spec, record.restarts, record.why)
        if self._start_at is None:
            if record.process is not None:
                processes.kill_tree(record.process)  # whatever its supervisor has left behind
            why = f"{self._how_it_ended()}; the end of its log: {self._last_words()}"
            ended = msgspec.structs.replace(record, restarts=record.restarts + 1, why=why, process=None, stopping=False)
            self._keep(ended)
            pause = BACKOFF_S[min(ended.restarts, len(BACKOFF_S)) - 1]
            self._start_at = self._clock() + pause
            _log.warning("%s: %s; it is started again in %g s", self._name, why, pause)
            return self._report(assignment, Stage.BACKOFF)
        if self._clock() < self._start_at:
            return self._report(assignment, Stage.BACKOFF)
        left = processes.marked(MARK, record.file)
        if left and self._clock() < self._start_at + LEFT_BEHIND_S:
            return self._report(assignment, Stage.BACKOFF)  # it still has the device's memory
        for process in left:
            processes.kill_tree(process)
        return self._start(assignment, spec, record.restarts, record.why)

    def _how_it_ended(self) -> str:
        status = self._child.poll() if self._child is not None else None
        if status is None:
            return "it ended"
        return f"it ended with status {status}" if status >= 0 else f"it was ended by signal {-status}"

    def _last_words(self) -> str:
        return last_line(self._folder.log(self._name)) or "it is empty"

    def _start(self, assignment: Assignment, spec: ClusterSpec | None, restarts: int, why: str = "") -> Report:
        self._start_at = self._kill_at = None
        try:
            self._launch(assignment, spec, restarts, why)
        except (ConfigError, OSError) as error:
            return self._report(assignment, Stage.REFUSED, str(error))
        return self._report(assignment, Stage.RUNNING)

    def _launch(self, assignment: Assignment, spec: ClusterSpec | None, restarts: int, why: str) -> None:
        group = spec.groups().get(assignment.group) if spec is not None else None
        if spec is None or group is None or template_id(spec, group) != assignment.template:
            raise ConfigError(f"the registry's specification {assignment.revision} is missing, or is another one")
        folder = self._folder.engine(self._name)
        file = folder / f"serve-{assignment.revision}-{assignment.attempt}-{restarts}.toml"
        fixed = wanted_ports(spec, assignment)
        ports = (fixed[0] or self._ports.take(self._name), fixed[1] or self._ports.take(self._name))
        file.write_text(to_toml(serve_settings(self._agent, spec, assignment, ports)), encoding="utf-8")
        log = self._folder.log(self._name)
        turn_over(log)
        record = Record(
            engine=self._name,
            revision=assignment.revision,
            attempt=assignment.attempt,
            file=str(file),
            ports=ports,
            restarts=restarts,
            drain_s=spec.cluster.drain_deadline_s,
            why=why,
        )
        self._keep(record)  # before the process is there, so that it is found even if this agent ends right now
        environment = child_environment({**serve_environment(self._agent, spec, assignment), MARK: record.file})
        self._child = processes.spawn(serve_command(spec, assignment, file), environment, log)
        self._began = self._clock()
        self._keep(msgspec.structs.replace(record, process=processes.identify(self._child.pid)))
        _log.info("%s: started at revision %s, process %d", self._name, assignment.revision, self._child.pid)

    def _keep(self, record: Record) -> None:
        self._record = record
        self._folder.keep(record)

    def _drop(self) -> None:
        self._start_at = self._kill_at = None
        if self._record is not None:
            self._folder.drop(self._name)
            self._record = None
        self._ports.free(self._name)

    def _report(self, assignment: Assignment, stage: Stage, why: str = "") -> Report:
        record = self._record
        return Report(
            revision=assignment.revision,
            attempt=assignment.attempt,
            stage=stage,
            restarts=record.restarts if record is not None else 0,
            why=(why or (record.why if record is not None else ""))[:2000],
            pid=self._pid(),
            http=join_address(self._agent.host, record.ports[0]) if record is not None else "",
            log=str(self._folder.log(self._name)),
        )
