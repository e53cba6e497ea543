# SPDX-License-Identifier: Apache-2.0
"""A whole cluster at one moment, for people and scripts: what the registry says, and what each engine's metrics say.

One read of the registry, then all engines at once, each with a deadline: a silent engine costs no more than that, and
is a line of the result, not an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import httpx
import msgspec

from tidal_connector.cluster.orders import Want, kept_down
from tidal_connector.cluster.rollout_records import Assignment, Status, View, view_of
from tidal_connector.cluster.rollout_status import rollout_status
from tidal_connector.cluster.series import IN_FLIGHT, RUNNING, WAITING, Series, parse_series
from tidal_connector.errors import TidalError
from tidal_connector.ids import Role
from tidal_connector.registry.base import Store
from tidal_connector.registry.members import MEMBERS, Member, Members, State, members_of

METRICS_S = 3.0
ABSENT = "absent"
"""State of an engine that a rollout has assigned to a node, and that announces nothing."""

_TOLD = {Status.RUNNING: "waits", Status.HALTED: "is halted"}  # states of a rollout whose reason somebody should read

_HITS, _MISSES = "tidal:selection_hits_total", "tidal:selection_misses_total"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says under ``/metrics``.

    Attributes:
        running, waiting: requests.
        transfers: hand-overs in flight on its side.
        pool_used, pool_pages: pages of its host pool; 0 pages: it has none.
        slots_used, slots: rows of its selection cache in each layer; 0 slots: it has none.
        hits, misses: selected rows that were, and were not, in the selection cache, since its start.
    """

    running: int = 0
    waiting: int = 0
    transfers: int = 0
    pool_used: int = 0
    pool_pages: int = 0
    slots_used: int = 0
    slots: int = 0
    hits: float = 0.0
    misses: float = 0.0

    def hit_rate(self, since: Load | None = None) -> float | None:
        """Return the share of hits since an earlier look, or since its start; None where nothing was selected."""
        hits, misses = self.hits, self.misses
        if since is not None and since.hits <= hits and since.misses <= misses:
            hits, misses = hits - since.hits, misses - since.misses
        return hits / (hits + misses) if hits + misses > 0 else None


class EngineLine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    Attributes:
        engine, role, state, node, revision, model, http, control, incarnation, layout: as announced; the state is
            ``absent`` for one that only a rollout knows.
        load: its metrics; None where it did not answer.
        note: what it says of itself, or why its metrics are missing.
    """

    engine: str
    role: str
    state: str
    node: str = ""
    revision: str = ""
    model: str = ""
    http: str = ""
    control: str = ""
    incarnation: str = ""
    layout: str = ""
    load: Load | None = None
    note: str = ""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster.

    Attributes:
        engines: by role and name.
        agents: nodes that have one.
        rollout: one line; empty where nothing was ever rolled out.
        problems: what a person should look at, one line each; empty where all is well.
    """

    engines: tuple[EngineLine, ...]
    agents: tuple[str, ...] = ()
    rollout: str = ""
    problems: tuple[str, ...] = ()


def overview(store: Store, metrics_s: float = METRICS_S) -> Overview:
    """Look at the whole cluster.

    Args:
        store: the registry.
        metrics_s: how long an engine has to answer.

    Raises:
        RegistryLost: the registry does not answer.
    """
    snapshot = store.read("")
    try:
        view, problem = view_of(snapshot), ""
        members = view.members
    except TidalError as error:  # the rollout's state is unreadable; the engines are not
        view, problem, members = None, str(error), members_of(snapshot)
    loads = asyncio.run(read_loads(list(members.engines.values()), metrics_s))
    return compose(members, loads, view, problem)


async def read_loads(members: Sequence[Member], metrics_s: float) -> dict[str, Load | str]:
    """Ask all engines at once; return each one's load, or why there is none."""
    # A certificate names what proxies connect to; nothing secret is sent or taken on trust here.
    async with httpx.AsyncClient(verify=False, trust_env=False, timeout=metrics_s) as client:
        found = await asyncio.gather(*(_load(client, member.http, metrics_s) for member in members))
    return {member.engine: load for member, load in zip(members, found, strict=True)}


async def _load(client: httpx.AsyncClient, url: str, metrics_s: float) -> Load | str:
    try:
        async with asyncio.timeout(metrics_s):
            answer = await client.get(f"{url}/metrics")
    except TimeoutError:
        return f"/metrics did not answer within {metrics_s:g} s"
    except (httpx.TransportError, httpx.InvalidURL) as error:
        return f"/metrics cannot be read: {str(error) or type(error).__name__}"
    if answer.status_code != httpx.codes.OK:
        return f"/metrics answered {answer.status_code}"
    return load_of(parse_series(answer.text))


def load_of(series: Series) -> Load:
    """Pick what people look at out of an engine's series. Pure."""

    def whole(name: str) -> int:
        return int(series.get(name, 0.0))

    return Load(
        running=whole(RUNNING),
        waiting=whole(WAITING),
        transfers=whole(IN_FLIGHT),
        pool_used=whole("tidal:pool_pages_used"),
        pool_pages=whole("tidal:pool_pages"),
        slots_used=whole("tidal:selection_slots_used"),
        slots=whole("tidal:selection_slots"),
        hits=series.get(_HITS, 0.0),
        misses=series.get(_MISSES, 0.0),
    )


def compose(members: Members, loads: Mapping[str, Load | str], view: View | None, problem: str = "") -> Overview:
    """Put together what was read. Pure.

    Args:
        members: the engines as they announce themselves.
        loads: of each, or why there is none.
        view: what concerns rollouts; None where it cannot be read.
        problem: why that is so.
    """
    lines = [_line(member, loads.get(member.engine, "")) for member in members.engines.values()]
    problems = [problem] if problem else []
    agents: tuple[str, ...] = ()
    rollout = ""
    if view is not None:
        agents = tuple(sorted(view.agents))
        lines += [_absent(view, item) for item in view.assignments.values() if item.engine not in members.engines]
        if view.rollout is not None:
            rollout = f"{view.rollout.revision}: {rollout_status(view).summary}"
            if view.rollout.reason:
                rollout += f" ({view.rollout.reason})"
                if view.rollout.status in _TOLD:
                    problems.append(f"the rollout {_TOLD[view.rollout.status]}: {view.rollout.reason}")
        problems += [
            f"node {node} has no agent, and engines that it shall keep"
            for node in sorted({item.node for item in view.assignments.values()} - set(agents))
        ]
        problems += [
            f"an order to drain {engine} stands, which is not there; to withdraw it: tidal drain {engine} --cancel"
            for engine, order in sorted(view.orders.items())
            if order.want is Want.DRAIN and engine not in members.engines and engine not in view.assignments
        ]
    odd = {**(view.odd if view is not None else {}), **members.odd}
    problems += [f"{key if key.startswith(MEMBERS) else f'entry {key}'}: {why}" for key, why in sorted(odd.items())]
    if not lines:
        problems.append("no engine is announced")
    else:
        problems += [
            f"no {side} engine is ready"
            for side in (Role.PREFILL, Role.DECODE)
            if not any(line.state == State.READY and line.role in (side, Role.BOTH) for line in lines)
        ]
    lines.sort(key=lambda line: (line.role != "prefill", line.role, line.engine))
    problems += [
        f"{line.engine} is {line.state}{line.note and f': {line.note}'}"
        for line in lines
        if line.state != State.READY or line.load is None
    ]
    return Overview(engines=tuple(lines), agents=agents, rollout=rollout, problems=tuple(problems))


def _absent(view: View, item: Assignment) -> EngineLine:
    """Return an engine that a rollout wants and nobody announces, with what is known of the reason."""
    order, report = view.orders.get(item.engine), view.report(item)
    note = item.why or (report.why if report is not None else "")
    if order is not None and order.want is Want.DRAIN:
        note = kept_down(item.engine, order)
    return EngineLine(
        engine=item.engine, role=item.role, state=ABSENT, node=item.node, revision=item.revision, note=note
    )


def _line(member: Member, load: Load | str) -> EngineLine:
    return EngineLine(
        engine=member.engine,
        role=member.role,
        state=member.state,
        node=member.node,
        revision=member.revision,
        model=member.model,
        http=member.http,
        control=member.control,
        incarnation=member.incarnation,
        layout=member.layout,
        load=load if isinstance(load, Load) else None,
        note=member.note or (load if isinstance(load, str) and member.state is State.READY else ""),
    )
