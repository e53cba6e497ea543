# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.vllm_plugin.cpu import reference
from tests.vllm_plugin.cpu.batches import batch, empty_cache

pytestmark = pytest.mark.vllm

SCALE = 0.05
K = 64


def make(kind: str, buffer: torch.Tensor | None = None, indexer: object | None = None) -> Any:
    from tidal_connector.vllm_plugin.cpu.sparse_mla import TidalDenseMLAImpl, TidalSparseMLAImpl

    cls = TidalSparseMLAImpl if kind == "sparse" else TidalDenseMLAImpl
    return cls(
        reference.HEADS,
        reference.WIDTH,
        SCALE,
        1,
        None,
        None,
        "auto",
        None,
        "decoder",
        None,
        kv_lora_rank=reference.VALUES,
        indexer=indexer,
        topk_indices_buffer=buffer,
    )


def filled(step: Any, block_size: int, dtype: torch.dtype) -> torch.Tensor:
    cache = empty_cache(block_size, reference.WIDTH, dtype)
    draw = torch.Generator().manual_seed(5)
    for span in step.spans:
        rows = torch.randn(span.length, reference.WIDTH, generator=draw)
        cache.view(-1, reference.WIDTH)[step.context_slots(span)] = rows.to(dtype)
    return cache


def selection(step: Any, k: int) -> torch.Tensor:
    buffer = torch.full((step.num_actual_tokens + 9, 2 * K), -1, dtype=torch.int32)
    for token, position in enumerate(step.positions.tolist()):
        order = torch.randperm(position + 1, generator=torch.Generator().manual_seed(token))
        chosen = order[:k].sort().values.int()
        buffer[token, : len(chosen)] = chosen
    return buffer


REQUESTS = [
    [(1, 1)],
    [(1, 300)],
    [(33, 33)],
    [(40, 290)],
    [(1, 17), (20, 150), (1, 301), (70, 77), (1, 64)],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("requests", REQUESTS)
def test_sparse_attention_reads_exactly_the_selection(
    requests: list[tuple[int, int]], block_size: int, dtype: torch.dtype
) -> None:
    step = batch(requests, block_size)
    cache = filled(step, block_size, dtype)
    buffer = selection(step, K)
    query = torch.randn(step.num_actual_tokens, reference.HEADS, reference.WIDTH).to(dtype)
    parts = (query[..., : reference.VALUES], query[..., reference.VALUES :])
    output, lse = make("sparse", buffer).forward_mqa(parts, cache, step, None)
    assert lse is None
    assert output.dtype == dtype
    slots = torch.from_numpy(step.wanted(buffer[: step.num_actual_tokens], slice(None)))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for token in range(step.num_actual_tokens):
        rows = cache.view(-1, reference.WIDTH)[slots[token][slots[token] >= 0]]
        expected = reference.attend(query[token], rows, SCALE)
        torch.testing.assert_close(output[token].double(), expected, rtol=tolerance, atol=tolerance)


def test_a_step_without_requests_gives_zeros() -> None:
    step = batch([(0, 5)], 16, padding=2)
    assert step.spans == ()
    cache, buffer = empty_cache(16, reference.WIDTH, torch.float32), torch.full((9, K), -1, dtype=torch.int32)
    output, _ = make("sparse", buffer).forward_mqa(torch.randn(2, reference.HEADS, reference.WIDTH), cache, step, None)
    assert output.shape == (2, reference.HEADS, reference.VALUES)
    assert not output.any()


def test_a_small_buffer_changes_nothing_but_what_is_gathered() -> None:
    from tidal_connector.metrics import Counters
    from tidal_connector.vllm_plugin.cpu.gather import RowBuffer

    step = batch(REQUESTS[-1], 16)
    cache, buffer = filled(step, 16, torch.float32), selection(step, K)
    query = torch.randn(step.num_actual_tokens, reference.HEADS, reference.WIDTH)
    outputs, gathered = [], []
    for capacity in (10_000, 2 * K, K):
        counters, impl = Counters(), make("sparse", buffer)
        impl.offload(None, counters)
        step.buffer = RowBuffer(size=capacity * reference.WIDTH * 4)
        outputs.append(impl.forward_mqa(query, cache, step, None)[0])
        gathered.append(counters.snapshot())
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-5, atol=1e-5)
    wanted = step.wanted(buffer[: step.num_actual_tokens], slice(None))
    assert gathered[0]["rows_gathered"] == len(set(wanted[wanted >= 0].tolist()))
    assert gathered[2]["rows_gathered"] == (wanted >= 0).sum()
    assert gathered[0]["rows_gathered"] < gathered[1]["rows_gathered"] < gathered[2]["rows_gathered"]
    assert all(each["bytes_gathered"] == each["rows_gathered"] * reference.WIDTH * 4 for each in gathered)


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("requests", REQUESTS)
def test_dense_attention_reads_everything_before_the_query(requests: list[tuple[int, int]], block_size: int) -> None:
    step = batch(requests, block_size)
    cache = filled(step, block_size, torch.float32)
    query = torch.randn(step.num_actual_tokens, reference.HEADS, reference.WIDTH)
    output, _ = make("dense").forward_mqa(query, cache, step, None)
    for span in step.spans:
        slots = step.context_slots(span)
        for token in range(span.start, span.stop):
            rows = cache.view(-1, reference.WIDTH)[slots[: int(step.positions[token]) + 1]]
            expected = reference.attend(query[token], rows, SCALE)
            torch.testing.assert_close(output[token].double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_go_to_their_slots_and_slot_minus_one_goes_nowhere() -> None:
    step = batch([(3, 20), (1, 5)], block_size=16, padding=2)
    cache = empty_cache(16, reference.WIDTH, torch.float32)
    before = cache.clone()
    latents, rope = torch.randn(6, 512), torch.randn(6, 1, 64)
    impl = make("dense")
    impl.do_kv_cache_update(latents, rope, cache, step.slot_mapping, "auto", torch.ones(1))
    rows = torch.cat((latents, rope.squeeze(1)), dim=-1)
    flat, untouched = cache.view(-1, reference.WIDTH), torch.ones(cache.numel() // reference.WIDTH, dtype=torch.bool)
    for token, slot in enumerate(step.slot_mapping.tolist()):
        if slot >= 0:
            assert torch.equal(flat[slot], rows[token])
            untouched[slot] = False
    assert torch.equal(flat[untouched], before.view(-1, reference.WIDTH)[untouched])


def test_an_empty_cache_is_left_alone() -> None:
    make("dense").do_kv_cache_update(
        torch.randn(2, 512), torch.randn(2, 1, 64), torch.tensor([]), torch.tensor([0, 1]), "auto", torch.ones(1)
    )


def test_the_top_k_buffer_is_read_anew_each_time() -> None:
    class Indexer:
        topk_indices_buffer = torch.zeros((4, K), dtype=torch.int32)

    indexer = Indexer()
    impl = make("sparse", torch.ones((4, K), dtype=torch.int32), indexer)
    assert impl.topk_indices_buffer is indexer.topk_indices_buffer
    indexer.topk_indices_buffer = torch.ones((4, K), dtype=torch.int32)
    assert impl.topk_indices_buffer is indexer.topk_indices_buffer


def test_an_unknown_cache_dtype_is_refused_by_name() -> None:
    from tidal_connector.errors import ConfigError
    from tidal_connector.vllm_plugin.cpu.sparse_mla import TidalDenseMLAImpl

    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8_ds_mla.*auto or bfloat16"):
        TidalDenseMLAImpl(4, 576, 1.0, 1, None, None, "fp8_ds_mla", None, "decoder", None, kv_lora_rank=512)
