# SPDX-License-Identifier: Apache-2.0
"""Operators and conductors on a store inside the process, with nodes that only say what their engines would."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from tests.cluster.standins import until
from tidal_connector.cluster import rollout as verbs
from tidal_connector.cluster.conductor import Conductor, Patience
from tidal_connector.cluster.conductor_probe import Verdict
from tidal_connector.cluster.orders import AWAITS_ADMISSION, Want, order_key
from tidal_connector.cluster.rollout_records import (
    AGENTS,
    CONDUCTOR,
    ENGINES,
    REPORTS,
    STATE,
    AgentEntry,
    Assignment,
    Report,
    Rollout,
    Stage,
    Status,
    View,
    Work,
    encode,
    state_changes,
    view_of,
)
from tidal_connector.cluster.rollout_status import rollout_status
from tidal_connector.cluster.spec import ClusterSpec, Probe, build_spec, revision_id
from tidal_connector.errors import ConfigError, Conflict, RegistryLost
from tidal_connector.ids import EngineId
from tidal_connector.registry.base import Delete, Hold, Put, Snapshot, Store
from tidal_connector.registry.members import MEMBERS, Member, State
from tidal_connector.registry.memory import MemoryStore

WAIT_S = 5.0


def spec(tag: str, p: int = 2, d: int = 2, **cluster: Any) -> ClusterSpec:
    group = {"nodes": ["n"], "model": "m", "environment": {"TAG": tag}}
    return build_spec(
        {
            "cluster": {"ready_deadline_s": 10.0, "drain_deadline_s": 5.0, **cluster},
            "group": [{"role": "prefill", "count": p, **group}, {"role": "decode", "count": d, **group}],
        },
        "test",
    )


class Nodes:
    """Every node's agent and engines at once: each turn does what the assignments want, at once and without fault.

    ``broken`` holds tags whose engines end by themselves, ``silent`` those whose engines never become healthy, and
    ``layouts`` the layout of each tag. ``places`` says where an agent has started an engine, if elsewhere.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.broken: set[str] = set()
        self.silent: set[str] = set()
        self.layouts: dict[str, str] = {}
        self.places: dict[str, str] = {}
        self.holds: dict[str, Hold] = {}
        self.agent = store.hold(AGENTS + "n", encode(AgentEntry()), 60)
        assert self.agent.wait(WAIT_S)

    def turn(self) -> None:
        view = view_of(self.store.read(""))
        reports: dict[str, Report] = {}
        for name, item in view.assignments.items():
            reports[name] = self._one(view, item)
        for name in [name for name in self.holds if name not in view.assignments]:
            self.holds.pop(name).release()
        self.store.write([Put(REPORTS + "n", msgspec.json.encode(reports))])

    def _one(self, view: View, item: Assignment) -> Report:
        tag = view.specs[item.revision].groups()[item.group].environment["TAG"]

        def report(stage: Stage, **more: Any) -> Report:
            return Report(revision=item.revision, attempt=item.attempt, stage=stage, **more)

        if item.want is Work.STOP:
            if item.engine in self.holds:
                self.holds.pop(item.engine).release()
            return report(Stage.STOPPED)
        if tag in self.broken:
            return report(Stage.BACKOFF, restarts=3, why="status 1")
        order = view.orders.get(item.engine)
        admitted = order is not None and order.want is Want.SERVE and order.revision == item.revision
        state = State.READY if admitted else State.STARTING
        note = "" if admitted or tag in self.silent else AWAITS_ADMISSION
        self._announce(
            Member(
                engine=EngineId(item.engine),
                role=item.role,
                state=state,
                revision=item.revision,
                layout=self.layouts.get(tag, "l1"),
                http="http://h:1",
                note=note,
            )
        )
        return report(Stage.RUNNING, pid=1, http=self.places.get(item.engine, "h:1"))

    def _announce(self, member: Member) -> None:
        value = msgspec.json.encode(member)
        hold = self.holds.get(member.engine)
        if hold is None:
            hold = self.holds[member.engine] = self.store.hold(MEMBERS + member.engine, value, 60)
        hold.update(value)
        assert hold.wait(WAIT_S)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore() as found:
        yield found


@pytest.fixture
def nodes(store: MemoryStore) -> Nodes:
    return Nodes(store)


def good(*_: object) -> Verdict:
    return Verdict(True)


def carry_out(
    store: Store, nodes: Nodes, conductors: Sequence[Conductor], each: Callable[[View], None] | None = None
) -> Rollout:
    """Let conductors by turns, and the nodes, go on until the rollout ends; look at every state in between."""
    for turn in range(300):
        nodes.turn()
        conductors[turn % len(conductors)].tick()
        view = view_of(store.read(""))
        if each is not None:
            each(view)
        assert view.rollout is not None
        if view.rollout.status is not Status.RUNNING:
            return view.rollout
    raise AssertionError(f"no end: {view}")


def conductor(store: Store, ask: Callable[..., Verdict] = good, clock: Callable[[], float] = lambda: 0.0) -> Conductor:
    return Conductor(store, "n", 60, ask, clock)


def serves(view: View) -> int:
    """Return how many engines of the scarcer role are ready."""
    ready = [item for item in view.members.engines.values() if item.state is State.READY]
    return min(sum(item.role == role for item in ready) for role in ("prefill", "decode"))


def test_apply_undo_and_history(store: MemoryStore, nodes: Nodes) -> None:
    one, two = spec("1"), spec("2")
    assert verbs.apply(store, one, "ann@x").number == 1
    assert carry_out(store, nodes, [conductor(store)]).status is Status.DONE
    verbs.apply(store, two, "bob@y")

    def never_below_the_floor(view: View) -> None:
        assert serves(view) >= 1

    assert carry_out(store, nodes, [conductor(store)], never_below_the_floor).status is Status.DONE
    back = verbs.undo(store, "ann@x")
    assert back.revision == revision_id(one)
    assert carry_out(store, nodes, [conductor(store)], never_below_the_floor).status is Status.DONE
    view = verbs.read_view(store)
    assert [(item.number, item.kind, item.revision, item.by, item.status) for item in view.history] == [
        (1, "apply", revision_id(one), "ann@x", "done"),
        (2, "apply", revision_id(two), "bob@y", "done"),
        (3, "undo", revision_id(one), "ann@x", "done"),
    ]
    assert all(item.ended_at is not None and item.ended_at >= item.at for item in view.history)
    status = rollout_status(view)
    assert (status.replaced, status.wanted) == (4, 4)
    assert {item.revision for item in status.engines} == {revision_id(one)}


def test_a_conductor_that_is_replaced_after_every_decision_loses_nothing(store: MemoryStore, nodes: Nodes) -> None:
    verbs.apply(store, spec("1"), "ann@x")
    carry_out(store, nodes, [conductor(store) for _ in range(300)])
    verbs.apply(store, spec("2"), "ann@x")
    assert carry_out(store, nodes, [conductor(store) for _ in range(300)]).status is Status.DONE


def test_two_conductors_at_once_never_both_decide(store: MemoryStore, nodes: Nodes) -> None:
    verbs.apply(store, spec("1"), "ann@x")
    view = view_of(store.read(""))
    first, second = conductor(store), conductor(store)
    first._decide(view)
    with pytest.raises(Conflict):
        second._decide(view)  # it was frozen, and rests on what was


def test_a_decision_that_was_frozen_does_not_override_a_pause(store: MemoryStore, nodes: Nodes) -> None:
    verbs.apply(store, spec("1"), "ann@x")
    frozen = view_of(store.read(""))
    verbs.pause(store, "bob@y")
    with pytest.raises(Conflict):
        conductor(store)._decide(frozen)
    assert not view_of(store.read("")).assignments
    assert verbs.read_view(store).rollout.reason == "paused by bob@y"  # type: ignore[union-attr]
    assert not conductor(store).tick()
    verbs.resume(store, "ann@x")
    assert carry_out(store, nodes, [conductor(store)]).status is Status.DONE


def test_the_second_operator_is_refused_with_who_and_when(store: MemoryStore, nodes: Nodes) -> None:
    verbs.apply(store, spec("1"), "ann@x")
    with pytest.raises(Conflict, match=r"rollout 1 \(apply of \w+\) was begun by ann@x at 20.* and is running"):
        verbs.apply(store, spec("2"), "bob@y")
    assert verbs.apply(store, spec("1"), "bob@y").by == "ann@x"  # the same word again
    verbs.pause(store, "ann@x")
    with pytest.raises(Conflict, match="is paused"):
        verbs.apply(store, spec("2"), "bob@y")


class Simultaneous(MemoryStore):
    """A store in which several operators have all read before one of them writes."""

    def __init__(self, operators: int) -> None:
        super().__init__()
        self.gate = threading.Barrier(operators)
        self.first = threading.local()

    def read(self, prefix: str) -> Snapshot:
        found = super().read(prefix)
        if threading.current_thread().name.startswith("operator") and not getattr(self.first, "over", False):
            self.first.over = True
            self.gate.wait(WAIT_S)
        return found


def test_of_operators_at_the_same_moment_one_wins() -> None:
    store = Simultaneous(6)
    won: list[int] = []
    refused: list[str] = []

    def operator(number: int) -> None:
        try:
            verbs.apply(store, spec(str(number)), f"operator-{number}")
            won.append(number)
        except Conflict as error:
            refused.append(str(error))

    threads = [threading.Thread(target=operator, args=(n,), name=f"operator-{n}") for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(won) == 1
    assert len(refused) == 5
    assert all(f"operator-{won[0]}" in text for text in refused)
    assert len(view_of(store.read("")).history) == 1
    store.close()


def test_an_undo_takes_the_place_of_a_running_rollout_and_given_again_is_the_same(
    store: MemoryStore, nodes: Nodes
) -> None:
    verbs.apply(store, spec("1"), "ann@x")
    carry_out(store, nodes, [conductor(store)])
    verbs.apply(store, spec("2"), "ann@x")
    for _ in range(4):
        nodes.turn()
        conductor(store).tick()
    back = verbs.undo(store, "bob@y")
    assert back.revision == revision_id(spec("1"))
    assert verbs.undo(store, "eve@z") == back
    assert verbs.undo(store, "eve@z", to=back.revision) == back
    verbs.pause(store, "bob@y")
    for to in ("", back.revision):
        with pytest.raises(Conflict, match="is paused; let it go on with: tidal rollout resume"):
            verbs.undo(store, "eve@z", to)
    verbs.resume(store, "bob@y")
    assert carry_out(store, nodes, [conductor(store)]).status is Status.DONE
    assert [item.status for item in verbs.read_view(store).history] == ["done", "replaced", "done"]


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("to", ["", "1", "2"])
def test_a_running_undo_can_be_undone(store: MemoryStore, nodes: Nodes, paused: bool, to: str) -> None:
    """An undo to a revision that never works, given by mistake, must not hold the operator up."""
    for tag in ("1", "2"):
        verbs.apply(store, spec(tag), "ann@x")
        carry_out(store, nodes, [conductor(store)])
    nodes.broken = {"3"}
    verbs.apply(store, spec("3"), "ann@x")
    assert carry_out(store, nodes, [conductor(store)]).status is Status.HALTED
    bad = verbs.undo(store, "ann@x", to=revision_id(spec("3")))
    view = verbs.read_view(store)
    assert verbs.never_reached(view, bad).startswith(f"revision {bad.revision} was never reached; rollout 3 to it was")
    if paused:
        verbs.pause(store, "ann@x")
    again = verbs.undo(store, "ann@x", to=revision_id(spec(to)) if to else "")
    assert (again.number, again.revision) == (5, revision_id(spec(to or "2")))
    assert verbs.never_reached(verbs.read_view(store), again) == ""
    assert carry_out(store, nodes, [conductor(store)]).status is Status.DONE
    assert [item.status for item in verbs.read_view(store).history] == ["done", "done", "halted", "replaced", "done"]


def test_an_undo_that_crosses_another_one_does_not_turn_it_round() -> None:
    store = Simultaneous(2)
    with store:
        for tag in ("1", "2"):
            verbs.apply(store, spec(tag), "ann@x")
            view = view_of(store.read(""))
            assert view.rollout is not None
            done = msgspec.structs.replace(view.rollout, status=Status.DONE)
            store.write([*state_changes(done)], {STATE: view.version})
        ends: list[str] = []

        def operator() -> None:
            try:
                ends.append(verbs.undo(store, "ann@x").revision)
            except Conflict as error:
                ends.append(str(error).partition(" (")[0])

        threads = [threading.Thread(target=operator, name=f"operator-{n}") for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert sorted(ends) == sorted([revision_id(spec("1")), "rollout 3"])


def test_what_never_becomes_healthy_halts_in_time_and_the_old_ones_serve(store: MemoryStore, nodes: Nodes) -> None:
    now = [0.0]
    nodes.silent = {"2"}
    verbs.apply(store, spec("1"), "ann@x")
    carry_out(store, nodes, [conductor(store)])
    verbs.apply(store, spec("2"), "ann@x")

    def time_passes(view: View) -> None:
        now[0] += 1.0
        assert serves(view) >= 1

    found = carry_out(store, nodes, [conductor(store, clock=lambda: now[0])], time_passes)
    assert found.status is Status.HALTED
    assert found.reason.startswith("prefill-0: did not become healthy within 10 s")
    assert 10 < now[0] < 40
    assert verbs.undo(store, "ann@x").revision == revision_id(spec("1"))
    assert carry_out(store, nodes, [conductor(store)]).status is Status.DONE


def test_a_new_engine_that_ends_again_and_again_halts(store: MemoryStore, nodes: Nodes) -> None:
    nodes.broken = {"2"}
    verbs.apply(store, spec("1"), "ann@x")
    carry_out(store, nodes, [conductor(store)])
    verbs.apply(store, spec("2"), "ann@x")
    found = carry_out(store, nodes, [conductor(store)])
    assert found.status is Status.HALTED
    assert found.reason == "prefill-0: ended 3 times by itself: status 1"
    nodes.broken = set()
    verbs.resume(store, "ann@x")  # mended meanwhile, so it is tried once more
    assert carry_out(store, nodes, [conductor(store)]).status is Status.DONE
    assert view_of(store.read("")).assignments["prefill-0"].attempt == 2


def test_a_failed_probe_halts_before_any_client_reaches_the_new_engine(store: MemoryStore, nodes: Nodes) -> None:
    asked: list[tuple[str, str]] = []

    def bad(prefill: Member, decode: Member, probe: Probe) -> Verdict:
        asked.append((prefill.engine, decode.engine))
        new = view_of(store.read("")).rollout
        assert new is not None
        if new.number == 1:
            return Verdict(True)
        return Verdict(False, f"{prefill.engine}: status 500", prefill.engine)

    verbs.apply(store, spec("1"), "ann@x")
    carry_out(store, nodes, [conductor(store, bad)])
    verbs.apply(store, spec("2"), "ann@x")
    asked.clear()

    def never_ready(view: View) -> None:
        new = revision_id(spec("2"))
        assert not [e for e in view.members.engines.values() if e.revision == new and e.state is State.READY]

    found = carry_out(store, nodes, [conductor(store, bad)], never_ready)
    assert (found.status, found.reason) == (Status.HALTED, "prefill-0: status 500")
    assert len(asked) == 2  # probe.tries
    assert all(pair[0] == "prefill-0" for pair in asked)


def test_a_new_engine_is_not_blamed_for_its_counterpart(store: MemoryStore, nodes: Nodes) -> None:
    left = [5]

    def other_dies(prefill: Member, decode: Member, probe: Probe) -> Verdict:
        rollout = view_of(store.read("")).rollout
        assert rollout is not None
        if rollout.number == 1 or not left[0]:
            return Verdict(True)
        left[0] -= 1
        return Verdict(False, f"{decode.engine}: connection refused", decode.engine)

    verbs.apply(store, spec("1"), "ann@x")
    carry_out(store, nodes, [conductor(store, other_dies)])
    verbs.apply(store, spec("2"), "ann@x")
    assert carry_out(store, nodes, [conductor(store, other_dies)]).status is Status.DONE
    assert not left[0]


def test_a_layout_change_keeps_a_matching_pair_at_every_moment(store: MemoryStore, nodes: Nodes) -> None:
    nodes.layouts = {"1": "l1", "2": "l2"}
    verbs.apply(store, spec("1"), "ann@x")
    carry_out(store, nodes, [conductor(store)])
    verbs.apply(store, spec("2"), "ann@x")

    def a_pair_fits(view: View) -> None:
        ready = [item for item in view.members.engines.values() if item.state is State.READY]
        assert any(a.layout == b.layout and (a.role, b.role) == ("prefill", "decode") for a in ready for b in ready)

    assert carry_out(store, nodes, [conductor(store)], a_pair_fits).status is Status.DONE


def test_time_without_an_agent_does_not_count_against_an_engine(store: MemoryStore, nodes: Nodes) -> None:
    now = [0.0]
    patience = Patience(lambda: now[0])
    verbs.apply(store, spec("1"), "ann@x")
    conductor(store).tick()

    def late() -> frozenset[str]:
        view = view_of(store.read(""))
        return patience.late(view, spec("1"))

    assert not late()
    now[0] = 9.0
    assert not late()
    nodes.agent.release()
    now[0] = 100.0
    assert not late()
    nodes.agent = store.hold(AGENTS + "n", encode(AgentEntry()), 60)
    assert nodes.agent.wait(WAIT_S)
    assert not late()
    now[0] = 109.0
    assert not late()
    now[0] = 111.0
    assert late() == {"prefill-0", "prefill-1", "decode-0", "decode-1"}


def test_an_engine_on_a_machine_that_is_gone_is_given_up_after_its_drain_deadline(
    store: MemoryStore, nodes: Nodes
) -> None:
    now = [0.0]
    verbs.apply(store, spec("1", 3, 3), "ann@x")
    carry_out(store, nodes, [conductor(store)])
    lost = msgspec.structs.replace(view_of(store.read("")).assignments["prefill-2"], node="gone")
    store.write([Put(ENGINES + "prefill-2", encode(lost))])
    nodes.holds.pop("prefill-2").release()
    verbs.apply(store, spec("1", 2, 3), "ann@x")  # the operator takes it out

    conducting = conductor(store, clock=lambda: now[0])
    for _ in range(60):
        now[0] += 1.0
        conducting.tick()
        view = view_of(store.read(""))
        if view.rollout is not None and view.rollout.status is Status.DONE:
            break
    assert view.rollout is not None
    assert view.rollout.status is Status.DONE
    assert "prefill-2" not in view.assignments
    assert now[0] > 5.0


def test_no_engine_that_serves_is_stopped_for_one_that_nobody_would_start(store: MemoryStore, nodes: Nodes) -> None:
    verbs.apply(store, spec("1"), "ann@x")
    carry_out(store, nodes, [conductor(store)])
    nodes.agent.release()
    verbs.apply(store, spec("2"), "ann@x")
    conducting = conductor(store)
    while conducting.tick():
        pass
    view = view_of(store.read(""))
    assert view.rollout is not None
    assert view.rollout.reason == "waits for an agent on n"
    assert all(item.want is Work.RUN for item in view.assignments.values())
    nodes.agent = store.hold(AGENTS + "n", encode(AgentEntry()), 60)
    assert nodes.agent.wait(WAIT_S)
    found = carry_out(store, nodes, [conducting])
    assert (found.status, found.reason) == (Status.DONE, "")


def test_an_engine_that_no_agent_runs_is_named_and_never_let_in(store: MemoryStore, nodes: Nodes) -> None:
    """Somebody else's process has the name of an engine that its agent has started, too."""
    verbs.apply(store, spec("1", 2, 2), "ann@x")
    nodes.places["prefill-0"] = "h:2"
    conducting = conductor(store)
    for _ in range(40):
        nodes.turn()
        conducting.tick()
    view = view_of(store.read(""))
    assert view.rollout is not None
    said = "another process announces prefill-0, at http://h:1: n's agent runs one at h:2; end the other one"
    assert (view.rollout.status, view.rollout.reason) == (Status.RUNNING, said)
    assert not view.assignments["prefill-0"].admitted
    assert next(item.note for item in rollout_status(view).engines if item.engine == "prefill-0") == said
    nodes.places.clear()  # the other one is ended
    found = carry_out(store, nodes, [conducting])
    assert (found.status, found.reason) == (Status.DONE, "")


def test_a_rollout_that_waits_for_an_orphan_to_end_says_so(store: MemoryStore, nodes: Nodes) -> None:
    verbs.apply(store, spec("1"), "ann@x")
    carry_out(store, nodes, [conductor(store)])
    verbs.apply(store, spec("2"), "ann@x")
    conducting = conductor(store)
    conducting.tick()
    assert view_of(store.read("")).assignments["prefill-0"].want is Work.STOP
    orphan = nodes.holds.pop("prefill-0")  # lives on, whatever the agent ends
    for _ in range(20):
        nodes.turn()
        conducting.tick()
    view = view_of(store.read(""))
    assert view.rollout is not None
    assert view.rollout.reason.startswith("another process announces prefill-0, at http://h:1: the one that n's agent")
    orphan.release()
    assert carry_out(store, nodes, [conducting]).status is Status.DONE


def test_nothing_to_undo_pause_or_resume_is_said(store: MemoryStore, nodes: Nodes) -> None:
    for word in (verbs.undo, verbs.pause, verbs.resume):
        with pytest.raises(ConfigError, match="nothing was ever rolled out"):
            word(store, "ann@x")
    verbs.apply(store, spec("1"), "ann@x")
    carry_out(store, nodes, [conductor(store)])
    with pytest.raises(ConfigError, match="nothing to return to"):
        verbs.undo(store, "ann@x")
    with pytest.raises(ConfigError, match="only a running one can be paused"):
        verbs.pause(store, "ann@x")
    assert verbs.apply(store, spec("1"), "bob@y").by == "ann@x"  # it is there already
    with pytest.raises(ConfigError, match="known: "):
        verbs.undo(store, "ann@x", to="nonsense")


class Forgetful(MemoryStore):
    """A store that loses every answer to a write, though the write holds."""

    losing = False

    def write(self, changes: Sequence[Put | Delete], expect: Any = None) -> None:
        super().write(changes, expect)
        if self.losing:
            raise RegistryLost("no answer")


def test_a_lost_answer_is_no_second_rollout() -> None:
    with Forgetful() as store:
        store.losing = True
        begun = verbs.apply(store, spec("1"), "ann@x")
        assert begun.number == 1
        assert [item.number for item in view_of(store.read("")).history] == [1]


def test_old_history_and_specifications_are_dropped(store: MemoryStore, nodes: Nodes) -> None:
    for number in range(60):
        verbs.apply(store, spec(str(number)), "ann@x")
        view = view_of(store.read(""))
        assert view.rollout is not None
        done = msgspec.structs.replace(view.rollout, status=Status.DONE)
        store.write([Put(STATE, encode(done))], {STATE: view.version})
    view = view_of(store.read(""))
    assert [item.number for item in view.history] == list(range(11, 61))
    assert len(view.specs) <= 52


def test_the_baton_is_handed_on(store: MemoryStore) -> None:
    with Conductor(store, "a", 60, good):
        until(lambda: view_of(store.read("")).conductor == "a", WAIT_S)
        with Conductor(store, "b", 60, good):
            assert view_of(store.read("")).conductor == "a"
    assert CONDUCTOR not in store.read("").entries


def test_orders_of_an_engine_go_with_it(store: MemoryStore, nodes: Nodes) -> None:
    verbs.apply(store, spec("1", 3, 3), "ann@x")
    carry_out(store, nodes, [conductor(store)])
    assert order_key("decode-2") in store.read("").entries
    verbs.apply(store, spec("1", 3, 2), "ann@x")
    carry_out(store, nodes, [conductor(store)])
    assert order_key("decode-2") not in store.read("").entries
    assert order_key("decode-1") in store.read("").entries
