# SPDX-License-Identifier: Apache-2.0
"""A rollout for people and scripts: how far it is, and what each engine does. Pure."""

from __future__ import annotations

import msgspec

from tidal_connector.cluster.conductor_view import observe, targets_of, waiting_for
from tidal_connector.cluster.rollout_records import Rollout, Status, View
from tidal_connector.cluster.steps_words import Phase
from tidal_connector.errors import ConfigError


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    Attributes:
        engine, role, node: which, what and where.
        agent: whether its node has an agent.
        revision: of the rollout that started it.
        new: whether it is what the rollout wants.
        phase: where it is in the rollout.
        state: what it announces; empty where it announces nothing.
        layout: fingerprint of its KV.
        restarts: how often it has ended by itself.
        note: what it waits for, or what is wrong.
    """

    engine: str
    role: str
    node: str
    agent: bool
    revision: str
    new: bool
    phase: str
    state: str
    layout: str
    restarts: int
    note: str


class RolloutStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a rollout.

    Attributes:
        rollout: its record.
        summary: one line.
        replaced, wanted: engines that are new and ready, and how many there shall be.
        conductor: which agent conducts it; empty where none does.
        engines: by name.
        odd: entries of the registry that could not be read.
    """

    rollout: Rollout
    summary: str
    replaced: int
    wanted: int
    conductor: str
    engines: tuple[EngineStatus, ...]
    odd: dict[str, str] = {}


def rollout_status(view: View) -> RolloutStatus:
    """Return the state of the present rollout.

    Raises:
        ConfigError: there never was one.
    """
    now = view.rollout
    if now is None:
        raise ConfigError("nothing was ever rolled out in this cluster; begin with: tidal rollout apply cluster.toml")
    spec = view.specs.get(now.revision)
    targets = {item.group: item for item in targets_of(spec)} if spec is not None else {}
    engines = []
    for seen in sorted(observe(view, frozenset()), key=lambda item: (item.group, item.slot)):
        assignment = view.assignments[seen.engine]
        member, report = view.members.engines.get(seen.engine), view.report(assignment)
        target = targets.get(seen.group)
        engines.append(
            EngineStatus(
                engine=seen.engine,
                role=str(seen.role),
                node=seen.node,
                agent=seen.node in view.agents,
                revision=assignment.revision,
                new=target is not None and target.template == seen.template,
                phase=str(seen.phase),
                state=str(member.state) if member is not None else "",
                layout=member.layout if member is not None else "",
                restarts=report.restarts if report is not None else 0,
                note=seen.why or ("" if seen.phase is Phase.READY else waiting_for(view, assignment)),
            )
        )
    replaced = sum(item.new and item.phase == Phase.READY for item in engines)
    wanted = sum(item.count for item in targets.values())
    return RolloutStatus(
        rollout=now,
        summary=_summary(now, replaced, wanted),
        replaced=replaced,
        wanted=wanted,
        conductor=view.conductor,
        engines=tuple(engines),
        odd=dict(view.odd),
    )


def _summary(now: Rollout, replaced: int, wanted: int) -> str:
    progress = f"{replaced} of {wanted} engines are ready at it"
    return f"{now.status}, {progress}" if now.status is not Status.DONE else f"done, {progress}"
