# SPDX-License-Identifier: Apache-2.0
"""How the engine and its pool treat Mooncake's answers, on a stand-in for the library."""

from __future__ import annotations

import os
import sys
import types

import pytest

from tidal_connector.config import Protocol
from tidal_connector.errors import TransferFailed
from tidal_connector.transfer.engines import EnginePool
from tidal_connector.transfer.mooncake import MooncakeEngine


class StandIn:
    """A TransferEngine that answers what its class attributes say."""

    initialized = 0
    registered = 0
    status = 1

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        assert metadata == "P2PHANDSHAKE"  # an unknown scheme would abort the process
        return self.initialized

    def get_rpc_port(self) -> int:
        return 15000

    def batch_register_memory(self, addresses: list[int], lengths: list[int], location: str) -> int:
        return self.registered

    def transfer_check_status(self, write: int) -> int:
        return self.status


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    kind = type("Fresh", (StandIn,), {})
    module = types.ModuleType("mooncake.engine")
    module.TransferEngine = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    return kind


def engine() -> MooncakeEngine:
    return MooncakeEngine("127.0.0.1", Protocol.TCP, "")


@pytest.mark.parametrize(("answer", "state"), [(1, 1), (0, 0), (-1, -1), (-2, 0)])
def test_a_timeout_is_not_an_end(library: type[StandIn], answer: int, state: int) -> None:
    library.status = answer
    assert engine().check(1) == state


def test_an_engine_that_did_not_start_is_an_error_with_its_code(library: type[StandIn]) -> None:
    library.initialized = -1
    with pytest.raises(TransferFailed, match=r"protocol tcp.*code -1"):
        engine()


def test_a_refused_registration_is_an_error_with_its_meaning(library: type[StandIn]) -> None:
    library.registered = -7
    with pytest.raises(TransferFailed, match=r"overlaps a registered range \(code -7\)"):
        engine().register(4096, 4096, "*")


def test_a_closed_engine_takes_no_call(library: type[StandIn]) -> None:
    closed = engine()
    closed.close()
    closed.close()
    with pytest.raises(TransferFailed, match="closed"):
        closed.check(1)


def test_a_forked_child_may_not_use_the_engine(library: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = engine()
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(TransferFailed, match="forked child"):
        inherited.check(1)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransferFailed, match="mooncake-transfer-engine"):
        engine()


def test_an_engine_is_never_given_twice_for_one_name(library: type[StandIn]) -> None:
    pool = EnginePool(engine, None)
    first = pool.take("a:1")
    pool.give(first)
    second = pool.take("a:1")
    assert second is not first
    assert pool.take("b:1") is first  # but it may serve another name


def test_a_dropped_engine_is_closed_and_gone(library: type[StandIn]) -> None:
    pool = EnginePool(engine, None)
    first = pool.take("a:1")
    assert pool.drop(first)
    assert not pool.drop(first)
    pool.give(first)
    assert pool.take("b:1") is not first
    with pytest.raises(TransferFailed, match="closed"):
        first.check(1)


def test_a_shared_engine_is_never_dropped(library: type[StandIn]) -> None:
    home = engine()
    pool = EnginePool(engine, home)
    assert pool.take("a:1") is home
    assert not pool.drop(home)
    assert home.check(1) == 1
