# SPDX-License-Identifier: Apache-2.0
"""Carries a rollout out: reads everything, lets ``steps`` decide, writes the decision as one transaction.

One of the agents conducts: whoever holds ``rollout/conductor``. Nothing that matters is kept here, so another may take
over at any moment; a decision of one that was frozen meanwhile is refused by the store, because each expects the
version of ``rollout/state`` on which it rests. Only two things are in memory: since when an engine is where it is (by
this side's own clock; a new conductor begins to count anew) and how often its probe failed.

A thread of its own, from ``with`` to its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from tidal_connector.cluster.conductor_probe import Verdict, run_probe
from tidal_connector.cluster.conductor_view import announced_elsewhere, limits_of, observe, targets_of
from tidal_connector.cluster.orders import Order, Want, encode_order, order_key
from tidal_connector.cluster.rollout_records import (
    CONDUCTOR,
    ENGINES,
    Assignment,
    Rollout,
    Status,
    View,
    Work,
    assignment_of,
    encode,
    expected,
    state_changes,
    view_of,
)
from tidal_connector.cluster.spec import ClusterSpec, Probe, template_id
from tidal_connector.cluster.steps import next_steps
from tidal_connector.cluster.steps_words import Finish, Forget, Halt, Phase, Start, Step, Stop, Try
from tidal_connector.errors import Conflict, RegistryLost, TidalError
from tidal_connector.log import get_logger
from tidal_connector.registry.base import Delete, Put, Store
from tidal_connector.registry.members import Member

_log = get_logger(__name__)

_TICK_S = 0.5
_STEPS_AT_ONCE = 20
_NOT_ITS_FAULT = 20
"""Failed probes that a new engine survives where its counterpart is to blame: it may just have died."""
_JOIN_S = 10.0
_REASON = 2000

Ask = Callable[[Member, Member, Probe], Verdict]
Change = Put | Delete


class Conductor:
    """Conducts while it holds the cluster's baton, as a context manager.

    Args:
        store: of the cluster; stays open longer than this.
        name: what the baton says, the node's.
        ttl_s: seconds after which another may conduct, where this one has died.
        ask: sends one probe (``conductor_probe.run_probe``).
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        ttl_s: float,
        ask: Ask = run_probe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._name = name
        self._ttl_s = ttl_s
        self._ask = ask
        self._patience = Patience(clock)
        self._failed: dict[tuple[str, str, int], int] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tidal-conductor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        baton = self._store.hold(CONDUCTOR, self._name.encode(), self._ttl_s)
        conducting = False
        try:
            while not self._end.wait(_TICK_S):
                if baton.held != conducting:
                    conducting = not conducting
                    _log.info("%s %s", self._name, "conducts" if conducting else "does not conduct any more")
                    self._patience.forget()
                while conducting and self.tick() and not self._end.is_set():
                    pass  # one decision may make the next one possible at once
        finally:
            baton.release()

    def tick(self) -> bool:
        """Take the next decision, if one is due; return whether one was written."""
        try:
            return self._decide(view_of(self._store.read("")))
        except Conflict:
            return True  # something changed meanwhile: look again
        except RegistryLost as error:
            _log.warning("%s", error)
        except TidalError as error:
            _log.error("%s", error)
        return False

    def _decide(self, view: View) -> bool:
        rollout = view.rollout
        if rollout is None or rollout.status is not Status.RUNNING:
            self._patience.forget()
            return False
        spec = view.specs.get(rollout.revision)
        if spec is None:
            _log.error("rollout %d: its specification %s is missing", rollout.number, rollout.revision)
            return False
        seen = observe(view, self._patience.late(view, spec))
        steps = next_steps(targets_of(spec), limits_of(spec), seen)
        absent = sorted({node for group in spec.group if group.count for node in group.nodes} - set(view.agents))
        if absent:
            # What serves is not given up for what nobody would start.
            ready = {item.engine for item in seen if item.phase is Phase.READY}
            steps = [step for step in steps if not (isinstance(step, Stop) and step.engine in ready)]
        waits = [f"waits for an agent on {', '.join(absent)}"] if absent else []
        waits += [line for item in view.assignments.values() if (line := announced_elsewhere(view, item))]
        reason = "; ".join(waits)[:_REASON]
        if not steps and rollout.reason != reason:
            self._commit(view, msgspec.structs.replace(rollout, reason=reason), [])
            return True
        tries = [step for step in steps if isinstance(step, Try)]
        others = [step for step in steps if not isinstance(step, Try)][:_STEPS_AT_ONCE]
        if others:
            self._write(view, rollout, spec, others)
            return True
        # A probe may take a minute: everything that can be done without it is on its way.
        return bool(tries) and self._try(view, rollout, spec, tries[0])

    def _write(self, view: View, rollout: Rollout, spec: ClusterSpec, steps: Sequence[Step]) -> None:
        entries: dict[str, Change] = {}
        said = []
        after = msgspec.structs.replace(rollout, steps=rollout.steps + 1, reason="")
        for step in steps:
            said.append(_words(step))
            match step:
                case Forget(engine):
                    entries[ENGINES + engine] = Delete(ENGINES + engine)
                    entries[order_key(engine)] = Delete(order_key(engine))
                case Stop(engine):
                    stopped = msgspec.structs.replace(view.assignments[engine], want=Work.STOP)
                    entries[ENGINES + engine] = Put(ENGINES + engine, encode(stopped))
                case Start(engine, group, slot):
                    template = template_id(spec, spec.groups()[group])
                    new = assignment_of(spec, rollout.revision, group, slot, template)
                    entries[ENGINES + engine] = Put(ENGINES + engine, encode(new))
                    entries[order_key(engine)] = Delete(order_key(engine))
                case Halt(reason):
                    after = _ended(after, Status.HALTED, reason)
                case Finish():
                    after = _ended(after, Status.DONE, "")
        self._commit(view, after, list(entries.values()))
        _log.info("rollout %d to %s: %s", rollout.number, rollout.revision, "; ".join(said))

    def _try(self, view: View, rollout: Rollout, spec: ClusterSpec, step: Try) -> bool:
        members = view.members.engines
        prefill, decode = (members.get(name) for name in (step.prefill, step.decode))
        if prefill is None or decode is None:
            return False
        verdict = self._ask(prefill, decode, spec.cluster.probe)
        admitted = [view.assignments[name] for name in step.admit]
        if verdict.good:
            changes: list[Change] = []
            for item in admitted:
                let_in = msgspec.structs.replace(item, admitted=True)
                order = Order(Want.SERVE, revision=item.revision, by=f"rollout {rollout.number}")
                changes.append(Put(ENGINES + item.engine, encode(let_in)))
                changes.append(Put(order_key(item.engine), encode_order(order)))
            self._commit(view, msgspec.structs.replace(rollout, steps=rollout.steps + 1, reason=""), changes)
            _log.info("rollout %d: %s", rollout.number, _words(step))
            return True
        return self._failed_probe(view, rollout, spec, verdict, admitted)

    def _failed_probe(
        self, view: View, rollout: Rollout, spec: ClusterSpec, verdict: Verdict, new: Sequence[Assignment]
    ) -> bool:
        """Count a failed probe; halt the rollout where a new engine has had its chances."""
        _log.warning("rollout %d: %s", rollout.number, verdict.why)
        blamed = not verdict.engine or any(item.engine == verdict.engine for item in new)
        bound = spec.cluster.probe.tries + (0 if blamed else _NOT_ITS_FAULT)
        used_up = False
        for item in new:
            key = (item.engine, item.revision, item.attempt)
            self._failed[key] = self._failed.get(key, 0) + 1
            used_up = used_up or self._failed[key] >= bound
        if not used_up:
            return False  # again at the next tick, by then the other engine's end may have become known
        marked = [Put(ENGINES + i.engine, encode(msgspec.structs.replace(i, why=verdict.why[:1000]))) for i in new]
        self._commit(view, _ended(rollout, Status.HALTED, verdict.why[:_REASON]), marked)
        return True

    def _commit(self, view: View, after: Rollout, changes: Sequence[Change]) -> None:
        self._store.write([*state_changes(after), *changes], expected(view, changes))


class Patience:
    """Since when each engine is where it is, by a clock that nobody sets; counts only while its agent is there."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, tuple[object, float]] = {}

    def forget(self) -> None:
        """Begin to count anew."""
        self._since.clear()

    def late(self, view: View, spec: ClusterSpec) -> frozenset[str]:
        """Return the engines that have been on their way for longer than they may."""
        now, table = self._clock(), spec.cluster
        self._since = {name: item for name, item in self._since.items() if name in view.assignments}
        found = set()
        phases = {item.engine: item.phase for item in observe(view, frozenset())}
        for name, item in view.assignments.items():
            alive = item.node in view.agents
            stopping = item.want is Work.STOP
            key = (item.template, item.attempt, item.want, item.admitted, alive)
            runs = alive != stopping and phases[name] not in (Phase.READY, Phase.HEALTHY)
            known = self._since.get(name)
            if not runs or known is None or known[0] != key:
                self._since[name] = (key, now)
                continue
            bound = table.drain_deadline_s if stopping else table.ready_deadline_s
            if now - known[1] > bound:
                found.add(name)
        return frozenset(found)


def _ended(rollout: Rollout, status: Status, reason: str) -> Rollout:
    return msgspec.structs.replace(rollout, status=status, reason=reason, ended_at=time.time())


def _words(step: Step) -> str:
    match step:
        case Start(engine):
            return f"start {engine}"
        case Stop(engine):
            return f"drain {engine}"
        case Forget(engine):
            return f"{engine} has ended"
        case Try(_, _, admit):
            return f"let in {', '.join(admit)}"
        case Halt(reason):
            return f"halted: {reason}"
    return "done"
