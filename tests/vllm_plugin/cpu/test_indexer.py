# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm_plugin.cpu import reference
from tests.vllm_plugin.cpu.batches import batch, empty_cache
from tidal_connector.vllm_plugin.cpu import fp8_rows

pytestmark = pytest.mark.vllm

PREFIX = "model.layers.0.self_attn.indexer.k_cache"


def layer(cache: torch.Tensor, tokens: int, k: int) -> Any:
    return SimpleNamespace(
        topk_indices_buffer=torch.full((tokens, k), 5, dtype=torch.int32),
        k_cache=SimpleNamespace(prefix=PREFIX, kv_cache=cache),
        topk_tokens=k,
        skip_k_cache_insert=False,
        use_pcp=False,
        dcp_world_size=1,
    )


def run(step: Any, cache: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, k: int) -> Any:
    from vllm.config import VllmConfig
    from vllm.forward_context import set_forward_context

    from tidal_connector.vllm_plugin.cpu.indexer import forward_indexer

    own = layer(cache, step.num_actual_tokens + 4, k)
    with set_forward_context({PREFIX: step}, VllmConfig()):
        return forward_indexer(own, torch.zeros(query.shape[0], 8), query, keys, weights)


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("k", [64, 100])
@pytest.mark.parametrize("requests", [[(1, 50)], [(1, 301)], [(129, 129)], [(1, 70), (90, 333), (3, 3), (1, 65)]])
def test_selection_equals_the_definition(requests: list[tuple[int, int]], k: int, block_size: int) -> None:
    step = batch(requests, block_size)
    draw = torch.Generator().manual_seed(11)
    cache = empty_cache(block_size, fp8_rows.ROW_BYTES, torch.uint8)
    rows = cache.view(-1, fp8_rows.ROW_BYTES)
    keys = torch.randn(step.num_actual_tokens, 128, generator=draw)
    for span in step.spans:
        rows[step.context_slots(span)] = fp8_rows.pack(torch.randn(span.length, 128, generator=draw))
    query, _ = fp8_rows.quantise(torch.randn(step.num_actual_tokens * 4, 128, generator=draw))
    query = query.view(-1, 4, 128)
    weights = torch.randn(step.num_actual_tokens, 4, generator=draw)
    chosen = run(step, cache, query, keys, weights, k)
    for span in step.spans:
        written = fp8_rows.unpack(rows[step.context_slots(span)])
        torch.testing.assert_close(
            written[span.length - (span.stop - span.start) :],
            fp8_rows.unpack(fp8_rows.pack(keys[span.start : span.stop])),
        )
        for token in range(span.start, span.stop):
            visible = written[: int(step.positions[token]) + 1]
            scores = reference.index_scores(query[token].float(), weights[token], visible)
            expected = reference.best(scores, k)
            assert chosen[token].tolist() == expected + [-1] * (k - len(expected))


def test_equal_scores_are_resolved_alike_whatever_the_chunks() -> None:
    draw = torch.Generator().manual_seed(2)
    keys = torch.randn(6, 128, generator=draw)[torch.randint(0, 6, (300,), generator=draw)]
    query, _ = fp8_rows.quantise(torch.randn(300 * 4, 128, generator=draw))
    query, weights = query.view(-1, 4, 128), torch.rand(300, 4, generator=draw)
    chosen = []
    for chunk in (300, 7, 64):
        cache = empty_cache(16, fp8_rows.ROW_BYTES, torch.uint8)
        parts = []
        for start in range(0, 300, chunk):
            stop = min(300, start + chunk)
            step = batch([(stop - start, stop)], 16)
            # The table is redrawn for each length; one block per position keeps the rows in place.
            step.block_table = torch.arange(19, dtype=torch.int32).unsqueeze(0)
            step.slot_mapping = torch.arange(start, stop)
            part = run(step, cache, query[start:stop], keys[start:stop], weights[start:stop], 64)
            parts.append(part[: stop - start].clone())
        chosen.append(torch.cat(parts))
    assert torch.equal(chosen[0], chosen[1])
    assert torch.equal(chosen[0], chosen[2])


def test_padding_writes_nothing_and_selects_nothing() -> None:
    step = batch([(2, 20)], block_size=16, padding=3)
    cache = empty_cache(16, fp8_rows.ROW_BYTES, torch.uint8)
    query, _ = fp8_rows.quantise(torch.randn(5 * 4, 128))
    before = cache.clone()
    chosen = run(step, cache, query.view(5, 4, 128), torch.randn(5, 128), torch.rand(5, 4), 64)
    changed = (cache != before).any(dim=-1).view(-1).nonzero().squeeze(1)
    assert set(changed.tolist()) <= set(step.slot_mapping[:2].tolist())
    assert bool((chosen[2:5] == -1).all())


def test_a_dummy_run_returns_the_buffer_untouched() -> None:
    from vllm.config import VllmConfig
    from vllm.forward_context import set_forward_context

    from tidal_connector.vllm_plugin.cpu.indexer import forward_indexer

    own = layer(torch.tensor([]), 4, 64)
    with set_forward_context(None, VllmConfig()):
        found = forward_indexer(own, torch.zeros(2, 8), torch.zeros(2, 4, 128), torch.zeros(2, 128), torch.zeros(2, 4))
    assert found is own.topk_indices_buffer
    assert bool((found == 5).all())
