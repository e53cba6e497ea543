# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from tests.vllm_plugin.cpu import reference
from tidal_connector.vllm_plugin.cpu import attend
from tidal_connector.vllm_plugin.cpu.attend import attend_context, attend_selected

SCALE = 0.07
DTYPES = [torch.float32, torch.bfloat16]


def tensors(count: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(count * 1000 + rows)
    query = torch.randn(count, reference.HEADS, reference.WIDTH, generator=draw).to(dtype)
    return query, torch.randn(rows, reference.WIDTH, generator=draw).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "k"), [(1, 1), (3, 7), (57, 64), (130, 65)])
def test_each_query_attends_to_its_selection(count: int, k: int, dtype: torch.dtype) -> None:
    query, rows = tensors(count, 300, dtype)
    slots = torch.full((count, k), -1)
    for at in range(count):
        used = 1 + (at * 13) % k
        slots[at, :used] = torch.randperm(300, generator=torch.Generator().manual_seed(at))[:used]
    output = attend_selected(query, rows, slots, SCALE, reference.VALUES)
    for at in range(count):
        expected = reference.attend(query[at], rows[slots[at][slots[at] >= 0]], SCALE)
        torch.testing.assert_close(output[at].double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_that_are_not_selected_are_never_mixed_in() -> None:
    query, rows = tensors(2, 10, torch.float32)
    rows[0] = float("nan")  # row 0 is what an unused entry would read if -1 were merely clamped
    slots = torch.tensor([[3, 5, -1, -1], [-1, -1, -1, -1]])
    output = attend_selected(query, rows, slots, SCALE, reference.VALUES)
    torch.testing.assert_close(
        output[0].double(), reference.attend(query[0], rows[[3, 5]], SCALE), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(output[1], torch.zeros_like(output[1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "length"), [(1, 1), (1, 77), (5, 77), (77, 77), (64, 129)])
def test_a_request_attends_to_its_context_up_to_each_query(queries: int, length: int, dtype: torch.dtype) -> None:
    query, rows = tensors(queries, 200, dtype)
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(length))[:length]
    positions = torch.arange(length - queries, length)
    output = attend_context(
        query, rows, slots, query_positions=positions, selected=None, scale=SCALE, value_width=reference.VALUES
    )
    for at, position in enumerate(positions.tolist()):
        expected = reference.attend(query[at], rows[slots[: position + 1]], SCALE)
        torch.testing.assert_close(output[at].double(), expected, rtol=1e-5, atol=1e-5)


def test_both_ways_of_reading_a_selection_agree() -> None:
    query, rows = tensors(40, 200, torch.float32)
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:90]
    positions = torch.arange(50, 90)
    selected = torch.full((40, 24), -1, dtype=torch.int32)
    for at in range(40):
        used = torch.randperm(51 + at, generator=torch.Generator().manual_seed(at))[:23].sort().values
        selected[at, :23] = used.int()
    context = attend_context(
        query, rows, slots, query_positions=positions, selected=selected, scale=SCALE, value_width=reference.VALUES
    )
    at_slots = torch.where(selected >= 0, slots[selected.clamp(min=0).long()], -1)
    torch.testing.assert_close(
        context, attend_selected(query, rows, at_slots, SCALE, reference.VALUES), rtol=1e-5, atol=1e-5
    )


def test_cutting_the_context_and_the_queries_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query, rows = tensors(30, 200, torch.float32)
    slots, positions = torch.arange(100), torch.arange(70, 100)

    def run() -> torch.Tensor:
        return attend_context(
            query, rows, slots, query_positions=positions, selected=None, scale=SCALE, value_width=reference.VALUES
        )

    whole = run()
    monkeypatch.setattr(attend, "CONTEXT_ROWS", 16)
    monkeypatch.setattr(attend, "SCORE_BYTES", 7 * 16 * reference.HEADS * 4)
    torch.testing.assert_close(run(), whole, rtol=1e-5, atol=1e-5)
