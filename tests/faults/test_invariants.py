# SPDX-License-Identifier: Apache-2.0
"""Every invariant of the protocol (those that ``world`` checks after each step) under every fault."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.faults.world import KINDS, Faults, Plan, Step, World

PLANS = st.builds(
    lambda tokens, share, chunk: Plan(tokens, int(tokens * share), chunk),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.0, 0.3, 0.6, 1.0]),
    st.integers(3, 40),
)
FAULTS = st.builds(
    Faults,
    lost=st.sampled_from([0.0, 0.0, 0.1, 0.4]),
    doubled=st.sampled_from([0.0, 0.3]),
    delay_s=st.sampled_from([0.0, 0.2, 1.0]),
    garbage=st.sampled_from([0.0, 0.3]),
    write_fails=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    write_s=st.sampled_from([0.0, 0.1, 0.2]),
    hides_connections=st.booleans(),
)
RANKS = [(1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (4, 2)]
TROUBLE = [kind for kind in KINDS if kind not in ("reserve", "open")]


@st.composite
def scenarios(draw: st.DrawFn, faults: st.SearchStrategy[Faults] = FAULTS, trouble: int = 4) -> World:
    plans = draw(st.lists(PLANS, min_size=1, max_size=4))
    moments = st.floats(0.0, 4.0, allow_nan=False)
    steps = [Step(draw(moments), kind, index) for index in range(len(plans)) for kind in ("reserve", "open")]
    extra = st.builds(Step, moments, st.sampled_from(TROUBLE), st.integers(0, len(plans) - 1))
    steps += draw(st.lists(extra, max_size=trouble))
    return World(draw(st.integers(0, 1 << 30)), draw(faults), plans, steps, draw(st.sampled_from(RANKS)))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(scenarios())
def test_the_invariants_hold_under_every_fault(world: World) -> None:
    world.run()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(scenarios(st.builds(Faults, doubled=st.just(0.4), garbage=st.just(0.5), delay_s=st.just(0.3)), trouble=0))
def test_rubbish_duplicates_and_disorder_fail_nothing(world: World) -> None:
    world.run()


def test_bytes_for_one_rank_of_decode_may_queue_behind_those_for_another() -> None:
    steps = [Step(0.0, "reserve", 0), Step(0.0, "open", 0)]
    World(4, Faults(doubled=0.4, garbage=0.5, delay_s=0.3, write_s=0.2), [Plan(33, 0, 5)], steps, (1, 2)).run()
