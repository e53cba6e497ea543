# SPDX-License-Identifier: Apache-2.0
"""What a rollout keeps in the registry, and how it is read back.

::

    rollout/state             Rollout: the one that goes on, or the last; every decision and every operator's word is a
                              transaction that expects its version, so two of them never both hold
    rollout/history/NUMBER    Rollout: each of the last 50, rewritten together with the state
    rollout/specs/REVISION    what a revision consists of
    rollout/engines/ENGINE    Assignment: written by the conductor, read by the agent of its node
    rollout/reports/NODE      what a node's agent says about its engines
    rollout/conductor         leased: which agent conducts
    agents/NODE               leased: which agents there are

Whatever is read was written by somebody else: an entry that cannot be read is named and left out.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Annotated, TypeVar

import msgspec

from tidal_connector.cluster.orders import ORDERS, Order, order_of
from tidal_connector.cluster.spec import ClusterSpec, slot_of
from tidal_connector.errors import TidalError
from tidal_connector.ids import Role
from tidal_connector.registry.base import ABSENT, Delete, Put, Snapshot
from tidal_connector.registry.members import Members, members_of

ROLLOUT = "rollout/"
STATE = "rollout/state"
HISTORY = "rollout/history/"
SPECS = "rollout/specs/"
ENGINES = "rollout/engines/"
REPORTS = "rollout/reports/"
CONDUCTOR = "rollout/conductor"
AGENTS = "agents/"

HISTORY_LENGTH = 50

Text = Annotated[str, msgspec.Meta(max_length=4096)]


class Status(enum.StrEnum):
    """How far a rollout is."""

    RUNNING = "running"
    PAUSED = "paused"
    HALTED = "halted"
    DONE = "done"
    REPLACED = "replaced"
    """Another one was begun before it was done; only in the history."""


class Kind(enum.StrEnum):
    """What began a rollout."""

    APPLY = "apply"
    UNDO = "undo"


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout.

    Attributes:
        number: counts the cluster's rollouts, from 1 on.
        token: random; lets whoever began it recognise it after a lost answer.
        kind: what began it.
        revision: where it goes.
        before: the revision that it replaces; empty for the first.
        by: who began it, as user@host.
        at: when, in Unix seconds of that host.
        status: how far it is.
        reason: why it is halted, or what it waits for.
        changed_by: who paused, resumed or replaced it.
        ended_at: when it was done, halted or replaced.
        steps: decisions so far.
    """

    number: int
    token: str
    kind: Kind
    revision: str
    before: str = ""
    by: Text = ""
    at: float = 0.0
    status: Status = Status.RUNNING
    reason: Text = ""
    changed_by: Text = ""
    ended_at: float | None = None
    steps: int = 0


class Work(enum.StrEnum):
    """What an agent shall do with an engine."""

    RUN = "run"
    STOP = "stop"


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that an agent runs.

    Attributes:
        engine, group, slot, node, role: which, and where.
        template: what it is made of.
        revision: whose specification it is made from, ``rollout/specs/REVISION``.
        want: what its agent shall do.
        attempt: rises when the same engine is to be started anew.
        admitted: it has answered its probe, and serves clients.
        why: what was wrong with it, for a new one that failed.
    """

    engine: str
    group: str
    slot: int
    node: str
    role: Role
    template: str
    revision: str
    want: Work = Work.RUN
    attempt: int = 1
    admitted: bool = False
    why: Text = ""


class Stage(enum.StrEnum):
    """Where an agent is with an engine."""

    RUNNING = "running"
    BACKOFF = "backoff"
    """Ended by itself; is started again in a moment."""
    DRAINED = "drained"
    """Ended at an operator's order, and stays down until that is withdrawn."""
    REFUSED = "refused"
    """Cannot be started."""
    STOPPING = "stopping"
    STOPPED = "stopped"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent says about an engine.

    Attributes:
        revision, attempt: of the assignment that it speaks of.
        stage: where it is.
        restarts: how often it has ended by itself.
        why: what was last wrong.
        pid: its supervisor's process; 0 where there is none.
        http: ``host:port`` at which it will announce its HTTP server; empty where it is not started.
        log: file that holds its output, on its node.
    """

    revision: str
    attempt: int
    stage: Stage
    restarts: int = 0
    why: Text = ""
    pid: int = 0
    http: Text = ""
    log: Text = ""


class AgentEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One agent.

    Attributes:
        host: address that peers use for its engines.
        pid: its process.
        version: of this package.
        machine: host name of its machine.
        life: random; another one after every start.
        ttl_s: seconds for which its entry outlives it.
    """

    host: str = ""
    pid: int = 0
    version: str = ""
    machine: str = ""
    life: str = ""
    ttl_s: float = 0.0


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a decision rests on, from one read.

    Attributes:
        rollout, version: the state and its version; None and ``ABSENT`` where nothing was ever applied.
        specs: by revision.
        assignments, versions: by engine.
        reports: by engine, from its node's agent.
        agents: by node.
        members: the engines as they announce themselves.
        orders: by engine.
        history: oldest first.
        conductor: which agent conducts; empty where none does.
        odd: why an entry was left out, by its key.
    """

    rollout: Rollout | None
    version: int
    specs: Mapping[str, ClusterSpec]
    assignments: Mapping[str, Assignment]
    versions: Mapping[str, int]
    reports: Mapping[str, Report]
    agents: Mapping[str, AgentEntry]
    members: Members
    orders: Mapping[str, Order]
    history: tuple[Rollout, ...]
    conductor: str
    odd: Mapping[str, str]

    def report(self, assignment: Assignment) -> Report | None:
        """Return what the agent says about an engine's present assignment; None where it has not said anything."""
        found = self.reports.get(assignment.engine)
        matches = found is not None and (found.revision, found.attempt) == (assignment.revision, assignment.attempt)
        return found if matches else None


Kept = TypeVar("Kept")


def encode(value: msgspec.Struct) -> bytes:
    """Return a record as it is stored."""
    return msgspec.json.encode(value)


def view_of(snapshot: Snapshot) -> View:
    """Read everything that concerns rollouts from a snapshot of the whole cluster (prefix ``""``).

    Raises:
        TidalError: the state itself cannot be read, so nothing may be decided.
    """
    odd: dict[str, str] = {}

    def under(prefix: str, kind: type[Kept]) -> dict[str, Kept]:
        found = {}
        for key, entry in snapshot.entries.items():
            if key.startswith(prefix):
                try:
                    found[key.removeprefix(prefix)] = msgspec.json.decode(entry.value, type=kind)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    odd[key] = f"unreadable: {str(error)[:300]}"
        return found

    state = under(STATE, Rollout).get("")
    if state is None and STATE in snapshot.entries:
        raise TidalError(f"{STATE} in the registry: {odd[STATE]}; it was written by another version, or by hand")
    assignments = {name: item for name, item in under(ENGINES, Assignment).items() if item.engine == name}
    conductor = snapshot.entries.get(CONDUCTOR)
    orders = (key.removeprefix(ORDERS) for key in snapshot.entries if key.startswith(ORDERS))
    reports = under(REPORTS, dict[str, Report])
    members = members_of(snapshot)
    return View(
        rollout=state,
        version=snapshot.entries[STATE].version if state else ABSENT,
        specs=under(SPECS, ClusterSpec),
        assignments=assignments,
        versions={name: snapshot.entries[ENGINES + name].version for name in assignments},
        reports={
            name: reports[item.node][name] for name, item in assignments.items() if name in reports.get(item.node, {})
        },
        agents=under(AGENTS, AgentEntry),
        members=members,
        orders={name: order for name in orders if (order := order_of(snapshot.entries, name)) is not None},
        history=tuple(sorted(under(HISTORY, Rollout).values(), key=lambda item: item.number)),
        conductor=conductor.value.decode(errors="replace") if conductor else "",
        odd={**odd, **members.odd},
    )


def history_key(number: int) -> str:
    """Return where a rollout's record lies."""
    return f"{HISTORY}{number:06}"


def state_changes(rollout: Rollout) -> list[Put]:
    """Return the writes of a rollout's new state: the state, and its record in the history."""
    return [Put(STATE, encode(rollout)), Put(history_key(rollout.number), encode(rollout))]


def expected(view: View, changes: Iterable[Put | Delete]) -> dict[str, int]:
    """Return the versions that a decision rests on: that of the state, and those of the assignments that it changes."""
    keys = {change.key for change in changes}
    touched = {ENGINES + name: version for name, version in view.versions.items() if ENGINES + name in keys}
    return {STATE: view.version, **touched}


def assignment_of(spec: ClusterSpec, revision: str, group: str, slot: int, template: str) -> Assignment:
    """Return the assignment of a new engine."""
    found = spec.groups()[group]
    place = slot_of(found, slot)
    return Assignment(
        engine=place.engine,
        group=group,
        slot=slot,
        node=place.node,
        role=found.role,
        template=template,
        revision=revision,
    )
