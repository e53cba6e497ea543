# SPDX-License-Identifier: Apache-2.0
"""The model runner with latents in the pool: vllm-ascend's own code shapes and binds the caches, its layers attend."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, UniformTypeKVCacheSpecs
from vllm_ascend.attention.attention_v1 import AscendAttentionState
from vllm_ascend.attention.sfa_v1 import AscendSFABackend, AscendSFAImpl
from vllm_ascend.platform import NPUPlatform
from vllm_ascend.worker import worker as stock_worker
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

from tests.vllm_plugin.ascend.bed.case import Bed, Case, bed
from tests.vllm_plugin.ascend.bed.world import BLOCK, LATENT, ROPE
from tests.vllm_plugin.ascend.in_bed.test_selection import CLOSE, worst
from tests.vllm_plugin.ascend.patched import self_attention, specs
from tidal_connector.config import TidalConfig
from tidal_connector.errors import ConfigError
from tidal_connector.ids import EngineId
from tidal_connector.layout import Home
from tidal_connector.vllm_plugin.ascend import model_runner, worker
from tidal_connector.vllm_plugin.ascend.backend import TidalSFAImpl
from tidal_connector.vllm_plugin.ascend.model_runner import TidalNpuModelRunner
from tidal_connector.vllm_plugin.connector import TidalConnector
from tidal_connector.vllm_plugin.translate import EngineFacts, place_caches, storages
from tidal_connector.vllm_plugin.worker import TidalWorker

CASE = Case(contexts=(300, 150), steps=2, layers=("own", "shared"), dtype=torch.bfloat16)
TRANSFER = SimpleNamespace(
    kv_connector="TidalConnector",
    kv_role="kv_consumer",
    kv_connector_extra_config={"pool": {"bytes": 1 << 30, "pages": "plain"}, "selection": {"slots": 2048}},
    is_kv_producer=False,
    is_kv_consumer=True,
)
ENGINE_BYTES = 1 << 27


def cache_config(layers: tuple[str, ...], blocks: int) -> KVCacheConfig:
    """Return what vLLM makes of the layers' specs."""
    found = specs(layers, CASE.dtype)
    uniform = UniformTypeKVCacheSpecs.from_specs(found)
    assert uniform is not None
    tensors = [KVCacheTensor(size=blocks * spec.page_size_bytes, shared_by=[name]) for name, spec in found.items()]
    return KVCacheConfig(blocks, tensors, [KVCacheGroupSpec(list(found), uniform)])


def runner_of(config: Any, caches: KVCacheConfig) -> TidalNpuModelRunner:
    """Return a runner with as much of an engine as its caches need."""
    made = object.__new__(TidalNpuModelRunner)
    uniform: Any = caches.kv_cache_groups[0].kv_cache_spec
    group = SimpleNamespace(backend=AscendSFABackend, kv_cache_spec=uniform, layer_names=list(uniform.kv_cache_specs))
    vars(made).update(
        vllm_config=config,
        model_config=config.model_config,
        compilation_config=config.compilation_config,
        device=torch.device("cpu"),
        use_sparse=True,
        use_compress=False,
        use_hybrid_blocks=False,
        enable_hamming_sparse=False,
        runner_only_attn_layers=set(),
        shared_kv_cache_layers={},
        kv_caches=[],
        drafter=None,
        speculative_config=None,
        uniform_decode_query_len=1,
        tidal_memory=None,
        tidal_placement=None,
        tidal_selection=None,
        _tidal_counts=None,
        _kv_cache_spec_attn_group_iterator=lambda: iter([group]),
        _get_attention_kv_cache_dims=lambda name, spec: (LATENT, ROPE),
        get_kv_cache_spec=lambda: specs(CASE.layers, CASE.dtype),
    )
    return made


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[TidalConnector]:
    """Install a connector that registers nothing, and end it with its pool."""
    facts = EngineFacts(EngineId("e"), TidalConfig(), False, True, True, BLOCK, False)
    made = object.__new__(TidalConnector)
    made._worker, made._scheduler = TidalWorker(None, facts), None  # type: ignore[arg-type]
    monkeypatch.setattr(model_runner, "get_kv_transfer_group", lambda: made)
    yield made
    made.shutdown()


def divided(runner: TidalNpuModelRunner, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let our worker divide the memory, and return what it tells vLLM."""
    monkeypatch.setattr(stock_worker.NPUWorker, "determine_available_memory", lambda self: ENGINE_BYTES)
    made = object.__new__(worker.TidalNpuWorker)
    vars(made).update(
        vllm_config=runner.vllm_config, model_runner=runner, parallel_config=runner.vllm_config.parallel_config
    )
    return made.determine_available_memory()


def test_caches_that_the_runner_makes_serve_a_decode_from_the_selection_cache(
    connector: TidalConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bed(CASE, TidalSFAImpl, kv_transfer=TRANSFER) as opened:
        forward = opened.config.compilation_config.static_forward_context
        for name, layer in zip(opened.names, opened.layers, strict=True):
            forward[name] = SimpleNamespace(impl=layer, prefill_backend=None)
        runner = runner_of(opened.config, cache_config(CASE.layers, opened.blocks))
        told = divided(runner, monkeypatch)
        assert runner.tidal_memory is not None
        page = 2 * BLOCK * 1152 + BLOCK * 256
        assert told == runner.tidal_memory.blocks.blocks * page
        caches = runner.initialize_kv_cache_tensors(cache_config(CASE.layers, opened.blocks))
        check_placement(runner, caches, connector)
        opened.caches = [caches[name] for name in opened.names]
        ours = decoded(opened, runner, monkeypatch)
        counted = connector.worker.counters.snapshot()
        assert counted["selection_misses"] >= 300 + 150
        assert counted["selection_hits"] >= 300 + 150
        assert counted["pool_pages_used"] == 5
        assert counted["selection_slots_used"] == 2 * runner.tidal_memory.base_rows
        assert counted["rows_gathered"] == 2 * counted["selection_misses"]
        opened.caches.clear()
        del caches
    with bed(CASE, AscendSFAImpl) as stock:
        stock.prefill()
        for _ in range(CASE.steps):
            stock.decode()
        assert worst(ours, stock.run) < 4 * CLOSE  # eight bits of mantissa


def check_placement(runner: TidalNpuModelRunner, caches: dict[str, Any], connector: TidalConnector) -> None:
    """See that latents are in the pool, index keys are not, and that the connector knows where."""
    placement = runner.tidal_placement
    assert placement is not None
    region = placement.pool.region
    inside = range(region.address, region.address + region.length)
    for at, kind in enumerate(CASE.layers):
        parts = caches[self_attention(at)]
        assert [tuple(part.shape[1:]) for part in parts] == [(BLOCK, 1, LATENT), (BLOCK, 1, ROPE), (BLOCK, 1, 128)][
            : 3 if kind == "own" else 2
        ]
        assert [part.data_ptr() in inside for part in parts] == [True, True, False][: len(parts)]
        assert tuple(part.data_ptr() for part in parts[:2]) == placement.addresses[self_attention(at)]
    worker_half = connector.worker
    placed = place_caches(caches, worker_half._host_layers, worker_half._host_addresses)
    assert [region.home for _, region in placed] == [Home.HOST, Home.HOST, Home.DEVICE, Home.HOST, Home.HOST]
    assert len(storages(caches, worker_half._host_layers)) == 1


def decoded(opened: Bed, runner: TidalNpuModelRunner, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the case as the runner would: each pass is prepared after its metadata is built."""
    monkeypatch.setattr(NPUModelRunner, "_build_attention_metadata", lambda self, *given, **named: "built")

    def step(batch: list[tuple[int, int]], state: AscendAttentionState) -> None:

        queries = np.array([tokens for _, tokens in batch])
        computed = np.array([opened.lengths[request] for request, _ in batch])
        names = [f"request-{request}" for request, _ in batch]
        table = SimpleNamespace(num_blocks_per_row=np.array([3, 2]))
        runner.input_batch = SimpleNamespace(req_ids=names, num_computed_tokens_cpu=computed, block_table=[table])
        built = runner._build_attention_metadata(
            num_tokens=int(queries.sum()),
            num_reqs=len(batch),
            max_query_len=int(queries.max()),
            num_reqs_padded=None,
            num_scheduled_tokens=dict(zip(names, queries.tolist(), strict=True)),
            num_scheduled_tokens_np=queries,
        )
        assert built == "built"
        assert runner.tidal_selection is not None
        assert runner.tidal_selection.seated is (state is AscendAttentionState.DecodeOnly)
        opened.step(batch, state)

    step([(0, 300)], AscendAttentionState.PrefillNoCache)
    step([(1, 150)], AscendAttentionState.PrefillNoCache)
    for _ in range(CASE.steps):
        step([(0, 1), (1, 1)], AscendAttentionState.DecodeOnly)
    # A dummy run has no requests; it collects the counts of the last step, too.
    runner._build_attention_metadata(2, 2, 1, num_reqs_padded=2, for_cudagraph_capture=True)
    assert runner.tidal_selection is not None
    assert runner.tidal_selection.seated
    return opened.run


@pytest.mark.parametrize("second_runner", [False, True])
def test_our_worker_builds_our_runner_with_the_stock_code(second_runner: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def init_device(self: Any) -> None:
        self.device = torch.device("cpu")
        built.append(stock_worker.NPUModelRunner)

    monkeypatch.setattr(stock_worker.NPUWorker, "init_device", init_device)
    monkeypatch.setattr(NPUPlatform, "get_attn_backend_cls", vars(NPUPlatform)["get_attn_backend_cls"])
    made = object.__new__(worker.TidalNpuWorker)
    model = SimpleNamespace(hf_config=SimpleNamespace(index_topk=2048), model="m")
    vars(made).update(
        vllm_config=SimpleNamespace(kv_transfer_config=TRANSFER, model_config=model), use_v2_model_runner=second_runner
    )
    if second_runner:
        with pytest.raises(ConfigError, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
            made.init_device()
        return
    made.init_device()
    assert built == [TidalNpuModelRunner]
    assert stock_worker.NPUModelRunner is NPUModelRunner
    chosen = NPUPlatform.get_attn_backend_cls(None, SimpleNamespace(use_mla=True, use_sparse=True))
    assert chosen.endswith("TidalSFABackend")
