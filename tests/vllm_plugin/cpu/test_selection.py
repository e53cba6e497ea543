# SPDX-License-Identifier: Apache-2.0
"""A decode engine in miniature: the real attention backend with the selection cache, beside the one without."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm_plugin.cpu import reference
from tests.vllm_plugin.cpu.batches import BLOCKS, batch
from tests.vllm_plugin.cpu.test_offload import specs
from tests.vllm_plugin.cpu.test_sparse_mla import make
from tidal_connector.config import PageKind, PoolConfig, SelectionConfig, TidalConfig
from tidal_connector.memory.region import open_region
from tidal_connector.metrics import Counters

pytestmark = pytest.mark.vllm

LAYERS, LEADERS, K, BLOCK_SIZE = 3, 1, 8, 16
LONGEST = 5 * BLOCK_SIZE


class Engine:
    """Attention of all layers, with latents in a pool and a selection cache; ``plain`` keeps them on the device."""

    def __init__(self, slots: int, prefetch: bool, requests: int = 4) -> None:
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs

        from tidal_connector.selection.budget import ModelCosts, divide_memory
        from tidal_connector.vllm_plugin.cpu.kv_allocation import allocate
        from tidal_connector.vllm_plugin.cpu.selection import EngineSelection

        found = specs(LAYERS, LEADERS, BLOCK_SIZE)
        uniform = UniformTypeKVCacheSpecs.from_specs(found)
        assert uniform is not None
        blocks = BLOCKS * 16
        caches = KVCacheConfig(blocks, [], [KVCacheGroupSpec(list(found), uniform)])
        config = TidalConfig(
            pool=PoolConfig(bytes=1 << 30, pages=PageKind.PLAIN),
            selection=SelectionConfig(slots=slots, prefetch=prefetch),
        )
        latent = sum(spec.page_size_bytes for name, spec in found.items() if name.endswith("attn.attn"))
        costs = ModelCosts(
            K, 1, requests, LONGEST, BLOCK_SIZE, latent, BLOCK_SIZE * 132 * LEADERS, latent // BLOCK_SIZE
        )
        plan = divide_memory(config, costs, 1 << 30)
        placement = allocate(caches, 1 << 30, lambda n: open_region(n, config.pool), plan.arena_rows)
        self.counters = Counters()
        self.pool = placement.pool
        self.selection = EngineSelection(config, plan, costs, placement, self.counters)
        self.names = placement.parts.latent
        self.indices = torch.full((256, K), -1, dtype=torch.int32)
        self.offloaded = [make("sparse", self.indices) for _ in self.names]
        self.plain = [make("sparse", self.indices) for _ in self.names]
        for impl, layer in zip(self.offloaded, self.selection.layers(self.names), strict=True):
            impl.offload(layer, self.counters)
        self.caches = [placement.kv_caches[name].squeeze(1) for name in self.names]
        self.device = [torch.zeros_like(cache) for cache in self.caches]
        self.draw = torch.Generator().manual_seed(11)

    def step(self, requests: dict[str, tuple[int, int]], *, new: bool = False, gone: tuple[str, ...] = ()) -> Any:
        """Run one forward pass over requests (query tokens, context); compare all layers with the plain engine."""
        from vllm.forward_context import override_forward_context

        cached = SimpleNamespace(resumed_req_ids=set())
        self.selection.begin(
            SimpleNamespace(  # type: ignore[arg-type]
                finished_req_ids=set(gone),
                preempted_req_ids=None,
                scheduled_cached_reqs=cached,
                scheduled_new_reqs=["new"] if new else [],
                kv_connector_metadata=None,
            )
        )
        self.selection.batch(list(requests), 0)
        owners = [ord(name) - ord("a") for name in requests]
        step = batch(list(requests.values()), BLOCK_SIZE, owners=owners, longest=LONGEST)
        count = step.num_actual_tokens
        context = SimpleNamespace(attn_metadata=dict.fromkeys(self.names, step))
        with override_forward_context(context):  # type: ignore[arg-type]
            for layer in range(LAYERS):
                if layer < LEADERS:
                    self.choose(step)
                query = torch.randn(count, reference.HEADS, reference.WIDTH, generator=self.draw)
                rows = torch.randn(count, reference.WIDTH, generator=self.draw)
                outputs = []
                for impl, cache in (
                    (self.offloaded[layer], self.caches[layer]),
                    (self.plain[layer], self.device[layer]),
                ):
                    impl.record_logical_topk_ready()
                    latents, rope = rows[:, : reference.VALUES], rows[:, None, reference.VALUES :]
                    impl.do_kv_cache_update(latents, rope, cache, step.slot_mapping, "auto", torch.ones(1))
                    outputs.append(impl.forward_mqa(query, cache, step, None)[0])
                torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
            passed = self.selection.divide(context.attn_metadata, step)
        self.selection.end()
        self.selection.cache.check()
        return passed

    def choose(self, step: Any) -> None:
        self.indices.fill_(-1)
        for token, position in enumerate(step.positions.tolist()):
            chosen = torch.randperm(position + 1, generator=self.draw)[:K].sort().values.int()
            self.indices[token, : len(chosen)] = chosen

    def assert_pool_is_whole(self) -> None:
        """Every row is in the pool, as the engine without one keeps it."""
        self.selection.writeback.settle()
        for layer in range(LAYERS):
            torch.testing.assert_close(self.caches[layer], self.device[layer], rtol=0, atol=0)

    def close(self) -> None:
        self.selection.close()
        self.caches.clear()
        del self.selection, self.offloaded
        with self.pool:
            pass


@pytest.fixture(params=[(K, True), (2 * K, True), (2 * K, False)], ids=["k", "2k", "no prefetch"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(*request.param)
    yield made
    made.close()


def test_decoding_equals_the_engine_that_keeps_all_on_the_device(engine: Engine) -> None:
    lengths = {"a": 66, "b": 3, "c": 30}
    engine.step({name: (n, n) for name, n in lengths.items()}, new=True)
    for step in range(1, 13):
        passed = engine.step({name: (1, n + step) for name, n in lengths.items()})
        assert passed.staged
        assert passed.others == []
    counted = engine.counters.snapshot()
    assert min(counted["selection_hits"], counted["selection_misses"]) > 0
    assert counted["bytes_written_back"] == 12 * 3 * LAYERS * 2304
    engine.assert_pool_is_whole()


def test_prefill_reads_the_pool_beside_requests_that_decode(engine: Engine) -> None:
    engine.step({"a": (40, 40), "b": (70, 70)}, new=True)
    engine.step({"a": (1, 41), "b": (1, 71)})
    passed = engine.step({"a": (1, 42), "c": (21, 66), "b": (1, 72)}, new=True)
    assert passed.seated.requests == ("a", "b")
    assert [[span.row for span in run] for run in passed.others] == [[1]]
    assert passed.tokens.tolist() == [0, 22]
    assert not passed.staged  # c may read in this step what a and b write in it
    engine.assert_pool_is_whole()


def test_a_request_that_comes_back_under_the_same_name_starts_anew(engine: Engine) -> None:
    engine.step({"a": (70, 70)}, new=True)
    engine.step({"a": (1, 71)})
    before = engine.counters.snapshot()["selection_misses"]
    engine.step({"a": (33, 33)}, new=True, gone=("a",))
    engine.step({"a": (1, 34)})
    assert engine.counters.snapshot()["selection_misses"] > before
    engine.assert_pool_is_whole()


def test_a_request_that_prefills_again_gives_its_seat_up(engine: Engine) -> None:
    engine.step({"a": (70, 70)}, new=True)
    engine.step({"a": (1, 71)})
    assert list(engine.selection.cache.book.seated()) == ["a"]
    engine.step({"a": (20, 71)})  # as after a rejected or recomputed part
    assert list(engine.selection.cache.book.seated()) == []
    engine.step({"a": (1, 72)})
    engine.assert_pool_is_whole()


def test_requests_without_a_seat_are_served_all_the_same() -> None:
    engine = Engine(2 * K, prefetch=True, requests=1)
    try:
        engine.step({"a": (70, 70), "b": (60, 60)}, new=True)
        for step in range(1, 4):
            passed = engine.step({"a": (1, 70 + step), "b": (1, 60 + step)})
            assert passed.seated.requests == ("a",)
        assert engine.counters.snapshot()["selection_without_slots"] == 3
        engine.assert_pool_is_whole()
    finally:
        engine.close()
