# SPDX-License-Identifier: Apache-2.0
"""The reference operators compute what they say, and refuse what breaks a documented rule. Needs torch only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.vllm_plugin.ascend.bed.operators import attention, matrices, rows
from tests.vllm_plugin.ascend.bed.operators.rules import OperatorMisuse
from tests.vllm_plugin.ascend.bed.streams import Event, Stream, UnrecordedEvent

pytestmark = pytest.mark.contract

BLOCKS, SIZE, HEADS = 5, 16, 2
LENGTHS = (20, 7)
"""Keys of two requests; the first has two queries, the second one, and one more row is padding."""


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch(**changed: Any) -> dict[str, Any]:
    key = half(BLOCKS, SIZE, 1, 512)
    given: dict[str, Any] = {
        "query": half(4, HEADS, 512),
        "key": key,
        "value": key,
        "sparse_indices": ints([3, 17, 18], [19, 0, -1], [6, -1, -1], [-1, -1, -1])[:, None],
        "scale_value": 0.05,
        "block_table": ints([4, 1], [2, 0]),
        "actual_seq_lengths_query": ints(2, 3),
        "actual_seq_lengths_kv": ints(*LENGTHS),
        "query_rope": half(4, HEADS, 64),
        "key_rope": half(BLOCKS, SIZE, 1, 64),
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "sparse_mode": 3,
        "attention_mode": 2,
    }
    return given | changed


def one_by_one(given: dict[str, Any], token: int, request: int, positions: list[int]) -> torch.Tensor:
    """Attend from one token to positions of a request, each looked up by itself."""
    pages = given["block_table"][request].tolist()
    keys = [(pages[at // SIZE], at % SIZE) for at in positions]
    latents = torch.stack([given["key"][block, slot, 0] for block, slot in keys]).double()
    ropes = torch.stack([given["key_rope"][block, slot, 0] for block, slot in keys]).double()
    scores = given["query"][token].double() @ latents.T + given["query_rope"][token].double() @ ropes.T
    return (scores * given["scale_value"]).softmax(dim=-1) @ latents


def test_attention_goes_to_the_named_rows_up_to_the_causal_limit() -> None:
    given = batch()
    output, *_ = attention.sparse_flash_attention(**given)
    # The first query of request 0 is its position 18, the second 19; request 1 has position 6 only.
    for token, request, positions in ((0, 0, [3, 17, 18]), (1, 0, [19, 0]), (2, 1, [6])):
        torch.testing.assert_close(
            output[token].double(), one_by_one(given, token, request, positions), rtol=0, atol=2e-3
        )
    assert output[3].isnan().all()


def test_mode_3_hides_the_future_and_mode_0_does_not() -> None:
    indices = ints([3, 19, 18], [19, 0, -1], [6, -1, -1], [-1, -1, -1])[:, None]
    hidden = batch(sparse_indices=indices)
    shown = batch(sparse_indices=indices, sparse_mode=0)
    for given, positions in ((hidden, [3, 18]), (shown, [3, 19, 18])):
        output, *_ = attention.sparse_flash_attention(**given)
        torch.testing.assert_close(output[0].double(), one_by_one(given, 0, 0, positions), rtol=0, atol=2e-3)


def test_a_query_that_may_see_nothing_gets_zeros() -> None:
    output, *_ = attention.sparse_flash_attention(
        **batch(
            actual_seq_lengths_kv=ints(20, 0),
            sparse_indices=ints([3, 17, 18], [19, 0, -1], [-1, -1, -1], [-1, -1, -1])[:, None],
        )
    )
    assert not output[2].any()


KEY = half(BLOCKS, SIZE, 1, 512)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"sparse_indices": ints([-1, 3, 17], [19, 0, -1], [6, -1, -1], [0, 0, 0])[:, None]}, "have to come first"),
        ({"sparse_indices": ints([3, 3, 17], [19, 0, -1], [6, -1, -1], [0, 0, 0])[:, None]}, "must not occur twice"),
        ({"sparse_indices": ints([3, 20, 17], [1, 0, -1], [6, -1, -1], [0, 0, 0])[:, None]}, "below the length"),
        ({"sparse_indices": ints([3, 17], [1, 0], [6, -1], [0, 0])[:, None].long()}, "one of int32"),
        ({"sparse_indices": ints([3, 17], [1, 0], [6, -1], [0, 0])}, r"shape \(4, 1, any\)"),
        ({"block_table": ints([4], [2])}, "too narrow for 20 keys"),
        ({"block_table": ints([4, 5], [2, 0])}, r"name blocks in \[0, 5\)"),
        ({"block_table": ints([4, 1])}, r"block_table has to have the shape \(2, any\)"),
        ({"actual_seq_lengths_query": ints(3, 2)}, "query end of request 1"),
        ({"actual_seq_lengths_query": ints(2, 5)}, "query end of request 1"),
        ({"actual_seq_lengths_kv": ints(20)}, r"shape \(2\)"),
        ({"value": KEY.clone(), "key": KEY}, "same memory as key"),
        ({"key": half(BLOCKS, SIZE, 1, 1024)[..., :512]}, "key has to be contiguous"),
        ({"query": half(4, HEADS, 512).bfloat16()}, "one of bfloat16"),
        ({"query": half(4, 65, 512), "query_rope": half(4, 65, 64)}, "1 to 64, or 128"),
        ({"query": half(4, HEADS, 576)}, r"shape \(any, any, 512\)"),
        ({"query_rope": None}, "query_rope is required"),
        ({"sparse_mode": 4}, "0 or 3"),
        ({"attention_mode": 0}, "absorbed MLA"),
        ({"layout_kv": "BSND"}, "PA_BSND"),
        ({"return_softmax_lse": True}, "not supported with paged keys"),
    ],
)
def test_attention_refuses_what_breaks_a_rule(changed: dict[str, Any], rule: str) -> None:
    with pytest.raises(OperatorMisuse, match=rule):
        attention.sparse_flash_attention(**batch(**changed))


def test_the_indexer_names_the_best_positions_first_and_the_earlier_of_equals() -> None:
    keys = torch.zeros(2, SIZE, 1, 128).half()
    for position, score in enumerate((1.0, 3.0, 2.0, 3.0, 9.0)):
        keys[1, position, 0, 0] = score
    query = torch.zeros(2, 1, 128).half()
    query[:, 0, 0] = 1.0
    indices, _ = attention.lightning_indexer(
        query,
        keys,
        torch.ones(2, 1).half(),
        actual_seq_lengths_query=ints(2),
        actual_seq_lengths_key=ints(5),
        block_table=ints([1]),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=3,
    )
    assert indices[:, 0].tolist() == [[1, 3, 2], [4, 1, 3]]


def test_rows_are_written_where_their_slots_say_and_padding_nowhere() -> None:
    rope, latent = torch.zeros(2, SIZE, 1, 64).half(), torch.zeros(2, SIZE, 1, 512).half()
    kv, angles = half(3, 1, 1, 576), half(3, 1, 1, 64)
    slots = torch.tensor([17, -1, 0])
    rows.kv_rmsnorm_rope_cache(kv, half(512), angles, angles, slots, rope, latent, cache_mode="PA")
    assert latent.view(-1, 512).any(dim=-1).nonzero().flatten().tolist() == [0, 17]
    assert rope.view(-1, 64).any(dim=-1).nonzero().flatten().tolist() == [0, 17]
    with pytest.raises(OperatorMisuse, match="one slot"):
        rows.scatter_nd_update_(latent.view(-1, 512), ints([1], [1]), half(2, 512))
    with pytest.raises(OperatorMisuse, match="below 32"):
        rows.scatter_nd_update_(latent.view(-1, 512), ints([1], [32]), half(2, 512))


def test_a_rotation_of_pairs_is_a_rotation_of_halves_after_sorting() -> None:
    x, angle = half(1, 1, 1, 64), torch.tensor(0.5)
    cos, sin = torch.full_like(x, float(angle.cos())), torch.full_like(x, float(angle.sin()))
    pairs = torch.view_as_complex(x.double().reshape(32, 2)) * torch.polar(torch.tensor(1.0).double(), angle.double())
    expected = torch.cat([pairs.real, pairs.imag])
    torch.testing.assert_close(rows.interleave_rope(x, cos, sin).flatten().double(), expected, rtol=0, atol=5e-3)


def test_both_matrix_operators_multiply_head_by_head() -> None:
    x, weight = half(3, HEADS, 16), half(HEADS, 16, 8)
    expected = torch.einsum("tnk,nkv->tnv", x.float(), weight.float()).half()
    out = torch.empty(3, HEADS, 8).half()
    matrices.batch_matmul_transpose(x, weight, out)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(matrices.transpose_batchmatmul(x, weight, perm_x1=(1, 0, 2), perm_y=(1, 0, 2)), expected)


def test_waiting_for_an_event_that_nobody_recorded_is_seen() -> None:
    event, stream = Event(), Stream()
    with pytest.raises(UnrecordedEvent):
        stream.wait_event(event)
    event.record()
    stream.wait_event(event)
