# SPDX-License-Identifier: Apache-2.0
"""What the planner of rollouts sees: assignments, agents' reports and engines' announcements, put together. Pure."""

from __future__ import annotations

from collections.abc import Collection

from tidal_connector.cluster.orders import AWAITS_ADMISSION
from tidal_connector.cluster.rollout_records import Assignment, Report, Stage, View, Work
from tidal_connector.cluster.spec import ClusterSpec, template_id
from tidal_connector.cluster.steps_words import Limits, Phase, Seen, Target
from tidal_connector.registry.members import Member, State

_NO_RESTARTS = 2


def targets_of(spec: ClusterSpec) -> list[Target]:
    """Return what each group of a specification shall be."""
    return [
        Target(
            group.name,
            group.role,
            group.count,
            spec.cluster.max_surge if group.count else 0,
            template_id(spec, group),
            group.nodes,
        )
        for group in spec.group
    ]


def limits_of(spec: ClusterSpec) -> Limits:
    """Return how careful a specification wants its rollout to be."""
    table = spec.cluster
    return Limits(table.max_unavailable, table.max_surge, table.allow_outage)


def observe(view: View, late: Collection[str]) -> list[Seen]:
    """Return every engine that has an assignment, as it is.

    Args:
        view: one read of the registry.
        late: engines that have been where they are for longer than they may.
    """
    return [_seen(view, item, item.engine in late) for item in view.assignments.values()]


def waiting_for(view: View, assignment: Assignment) -> str:
    """Return one line that says what an engine waits for, for people."""
    report, member = view.report(assignment), view.members.engines.get(assignment.engine)
    if assignment.node not in view.agents:
        return f"node {assignment.node} has no agent"
    other = announced_elsewhere(view, assignment)
    if other:
        return other
    if report is not None and report.why:
        return report.why
    return member.note if member is not None else ""


def announced_elsewhere(view: View, item: Assignment) -> str:
    """Return one line where an engine's name is announced by a process that its agent does not run; else nothing."""
    report, member = view.report(item), view.members.engines.get(item.engine)
    if report is None or member is None or item.node not in view.agents:
        return ""
    where = f"{item.engine}, at {member.http}"
    if report.stage is Stage.STOPPED:
        return f"another process announces {where}: the one that {item.node}'s agent ran has ended; end the other one"
    there = member.http.partition("://")[2]
    if report.stage is not Stage.RUNNING or not report.http or there == report.http:
        return ""
    return f"another process announces {where}: {item.node}'s agent runs one at {report.http}; end the other one"


def _seen(view: View, item: Assignment, late: bool) -> Seen:
    member = view.members.engines.get(item.engine)
    phase, why = _phase(view, item, member, late)
    layout = member.layout if member is not None and _same_life(member, item) else ""
    return Seen(item.engine, item.group, item.slot, item.role, item.node, item.template, phase, layout, why)


def _same_life(member: Member, item: Assignment) -> bool:
    return member.revision == item.revision


def _phase(view: View, item: Assignment, member: Member | None, late: bool) -> tuple[Phase, str]:
    report = view.report(item)
    if item.want is Work.STOP:
        ended = report is not None and report.stage is Stage.STOPPED
        lost = late and item.node not in view.agents  # its machine is gone; should it come back, its agent ends it
        return (Phase.GONE if member is None and (ended or lost) else Phase.STOPPING), ""
    failure = item.why or _failure(view, report)
    if failure:
        return Phase.FAILED, failure
    # A dead agent's report is old, but its engines live on and speak for themselves.
    running = (report is not None and report.stage is Stage.RUNNING) or item.node not in view.agents
    up = running and member is not None and _same_life(member, item) and not announced_elsewhere(view, item)
    if item.admitted:
        if up and member is not None and member.state is State.READY:
            return Phase.READY, ""
        return (
            (Phase.FAILED, f"not ready again in time: {waiting_for(view, item) or 'it says nothing'}")
            if late
            else (
                Phase.LOST,
                "",
            )
        )
    if up and member is not None and member.layout and _healthy(member):
        return Phase.HEALTHY, ""
    if late:
        return Phase.FAILED, _lateness("did not become healthy", view, item)
    return Phase.STARTING, ""


def _lateness(what: str, view: View, item: Assignment) -> str:
    rollout = view.rollout
    spec = view.specs.get(rollout.revision) if rollout is not None else None
    bound = f" within {spec.cluster.ready_deadline_s:g} s" if spec is not None else " in time"
    said, report = waiting_for(view, item), view.report(item)
    log = f"; its log is {report.log} on node {item.node}" if report is not None and report.log else ""
    return f"{what}{bound}{f' ({said})' if said else ''}{log}"


def _healthy(member: Member) -> bool:
    return member.state is State.READY or (member.state is State.STARTING and member.note == AWAITS_ADMISSION)


def _failure(view: View, report: Report | None) -> str:
    if report is None:
        return ""
    if report.stage is Stage.REFUSED:
        return f"cannot be started: {report.why}"
    rollout = view.rollout
    spec = view.specs.get(rollout.revision) if rollout is not None else None
    allowed = spec.cluster.max_restarts if spec is not None else _NO_RESTARTS
    if report.restarts > allowed and report.stage is Stage.BACKOFF:
        return f"ended {report.restarts} times by itself: {report.why}"
    return ""
