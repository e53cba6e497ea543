# SPDX-License-Identifier: Apache-2.0
"""Several ranks before vLLM's own code: how it unites what they report, and whose address the scheduler hands on."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

vllm = pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402

from tests.vllm_plugin.test_scheduler import PUSH_D, PUSH_P, blocks, output, request  # noqa: E402
from tidal_connector.config import ControlConfig, TidalConfig  # noqa: E402
from tidal_connector.errors import ConfigError  # noqa: E402
from tidal_connector.ids import EngineId, RequestId  # noqa: E402
from tidal_connector.vllm_plugin import ranks  # noqa: E402
from tidal_connector.vllm_plugin.connector import TidalConnector  # noqa: E402
from tidal_connector.vllm_plugin.metadata import Receive, TidalHandshake, TidalMetadata  # noqa: E402
from tidal_connector.vllm_plugin.scheduler import TidalScheduler  # noqa: E402
from tidal_connector.vllm_plugin.translate import EngineFacts  # noqa: E402
from tidal_connector.vllm_plugin.worker import TidalWorker  # noqa: E402


class Room:
    """Stands for the receiver or the sender of one rank."""

    def __init__(self) -> None:
        self.ended: list[Any] = []

    def outcomes(self) -> list[Any]:
        found, self.ended = self.ended, []
        return found

    def wait(self, timeout_s: float) -> bool:
        return bool(self.ended)

    def end(self, name: str, reason: str = "") -> None:
        self.ended.append(SimpleNamespace(request=RequestId(name), ok=not reason, reason=reason))


class Rank:
    """A worker half whose rooms are told what to report, and what vLLM makes of its poll."""

    def __init__(self) -> None:
        facts = EngineFacts(EngineId("e"), TidalConfig(), True, True, False, 16, False, ranks=2)
        self.worker = TidalWorker(None, facts)  # type: ignore[arg-type]
        self.sends, self.receives = Room(), Room()
        self.worker._sender, self.worker._receiver = self.sends, self.receives  # type: ignore[assignment]

    def expect(self, name: str, *pages: int) -> None:
        self.worker._receives[name] = Receive(name, "xfer-1", "p", "h:1", 0, 16 * len(pages), pages)

    def poll(self) -> Any:
        self.worker._step = TidalMetadata(scheduled=1)
        found = self.worker.poll()
        fields = {f.name for f in dataclasses.fields(KVConnectorOutput)}
        failed = {"failed_recving": found.failed} if "failed_recving" in fields else {}
        reported = KVConnectorOutput(
            finished_sending=found.sent or None,
            finished_recving=found.received or None,
            invalid_block_ids=found.failed_blocks,
            **failed,
        )
        empty = ModelRunnerOutput(req_ids=[], req_id_to_index={})
        return dataclasses.replace(empty, kv_connector_output=reported)


class Engine:
    """Two ranks below vLLM's aggregator, and the scheduler half above it."""

    def __init__(self) -> None:
        self.ranks = [Rank(), Rank()]
        self.aggregator = KVOutputAggregator(2)
        self.scheduler = TidalScheduler(TidalConfig(), EngineId("e"), 16, producer=True, consumer=True)

    def step(self) -> Any:
        united = self.aggregator.aggregate([rank.poll() for rank in self.ranks])
        assert united is not None
        self.scheduler.filter_output(united.kv_connector_output)
        return united.kv_connector_output


@pytest.fixture
def engine() -> Engine:
    return Engine()


def decoding(engine: Engine) -> None:
    engine.scheduler.blocks_allocated(request(PUSH_D, 50), blocks(7, 3, 9, 5), 49)
    for rank in engine.ranks:
        rank.expect("r", 7, 3, 9, 5)


def test_a_request_is_there_when_every_rank_has_its_rows(engine: Engine) -> None:
    decoding(engine)
    engine.ranks[1].receives.end("r")
    assert engine.step().finished_recving is None
    assert engine.scheduler.pending()
    engine.ranks[0].receives.end("r")
    heard = engine.step()
    assert heard.finished_recving == {"r"}
    assert not heard.invalid_block_ids
    assert engine.step().finished_recving is None
    assert not engine.scheduler.pending()


@pytest.mark.parametrize("first", [0, 1])
def test_what_one_rank_lacks_fails_the_request_once(engine: Engine, first: int) -> None:
    decoding(engine)
    engine.ranks[first].receives.end("r", "the link broke")
    heard = engine.step()
    assert heard.finished_recving is None
    assert heard.invalid_block_ids == {7, 3, 9, 5}
    engine.ranks[1 - first].receives.end("r")
    heard = engine.step()
    assert heard.finished_recving == {"r"}
    assert not heard.invalid_block_ids
    assert getattr(heard, "failed_recving", {"r"}) == {"r"}
    assert engine.step().finished_recving is None


def test_the_blocks_of_a_prompt_are_free_when_every_rank_has_sent_its_share(engine: Engine) -> None:
    sending = request(PUSH_P, 40)
    engine.scheduler.new_request(sending)
    engine.scheduler.build(output(new=(("r", (1, 2, 3), 0, 40),)))
    assert engine.scheduler.finished(sending, aborted=False)[0]
    engine.ranks[0].sends.end("r")
    assert engine.step().finished_sending is None
    engine.ranks[1].sends.end("r")
    assert engine.step().finished_sending == {"r"}
    assert engine.step().finished_sending is None


def test_the_scheduler_hands_the_address_of_rank_0_on() -> None:
    connector = object.__new__(TidalConnector)
    connector._scheduler = half = TidalScheduler(TidalConfig(), EngineId("e"), 16, producer=True, consumer=False)
    connector.set_xfer_handshake_metadata({1: TidalHandshake("h:7101", "b"), 0: TidalHandshake("h:7100", "a")})
    assert half._control == "h:7100"


def test_ranks_listen_side_by_side() -> None:
    assert ControlConfig().for_rank(3).bind == "127.0.0.1:0"
    fixed = ControlConfig(bind="0.0.0.0:7100", advertise="10.0.0.7:8100")
    assert fixed.for_rank(0) is fixed
    assert (fixed.for_rank(3).bind, fixed.for_rank(3).advertise) == ("0.0.0.0:7103", "10.0.0.7:8103")
    assert ControlConfig(bind="[::]:7100", advertise="fd00::7").for_rank(1).advertise == "fd00::7"
    with pytest.raises(ConfigError, match="port 65530 leaves no port for rank 7; choose one below 65528"):
        ControlConfig(bind="h:65530").for_rank(7)


def test_addresses_travel_between_ranks_to_the_byte() -> None:
    for text in ("10.0.0.7:7100", "[fd00::7]:65535"):
        assert ranks._unpacked(ranks._packed(text)) == text
    with pytest.raises(ConfigError, match="at most 512"):
        ranks._packed("h" * 600)
    assert (ranks.tensor_rank(1), ranks.exchange("h:1", 1)) == (0, ("h:1",))


def test_ranks_with_a_pool_each_are_refused_before_anything_is_opened() -> None:
    worker = Rank().worker
    worker._pool = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="tensor_parallel_size = 2 with a host pool for each rank"):
        worker.register({})


def test_the_name_that_rank_0_drew_counts_on_all_ranks_and_no_other_engine_draws_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len({ranks.drawn_name(1) for _ in range(8)}) == 8
    monkeypatch.setattr(ranks, "exchange", lambda mine, size: ("drawn by rank 0", mine))
    assert ranks.drawn_name(2) == "drawn by rank 0"
