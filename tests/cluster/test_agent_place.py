# SPDX-License-Identifier: Apache-2.0
"""One node has one agent: a second one touches no engine, and gives up with the name of the first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.standins import until
from tidal_connector.cluster import agent_engine
from tidal_connector.cluster import rollout as verbs
from tidal_connector.cluster.agent import Agent
from tidal_connector.cluster.agent_folder import AgentFolder, Record
from tidal_connector.cluster.agent_place import AgentPlace
from tidal_connector.cluster.agent_settings import AgentConfig, check_agent_config
from tidal_connector.cluster.conductor import Conductor
from tidal_connector.cluster.rollout_records import AGENTS
from tidal_connector.cluster.spec import build_spec
from tidal_connector.errors import ConfigError
from tidal_connector.registry.memory import MemoryStore
from tidal_connector.registry.settings import RegistryConfig

WAIT_S = 10.0
TTL_S = 4.0


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore() as found:
        yield found


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    registry = RegistryConfig(url=f"file://{tmp_path}/reg", ttl_s=TTL_S)
    return check_agent_config(AgentConfig(registry=registry, node="n"), "test")


def test_a_second_agent_waits_names_the_first_and_gives_up(store: MemoryStore, config: AgentConfig) -> None:
    now = [0.0]
    with AgentPlace(config, store) as first:
        until(first.ours, WAIT_S)
        with AgentPlace(config, store, lambda: now[0]) as second:
            until(lambda: second._other is not None, WAIT_S)
            assert not second.ours()
            now[0] = 2 * TTL_S  # a dead agent's entry may last for so long
            assert not second.ours()
            now[0] = 2 * TTL_S + 3.0
            with pytest.raises(ConfigError, match=r"node = 'n': process \d+ on .* is this node's agent already; give"):
                second.ours()
        assert first.ours()


def test_the_next_agent_takes_the_place_of_one_that_ended(store: MemoryStore, config: AgentConfig) -> None:
    with AgentPlace(config, store) as second, AgentPlace(config, store) as first:
        until(lambda: first.ours() or second.ours(), WAIT_S)
        assert first.ours() != second.ours()
        winner, waiting = (first, second) if first.ours() else (second, first)
        winner.__exit__(None, None, None)
        until(waiting.ours, WAIT_S)


def test_an_agent_whose_place_was_taken_meanwhile_stops_acting(store: MemoryStore, config: AgentConfig) -> None:
    """It was cut off for longer than its lease, and another agent of the node was started."""
    with AgentPlace(config, store) as place:
        until(place.ours, WAIT_S)
        store.room.overwrite(AGENTS + "n", b"{}")
        until(lambda: not place.ours(), WAIT_S)


def test_no_engine_is_started_or_adopted_before_the_place_is_held(
    store: MemoryStore, config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_engine.EngineKeeper, "step", lambda *_: pytest.fail("an engine was touched"))
    group = {"nodes": ["n"], "model": "m", "count": 2}
    verbs.apply(
        store, build_spec({"group": [{"role": "prefill", **group}, {"role": "decode", **group}]}, "test"), "ann@x"
    )
    while Conductor(store, "n", 60).tick():
        pass
    with AgentPlace(config, store) as first, AgentFolder(tmp_path / "other") as folder:
        until(first.ours, WAIT_S)
        folder.keep(Record(engine="decode-0", revision="r", attempt=1, file="f"))
        with Agent(config, store, folder) as second:
            until(lambda: len(second._heard) == 2, WAIT_S)
            second.tick()
            assert not second._engines
            given_up = threading.Event()
            threading.Timer(0.3, given_up.set).start()
            second.await_place(given_up)
            assert given_up.is_set()
