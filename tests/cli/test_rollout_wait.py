# SPDX-License-Identifier: Apache-2.0
"""``tidal rollout --wait`` says what changes, how long it waits, and how it ended, by exit status and in words."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tidal_connector.cli import rollout_wait
from tidal_connector.cli.main import app
from tidal_connector.cli.rollout_wait import Changes, wait_for
from tidal_connector.cluster import rollout as verbs
from tidal_connector.cluster.agent_settings import to_toml
from tidal_connector.cluster.conductor import Conductor
from tidal_connector.cluster.orders import AWAITS_ADMISSION
from tidal_connector.cluster.rollout_records import (
    AGENTS,
    STATE,
    AgentEntry,
    Kind,
    Rollout,
    Status,
    encode,
    state_changes,
)
from tidal_connector.cluster.rollout_status import EngineStatus, RolloutStatus
from tidal_connector.cluster.spec import ClusterSpec, build_spec, revision_id
from tidal_connector.registry.base import Store
from tidal_connector.registry.settings import RegistryConfig, open_store


def spec(tag: str) -> ClusterSpec:
    group = {"nodes": ["n"], "model": "m", "count": 2, "environment": {"TAG": tag}}
    return build_spec({"group": [{"role": "prefill", **group}, {"role": "decode", **group}]}, "test")


@pytest.fixture
def registry(tmp_path: Path) -> RegistryConfig:
    return RegistryConfig(url=f"file://{tmp_path}/registry")


@pytest.fixture
def store(registry: RegistryConfig, tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "registry").mkdir()
    with open_store(registry) as found:
        hold = found.hold(AGENTS + "n", encode(AgentEntry()), 60)
        assert hold.wait(5)
        yield found


def end(store: Store, status: Status, reason: str = "") -> None:
    view = verbs.read_view(store)
    assert view.rollout is not None
    ended = msgspec.structs.replace(view.rollout, status=status, reason=reason)
    store.write(state_changes(ended), {STATE: view.version})


def tidal(registry: RegistryConfig, *words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["rollout", *words, "--registry", registry.url], env={"COLUMNS": "200"})
    return found.exit_code, found.stderr


def test_every_change_is_a_line_with_its_seconds(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    looks = []

    def pass_time(seconds: float) -> None:
        now[0] += 4.0
        looks.append(now[0])
        if len(looks) == 2:
            Conductor(store, "n", 60).tick()
        if len(looks) == 3:
            verbs.pause(store, "bob@y")
        if len(looks) == 12:
            end(store, Status.HALTED, "decode-0: no memory")

    monkeypatch.setattr(rollout_wait, "time", SimpleNamespace(sleep=pass_time))
    begun = verbs.apply(store, spec("1"), "ann@x")
    said = io.StringIO()
    found = wait_for(store, begun.number, 1000.0, Console(file=said, width=200), lambda: now[0])
    assert found.rollout.status is Status.HALTED
    revision = revision_id(spec("1"))
    lines = [line.rstrip() for line in said.getvalue().splitlines() if line.strip()]
    assert lines == [
        f"[   0 s] rollout 1 to {revision} is running",
        *(f"[   8 s] {name}-{n} on n, revision {revision}: starting" for name in ("decode", "prefill") for n in (0, 1)),
        f"[  12 s] rollout 1 to {revision} is paused: paused by bob@y",
        "[  28 s] waits for decode-0 (starting), decode-1 (starting), prefill-0 (starting), prefill-1 (starting)",
        "[  44 s] waits for decode-0 (starting), decode-1 (starting), prefill-0 (starting), prefill-1 (starting)",
        f"[  48 s] rollout 1 to {revision} is halted: decode-0: no memory",
    ]


def test_an_engine_that_was_just_let_in_is_not_called_lost_and_the_end_comes_last() -> None:
    engine = EngineStatus(
        **{"engine": "decode-0", "role": "decode", "node": "n", "agent": True, "revision": "r", "new": True},
        **{"phase": "lost", "state": "starting", "layout": "l", "restarts": 0, "note": AWAITS_ADMISSION},
    )
    rollout = Rollout(number=1, token="t", kind=Kind.APPLY, revision="r", status=Status.DONE)
    found = RolloutStatus(rollout=rollout, summary="", replaced=0, wanted=1, conductor="n", engines=(engine,))
    assert list(Changes().since_last(found)) == ["decode-0 on n, revision r: let in", "rollout 1 to r is done"]


def test_time_that_is_over_is_said_and_is_another_exit_status_than_a_halt(
    store: Store, registry: RegistryConfig, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(to_toml(msgspec.to_builtins(spec("1"))), encoding="utf-8")
    status, said = tidal(registry, "apply", str(file), "--wait", "--timeout", "0")
    assert status == 3
    assert "tidal: rollout 1 is still running after 0 s, and goes on without this command; look again with" in said
    end(store, Status.HALTED)
    assert tidal(registry, "status", "--wait")[0] == 1
    end(store, Status.DONE)
    assert tidal(registry, "status", "--wait")[0] == 0
    status, said = tidal(registry, "apply", str(file), "--wait", "--timeout", "-5")
    assert status == 2
    assert "greater than or equal to 0" in said


def test_a_rollout_that_was_replaced_while_it_was_waited_for_is_no_success(
    store: Store, registry: RegistryConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tag in ("1", "2"):
        verbs.apply(store, spec(tag), "ann@x")
        end(store, Status.DONE)
    verbs.apply(store, spec("3"), "ann@x")

    def undone(seconds: float) -> None:
        verbs.undo(store, "bob@y")
        end(store, Status.DONE)

    monkeypatch.setattr(rollout_wait, "time", SimpleNamespace(sleep=undone))
    status, said = tidal(registry, "status", "--wait")
    assert status == 1
    assert f"rollout 3 was replaced by rollout 4, undo of {revision_id(spec('2'))} by bob@y" in said


def test_an_undo_to_what_was_never_reached_is_warned_of(store: Store, registry: RegistryConfig) -> None:
    verbs.apply(store, spec("1"), "ann@x")
    end(store, Status.DONE)
    verbs.apply(store, spec("2"), "ann@x")
    end(store, Status.HALTED, "decode-0: no memory")
    bad = revision_id(spec("2"))
    status, said = tidal(registry, "undo", "--to", bad)
    assert status == 0
    assert f"warning: revision {bad} was never reached; rollout 2 to it was halted: decode-0: no memory" in said
    status, said = tidal(registry, "undo")
    assert (status, said) == (0, "")
