# SPDX-License-Identifier: Apache-2.0
"""The planner of rollouts, played through on a world whose engines start, end and fail in any order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidal_connector.cluster.steps import next_steps
from tidal_connector.cluster.steps_words import (
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
    serving,
)
from tidal_connector.ids import Role

ROUNDS = 400


class World:
    """Engines that do what a rollout tells them, one random event at a time, and the promises checked after each."""

    def __init__(self, targets: Sequence[Target], limits: Limits, seed: int, broken: Sequence[str] = ()) -> None:
        self.targets = list(targets)
        self.limits = limits
        self.engines: dict[str, Seen] = {}
        self.broken = set(broken)
        self.random = random.Random(seed)
        self.halted = ""
        self.done = False
        self.moves = 0
        self.most_stopping = 0

    def layout(self, template: str) -> str:
        return template.partition("/")[0]

    def plan(self) -> list[Step]:
        shuffled = list(self.engines.values())
        self.random.shuffle(shuffled)
        steps = next_steps(self.targets, self.limits, shuffled)
        assert steps == next_steps(self.targets, self.limits, shuffled[::-1])  # whatever the order
        return steps

    def change(self, engine: str, **more: object) -> None:
        self.engines[engine] = msgspec.structs.replace(self.engines[engine], **more)

    def ready(self, role: Role) -> int:
        return sum(item.role is role and item.phase is Phase.READY for item in self.engines.values())

    def floor(self, role: Role) -> int:
        return sum(t.count for t in self.targets if t.role is role) - self.limits.max_unavailable

    def act(self, step: Step) -> None:
        if isinstance(step, Start):
            target = next(item for item in self.targets if item.group == step.group)
            assert step.engine not in self.engines
            assert step.slot < target.count + target.surge
            node = target.nodes[step.slot % len(target.nodes)]
            self.engines[step.engine] = Seen(
                step.engine, step.group, step.slot, target.role, node, target.template, Phase.STARTING
            )
        elif isinstance(step, Stop):
            self.stop(step.engine)
        elif isinstance(step, Forget):
            assert self.engines.pop(step.engine).phase is Phase.GONE
        elif isinstance(step, Try):
            prefill, decode = self.engines[step.prefill], self.engines[step.decode]
            assert prefill.layout == decode.layout != ""
            assert {prefill.phase, decode.phase} <= {Phase.HEALTHY, Phase.READY}
            for engine in step.admit:
                self.change(engine, phase=Phase.READY)
        elif isinstance(step, Halt):
            self.halted = step.reason
        elif isinstance(step, Finish):
            self.done = True

    def stop(self, engine: str) -> None:
        item = self.engines[engine]
        had, ready = serving(self.engines.values()), self.ready(item.role)
        self.change(engine, phase=Phase.STOPPING)
        if item.phase is not Phase.READY or not any(target.count for target in self.targets):
            return
        now = serving(self.engines.values())
        assert self.limits.allow_outage or not had or now, f"stopping {engine} took the last pair apart"
        if not self.limits.allow_outage:
            assert self.ready(item.role) >= min(ready, self.floor(item.role)), f"{engine}: below the floor"
            for role in Role:
                before = sum(e.role is role for e in had)
                assert sum(e.role is role for e in now) >= min(before, self.floor(role)), f"{engine}: {role} unmatched"

    def event(self) -> bool:
        """Let one engine that is on its way go on; return whether there was one."""
        moving = [e for e in self.engines.values() if e.phase in (Phase.STARTING, Phase.STOPPING, Phase.LOST)]
        if not moving:
            return False
        item = self.random.choice(moving)
        if item.phase is Phase.STOPPING:
            self.change(item.engine, phase=Phase.GONE)
        elif item.phase is Phase.LOST:
            self.change(item.engine, phase=Phase.READY)
        elif item.template in self.broken:
            self.change(item.engine, phase=Phase.FAILED, why="ended 3 times")
        else:
            self.change(item.engine, phase=Phase.HEALTHY, layout=self.layout(item.template))
        return True

    def lose(self) -> None:
        """Let a ready engine crash; its agent brings it back."""
        ready = [e for e in self.engines.values() if e.phase is Phase.READY]
        if ready:
            self.change(self.random.choice(ready).engine, phase=Phase.LOST)

    def run(self, rounds: int = ROUNDS, crashes: float = 0.0) -> None:
        for _ in range(rounds):
            steps = self.plan()
            for step in steps:
                self.act(step)
            if self.done or self.halted:
                return
            if crashes and self.random.random() < crashes:
                self.lose()
            moved = self.event()
            assert steps or moved, f"stuck: {list(self.engines.values())}"
            self.moves += 1
        if rounds == ROUNDS:
            raise AssertionError(f"no end: {list(self.engines.values())}")

    def aim(self, targets: Sequence[Target]) -> None:
        self.targets, self.done, self.halted = list(targets), False, ""

    def check_complete(self) -> None:
        for target in self.targets:
            found = [e for e in self.engines.values() if e.group == target.group]
            assert [e.template for e in found] == [target.template] * target.count
            assert all(e.phase is Phase.READY for e in found)
        assert {e.group for e in self.engines.values()} <= {t.group for t in self.targets}


def pair(p: int, d: int, template: str, surge: int = 0, nodes: tuple[str, ...] = ("n",)) -> list[Target]:
    return [
        Target("p", Role.PREFILL, p, surge, template, nodes),
        Target("d", Role.DECODE, d, surge, template, nodes),
    ]


def deployed(p: int, d: int, limits: Limits, seed: int = 0, broken: Sequence[str] = ()) -> World:
    world = World(pair(p, d, "l1/a", limits.max_surge), limits, seed, broken)
    world.run()
    world.check_complete()
    return world


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, Limits, int]:
    surge = draw(st.integers(0, 2))
    unavailable = draw(st.integers(0 if surge else 1, 3))
    least = 1 if surge else 2
    p, d = draw(st.integers(least, 5)), draw(st.integers(least, 5))
    return p, d, Limits(unavailable, surge), draw(st.integers(0, 1 << 30))


@given(cases(), st.sampled_from(["l1/b", "l2/b"]), st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_a_rollout_and_its_undo_end_and_keep_the_promises(
    case: tuple[int, int, Limits, int], template: str, undo_after: int
) -> None:
    p, d, limits, seed = case
    world = deployed(p, d, limits, seed)
    world.aim(pair(p, d, template, limits.max_surge))
    world.run()
    assert not world.halted
    world.check_complete()
    world.aim(pair(p, d, "l3/c", limits.max_surge))
    world.run(undo_after)  # given up midway
    world.aim(pair(p, d, template, limits.max_surge))
    world.run()
    assert not world.halted
    world.check_complete()


@given(cases(), st.sampled_from(["l1/b", "l2/b"]))
@settings(max_examples=150, deadline=None)
def test_crashes_delay_a_rollout_and_break_no_promise(case: tuple[int, int, Limits, int], template: str) -> None:
    p, d, limits, seed = case
    world = deployed(p, d, limits, seed)
    world.aim(pair(p, d, template, limits.max_surge))
    world.run(60, crashes=0.2)
    if not world.done:
        world.run()
    world.check_complete()


@given(cases())
@settings(max_examples=150, deadline=None)
def test_a_revision_that_never_becomes_ready_halts_and_costs_no_more_than_the_canary(
    case: tuple[int, int, Limits, int],
) -> None:
    p, d, limits, seed = case
    world = deployed(p, d, limits, seed, broken=["l1/b"])
    world.aim(pair(p, d, "l1/b", limits.max_surge))
    world.run()
    assert "ended 3 times" in world.halted
    old = [e for e in world.engines.values() if e.template == "l1/a" and e.phase is Phase.READY]
    assert len(old) >= p + d - (0 if limits.max_surge else 1)
    world.aim(pair(p, d, "l1/a", limits.max_surge))
    world.run()
    world.check_complete()


@given(cases(), st.integers(1, 5), st.integers(1, 5), st.booleans())
@settings(max_examples=150, deadline=None)
def test_counts_and_nodes_may_change_with_or_without_the_template(
    case: tuple[int, int, Limits, int], p: int, d: int, moved: bool
) -> None:
    before_p, before_d, limits, seed = case
    world = deployed(before_p, before_d, limits, seed)
    p, d = (p, d) if limits.max_surge else (max(2, p), max(2, d))
    world.aim(pair(p, d, "l1/a", limits.max_surge, ("n", "m") if moved else ("n",)))
    world.run()
    world.check_complete()


def test_engines_whose_template_did_not_change_are_left_alone() -> None:
    world = deployed(2, 2, Limits())
    world.aim([pair(2, 2, "l1/b")[0], pair(2, 2, "l1/a")[1]])
    before = world.engines["d-0"]
    steps = world.plan()
    assert steps == [Stop("p-0")]
    world.run()
    world.check_complete()
    assert world.engines["d-0"] is before


def test_the_first_new_engine_stands_alone_and_prefill_and_decode_take_turns() -> None:
    world = deployed(3, 3, Limits())
    world.aim(pair(3, 3, "l1/b"))
    order = []
    for _ in range(100):
        for step in world.plan():
            world.act(step)
            order += [step.engine] if isinstance(step, Stop) else []
        if world.done:
            break
        assert sum(e.phase in (Phase.STOPPING, Phase.STARTING) for e in world.engines.values()) <= 2
        if len(order) == 1:
            assert order == ["p-0"]
        world.event()
    assert [name[0] for name in order] == ["p", "d"] * 3


def test_a_new_layout_is_let_in_as_a_pair() -> None:
    world = deployed(2, 2, Limits())
    world.aim(pair(2, 2, "l2/b"))
    tried = []
    for _ in range(100):
        for step in world.plan():
            world.act(step)
            tried += [step] if isinstance(step, Try) else []
        if world.done:
            break
        world.event()
    assert tried[0] == Try("p-0", "d-0", ("p-0", "d-0"))
    world.check_complete()


def test_new_engines_that_fit_nobody_halt_the_rollout() -> None:
    world = deployed(2, 2, Limits())
    world.aim([pair(2, 2, "l1/a")[0], pair(2, 2, "l2/b")[1]])
    world.run()
    assert world.halted.startswith("d-0 (layout l2) fits no prefill engine")
    assert len(serving(world.engines.values())) == 3


def test_one_pair_without_room_for_another_is_replaced_only_where_an_outage_is_allowed() -> None:
    world = deployed(1, 1, Limits())
    world.aim(pair(1, 1, "l1/b"))
    assert world.plan() == []
    world.limits = Limits(allow_outage=True)
    world.run()
    world.check_complete()


def test_an_outage_that_is_allowed_is_not_taken_where_it_can_be_avoided() -> None:
    world = deployed(2, 2, Limits(allow_outage=True))
    world.aim(pair(2, 2, "l2/b"))
    for _ in range(100):
        for step in world.plan():
            world.act(step)
            assert serving(world.engines.values())
        if world.done:
            break
        world.event()
    world.check_complete()


def test_engines_that_serve_alone_are_replaced_too() -> None:
    world = World([Target("b", Role.BOTH, 2, 0, "l1/a", ("n",))], Limits(), 1)
    world.run()
    world.aim([Target("b", Role.BOTH, 2, 0, "l2/b", ("n",))])
    world.run()
    world.check_complete()


def test_a_cluster_can_be_emptied() -> None:
    world = deployed(2, 2, Limits())
    world.aim(pair(0, 0, "l1/a"))
    world.run()
    assert not world.engines


@pytest.mark.parametrize("phase", [Phase.LOST, Phase.STARTING, Phase.FAILED])
def test_an_old_engine_that_does_not_serve_goes_first(phase: Phase) -> None:
    world = deployed(2, 2, Limits())
    world.change("p-1", phase=phase)
    world.aim(pair(2, 2, "l1/b"))
    assert world.plan()[0] == Stop("p-1")


def test_no_old_engine_is_stopped_while_one_of_its_role_is_down() -> None:
    world = deployed(2, 2, Limits())
    world.change("p-1", phase=Phase.LOST)
    steps = next_steps(world.targets, Limits(), world.engines.values())
    assert steps == []
    world.aim([pair(2, 2, "l1/a")[0], pair(2, 2, "l1/b")[1]])
    world.change("d-1", phase=Phase.READY)
    world.change("p-1", phase=Phase.READY)
    world.change("d-0", phase=Phase.LOST)
    assert world.plan() == [Stop("d-0")]
