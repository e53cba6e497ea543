# SPDX-License-Identifier: Apache-2.0
"""What the worker half tells the sender in the steps that go wrong."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from vllm.v1.worker import kv_connector_model_runner_mixin as mixin  # noqa: E402

from tidal_connector.config import TidalConfig  # noqa: E402
from tidal_connector.ids import EngineId  # noqa: E402
from tidal_connector.vllm_plugin.metadata import SendChunk, TidalMetadata  # noqa: E402
from tidal_connector.vllm_plugin.step_sends import StepSends  # noqa: E402
from tidal_connector.vllm_plugin.timeline import AfterDevice, AtOnce, Timeline  # noqa: E402
from tidal_connector.vllm_plugin.translate import EngineFacts  # noqa: E402
from tidal_connector.vllm_plugin.worker import TidalWorker  # noqa: E402

CHUNK = SendChunk("r", "xfer-1", 0, 40, (4, 8, 2), True, None)
LAYERS = {"model.layers.0.self_attn.attn": 0, "model.layers.1.self_attn.attn": 1}


class FakeSender:
    """Notes what it is told; nothing ever falls quiet."""

    def __init__(self) -> None:
        self.told: list[tuple[str, object]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.told.append((name, args[0]))

    def quiesce(self, requests: Sequence[str], timeout_s: float) -> bool:
        return False

    def outcomes(self) -> list[object]:
        return []

    def names(self) -> list[str]:
        return [name for name, _ in self.told]


@pytest.fixture
def worker() -> TidalWorker:
    facts = EngineFacts(EngineId("e"), TidalConfig(), True, False, False, 16, False)
    made = TidalWorker(None, facts)  # type: ignore[arg-type]
    made._sender = FakeSender()  # type: ignore[assignment]
    made._sends = sends(made, AtOnce())
    return made


def sends(worker: TidalWorker, timeline: Timeline, stall_s: float = 10.0) -> StepSends:
    return StepSends(worker._sender, LAYERS.values(), timeline, stall_s)  # type: ignore[arg-type]


def forward(worker: TidalWorker, monkeypatch: pytest.MonkeyPatch, *, broken: bool) -> FakeSender:
    """Let vLLM's own code run a step that saves layer 0, and then breaks or goes on."""
    from tidal_connector.vllm_plugin.connector import TidalConnector

    connector = object.__new__(TidalConnector)
    connector._worker, connector._scheduler = worker, None
    monkeypatch.setattr(mixin, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(mixin, "get_forward_context", lambda: None)
    step = SimpleNamespace(
        kv_connector_metadata=TidalMetadata(chunks=[CHUNK], scheduled=40),
        has_sync_kv_loads=False,
        finished_req_ids=set(),
    )
    run: Any = mixin.KVConnectorModelRunnerMixin._get_kv_connector_output
    with suppress(ZeroDivisionError), run(step):
        connector.save_kv_layer(next(iter(LAYERS)), None, None)  # type: ignore[arg-type]
        if broken:
            raise ZeroDivisionError
    sender: Any = worker._sender
    assert isinstance(sender, FakeSender)
    return sender


def test_a_step_announces_each_layer_once(worker: TidalWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = forward(worker, monkeypatch, broken=False)
    assert [what for name, what in sender.told if name == "ready_many"] == [(0,), (1,)]
    assert sender.names()[-1] == "prefill_done"


def test_layers_that_a_broken_forward_pass_never_wrote_are_not_announced(
    worker: TidalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM sweeps in a finally clause, and an engine that dies lives long enough to send what it is told is there."""
    sender = forward(worker, monkeypatch, broken=True)
    assert [what for name, what in sender.told if name == "ready_many"] == [(0,)]
    assert "prefill_done" not in sender.names()
    assert sender.told[-1] == ("give_up", "r")


def test_a_preemption_that_finds_no_quiet_does_not_count_as_the_end_of_the_request(worker: TidalWorker) -> None:
    worker.preempted(TidalMetadata(preempted=["r"]))
    sender: Any = worker._sender
    assert sender.told == [("unready", "r"), ("give_up", "r")]


def test_the_earlier_of_a_layer_s_two_hooks_announces_it(worker: TidalWorker) -> None:
    """vllm-ascend says that a layer is written before it attends, and that it is to be saved after."""
    from tidal_connector.vllm_plugin.connector import TidalConnector

    connector = object.__new__(TidalConnector)
    connector._worker, connector._scheduler = worker, None
    worker.bind(TidalMetadata(chunks=[CHUNK], scheduled=40))
    sender: Any = worker._sender
    name = next(iter(LAYERS))
    connector.on_kv_cache_written(name)
    assert sender.told[-1] == ("ready_many", (0,))
    before = len(sender.told)
    connector.save_kv_layer(name, None, None)  # type: ignore[arg-type]
    assert len(sender.told) == before


def test_a_preemption_comes_after_what_was_said_before_and_does_not_wait_for_a_device_that_hangs(
    worker: TidalWorker,
) -> None:
    passed = threading.Event()
    timeline = AfterDevice(lambda: SimpleNamespace(query=passed.is_set))
    worker._sends = sends(worker, timeline, stall_s=0.05)
    sender: Any = worker._sender
    sender.quiesce = lambda requests, timeout_s: True
    try:
        worker.bind(TidalMetadata(chunks=[CHUNK], scheduled=40))
        worker.layer_saved(next(iter(LAYERS)))
        worker.preempted(TidalMetadata(preempted=["r"]))
        # The rows may still be announced after this: the transfer must not live on.
        assert sender.names()[-2:] == ["unready", "give_up"]
        assert "ready_many" not in sender.names()
        passed.set()
        assert timeline.settle(10.0)
        sender.told.clear()
        worker.preempted(TidalMetadata(preempted=["r"]))
        assert sender.names() == ["unready"]
    finally:
        timeline.close()
