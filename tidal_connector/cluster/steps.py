# SPDX-License-Identifier: Apache-2.0
"""From what shall be and what is: the next steps of a rollout. Pure; no clock, no registry.

``next_steps`` is called again after every change, with what is seen then; it keeps nothing. What it promises, as long
as engines do not fail by themselves:

* a role never has fewer ready engines than its count less ``max_unavailable`` because of a step;
* where a prefill and a decode engine with the same layout are ready, such a pair is ready after every step: an engine
  of another layout is let in only beside one that it fits, and the last pair is not taken apart;
* prefill and decode are replaced by turns, the first new engine of a role (the canary) alone;
* every engine that is let in has answered a probe; where one cannot, everything stops and the old ones go on serving.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tidal_connector.cluster.steps_words import (
    OTHER,
    Finish,
    Forget,
    Halt,
    Limits,
    Phase,
    Seen,
    Start,
    Step,
    Stop,
    Target,
    Try,
    fit,
    serving,
)
from tidal_connector.ids import Role

_ROLES = (Role.PREFILL, Role.DECODE, Role.BOTH)
_MOVING = (Phase.STARTING, Phase.HEALTHY, Phase.STOPPING)
_UP = (Phase.HEALTHY, Phase.READY)


def next_steps(targets: Sequence[Target], limits: Limits, seen: Iterable[Seen]) -> list[Step]:
    """Return what to do now; empty where there is nothing to do but wait.

    Args:
        targets: all groups of the revision.
        limits: how careful to be.
        seen: every engine that has a record, in any order.
    """
    return _Planner(targets, limits, seen).steps()


class _Planner:
    """One call's reasoning: the steps that are chosen change its own picture, so that they fit together."""

    def __init__(self, targets: Sequence[Target], limits: Limits, seen: Iterable[Seen]) -> None:
        self._targets = {item.group: item for item in targets}
        self._limits = limits
        self._seen = {item.engine: item for item in sorted(seen, key=lambda item: (item.group, item.slot))}
        self._steps: list[Step] = []

    def steps(self) -> list[Step]:
        """Return the steps, in the order in which they may be done."""
        reason = self._failure()
        if reason:
            return [Halt(reason)]
        for item in list(self._seen.values()):
            if item.phase is Phase.GONE:
                del self._seen[item.engine]
                self._steps.append(Forget(item.engine))
        self._stop_useless()
        self._start_missing()
        while self._stop_one():
            pass
        if self._limits.allow_outage and not self._steps and self._stuck():
            self._stop_one(outage=True)
        self._try_new()
        if not self._steps and self._complete():
            return [Finish()]
        return self._steps

    # --- what is ---

    def _current(self, item: Seen) -> bool:
        """Whether an engine is what its group shall be made of, where it shall be."""
        target = self._targets.get(item.group)
        return (
            target is not None
            and item.template == target.template
            and item.slot < target.count + target.surge
            and item.node == target.nodes[item.slot % len(target.nodes)]
        )

    def _all(self, role: Role | None = None) -> list[Seen]:
        return [item for item in self._seen.values() if role is None or item.role is role]

    def _new(self, group: str) -> list[Seen]:
        return [
            item
            for item in self._seen.values()
            if item.group == group and self._current(item) and item.phase is not Phase.STOPPING
        ]

    def _stale(self, role: Role) -> list[Seen]:
        """Return the engines of a role that must go and are not on their way yet: the old, and those too many."""
        old = [item for item in self._all(role) if item.phase is not Phase.STOPPING and not self._current(item)]
        for target in self._targets.values():
            if target.role is role:
                old += self._too_many(target)
        return old

    def _too_many(self, target: Target) -> list[Seen]:
        new = sorted(self._new(target.group), key=lambda item: (item.phase is not Phase.READY, item.slot))
        return new[target.count :]

    def _count(self, role: Role) -> int:
        return sum(target.count for target in self._targets.values() if target.role is role)

    def _failure(self) -> str:
        for item in self._seen.values():
            if item.phase is Phase.FAILED and self._current(item):
                return f"{item.engine}: {item.why or 'failed'}"
        return self._misfit()

    def _misfit(self) -> str:
        """Say which new engines can never find a counterpart: all of the other role are up, and none fits."""
        for item in self._seen.values():
            other = OTHER.get(item.role)
            if item.phase is not Phase.HEALTHY or not self._current(item) or other is None:
                continue
            rest = [e for e in self._all(other) if e.phase is not Phase.GONE]
            up = all(self._current(e) and e.phase in (Phase.HEALTHY, Phase.READY) for e in rest)
            if up and len(rest) >= self._count(other) and not any(fit(item, e) for e in rest):
                return (
                    f"{item.engine} (layout {item.layout[:12]}) fits no {other} engine: "
                    f"{', '.join(f'{e.engine} has layout {e.layout[:12]}' for e in rest)}"
                )
        return ""

    # --- what to do ---

    def _stop(self, item: Seen) -> None:
        self._seen[item.engine] = msgspec.structs.replace(item, phase=Phase.STOPPING)
        self._steps.append(Stop(item.engine))

    def _stop_useless(self) -> None:
        """Stop what must go and serves nobody: left from a rollout that was undone or failed."""
        for role in _ROLES:
            for item in self._stale(role):
                if item.phase in (Phase.STARTING, Phase.HEALTHY, Phase.FAILED):
                    self._stop(item)

    def _start_missing(self) -> None:
        for target in self._targets.values():
            taken = {item.slot for item in self._all() if item.group == target.group}
            free = [slot for slot in range(target.count + target.surge) if slot not in taken]
            missing = target.count - len(self._new(target.group))
            for slot in free[: max(0, missing)]:
                if slot >= target.count and not self._may_begin(target.role):
                    break
                self._start(target, slot)

    def _start(self, target: Target, slot: int) -> None:
        engine = f"{target.group}-{slot}"
        node = target.nodes[slot % len(target.nodes)]
        self._seen[engine] = Seen(engine, target.group, slot, target.role, node, target.template, Phase.STARTING)
        self._steps.append(Start(engine, target.group, slot))

    def _stop_one(self, outage: bool = False) -> bool:
        """Stop one more old engine where that is safe; return whether one was found.

        The role of which more is left to replace comes first, and the other waits for it.
        """
        left = {role: len(stale) / max(1, self._count(role)) for role in _ROLES if (stale := self._stale(role))}
        for role in sorted(left, key=lambda role: (-left[role], _ROLES.index(role))):
            if self._may_begin(role):
                for item in sorted(self._stale(role), key=lambda item: item.phase is Phase.READY):
                    if item.phase is Phase.LOST or outage or self._may_stop(item):
                        self._stop(item)
                        return True
            if not self._stuck():
                return False
        return False

    def _may_begin(self, role: Role) -> bool:
        """Whether one more engine of a role may be on its way."""
        moving = [item for item in self._all(role) if item.phase in _MOVING]
        proven = any(item.phase is Phase.READY and self._current(item) for item in self._all(role))
        if len(moving) >= (max(1, self._limits.max_unavailable + self._limits.max_surge) if proven else 1):
            return False
        # The very first new engine of a rollout stands alone, whatever its role.
        return self._stuck() or any(
            item.phase is Phase.READY and self._current(item) for other in _ROLES for item in self._replaced(other)
        )

    def _replaced(self, role: Role) -> list[Seen]:
        """Return a role's engines where some of them are old."""
        return self._all(role) if self._stale(role) or self._old_stopping(role) else []

    def _old_stopping(self, role: Role) -> bool:
        return any(item.phase is Phase.STOPPING for item in self._all(role))

    def _stuck(self) -> bool:
        """Whether nothing moves by itself: a new engine that no other fits waits for a counterpart to be made."""
        for item in self._all():
            if item.phase in _MOVING or (item.phase is Phase.LOST and self._current(item)):
                fitting = any(fit(item, other) for other in self._all() if other.phase in _UP)
                if item.phase is not Phase.HEALTHY or fitting or item.role is Role.BOTH:
                    return False
        return True

    def _may_stop(self, item: Seen) -> bool:
        """Whether enough would be left without an engine that is ready."""
        before = self._all()
        after = [other for other in before if other.engine != item.engine]
        if sum(e.phase is Phase.READY for e in after if e.role is item.role) < self._floor(item.role):
            return False
        had, left = serving(before), serving(after)
        if not any(self._targets[name].count for name in self._targets):
            return True  # everything is to go
        if had and not left:
            return False
        for role in _ROLES:
            kept = sum(e.role is role for e in left)
            if kept < min(sum(e.role is role for e in had), self._floor(role)):
                return False
        return True

    def _floor(self, role: Role) -> int:
        return max(0, self._count(role) - self._limits.max_unavailable)

    def _try_new(self) -> None:
        tried: set[str] = set()
        for item in self._all():
            if item.phase is not Phase.HEALTHY or item.engine in tried or not self._current(item):
                continue
            if item.role is Role.BOTH:
                self._steps.append(Try(item.engine, item.engine, (item.engine,)))
                continue
            other = self._counterpart(item, tried)
            if other is not None:
                pair = (item, other) if item.role is Role.PREFILL else (other, item)
                admit = tuple(e.engine for e in pair if e.phase is Phase.HEALTHY)
                tried.update(admit)
                self._steps.append(Try(pair[0].engine, pair[1].engine, admit))

    def _counterpart(self, item: Seen, tried: Iterable[str]) -> Seen | None:
        """Return the engine to try a new one with: one that serves already, else one that is new, too."""
        found = [e for e in self._all() if fit(item, e) and e.phase in _UP and e.engine not in tried]
        usable = [e for e in found if e.phase is Phase.READY or self._current(e)]
        return min(usable, key=lambda e: (e.phase is not Phase.READY, not self._current(e)), default=None)

    def _complete(self) -> bool:
        if any(item.phase is not Phase.READY or not self._current(item) for item in self._all()):
            return False
        return all(len(self._new(target.group)) == target.count for target in self._targets.values())
