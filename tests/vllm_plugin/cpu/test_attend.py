# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from tests.vllm_plugin.cpu import reference
from tidal_connector.vllm_plugin.cpu import attend
from tidal_connector.vllm_plugin.cpu.attend import attend_context, attend_slots

SCALE = 0.07
DTYPES = [torch.float32, torch.bfloat16]


def tensors(count: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(count * 1000 + rows)
    query = torch.randn(count, reference.HEADS, reference.WIDTH, generator=draw).to(dtype)
    return query, torch.randn(rows, reference.WIDTH, generator=draw).to(dtype)


def attended(
    query: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, spans: list[tuple[int, int]]
) -> torch.Tensor:
    output = torch.zeros(*query.shape[:2], reference.VALUES)
    attend_slots(query, rows, slots, spans, SCALE, output)
    return output


def check(query: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, output: torch.Tensor) -> None:
    for at in range(len(query)):
        expected = reference.attend(query[at], rows[slots[at][slots[at] >= 0].long()], SCALE)
        torch.testing.assert_close(output[at].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "k"), [(1, 1), (3, 7), (20, 64), (50, 65)])
@pytest.mark.parametrize("spread", [300, 30])
def test_each_query_attends_to_its_selection(count: int, k: int, spread: int, dtype: torch.dtype) -> None:
    query, rows = tensors(count, 300, dtype)
    slots = torch.full((count, k), -1, dtype=torch.int32)
    for at in range(count):
        used = min(spread, 1 + (at * 13) % k)
        order = torch.randperm(spread, generator=torch.Generator().manual_seed(at))
        slots[at, :used] = order[:used].int()
    for spans in ([(0, count)], [(at, at + 1) for at in range(count)], [(0, count // 3), (count // 3, count)]):
        check(query, rows, slots, attended(query, rows, slots, spans))


@pytest.mark.parametrize("first", [0, 40])
def test_rows_that_lie_side_by_side_are_read_in_place(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, rows = tensors(3, 300, torch.float32)
    slots = torch.arange(first, first + 3 * 64, dtype=torch.int32).view(3, 64)
    spans = [(0, 1), (1, 2), (2, 3)]
    twice = slots.clone()
    twice[2] = slots[0]
    check(query, rows, twice, attended(query, rows, twice, spans))
    monkeypatch.setattr(attend, "gather_rows", None)
    check(query, rows, slots, attended(query, rows, slots, spans))


def test_a_query_that_selects_nothing_gets_zeros() -> None:
    for count in (3, 40):
        query, rows = tensors(count, 10, torch.float32)
        slots = torch.arange(4, dtype=torch.int32).repeat(count, 1)
        slots[1] = -1
        output = attended(query, rows, slots, [(0, count)])
        assert torch.equal(output[1], torch.zeros_like(output[1]))
        check(query[2:], rows, slots[2:], output[2:])
        slots[:] = -1
        assert not attended(query, rows, slots, [(0, count)]).any()


@pytest.mark.parametrize("count", [2, 40])
def test_no_request_sees_the_broken_rows_of_another(count: int) -> None:
    query, rows = tensors(2 * count, 80, torch.float32)
    rows[:40] = float("nan")
    slots = torch.full((2 * count, 20), -1, dtype=torch.int32)
    for at in range(2 * count):
        half = 40 * (at >= count)
        slots[at, :15] = half + torch.randperm(40, generator=torch.Generator().manual_seed(at))[:15].int()
    output = attended(query, rows, slots, [(0, count), (count, 2 * count)])
    assert output[:count].isnan().all()
    check(query[count:], rows, slots[count:], output[count:])


def test_cutting_the_queries_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query, rows = tensors(50, 60, torch.float32)
    slots = torch.stack([torch.randperm(60)[:20] for _ in range(50)]).int()
    monkeypatch.setattr(attend, "SCORE_BYTES", 7 * 80 * reference.HEADS * 4)
    check(query, rows, slots, attended(query, rows, slots, [(0, 50)]))
    monkeypatch.setattr(attend, "ROWS_PER_SELECTED", 0.1)
    monkeypatch.setattr(attend, "SELECTED_BYTES", 3 * 20 * reference.WIDTH * 4)
    check(query, rows, slots, attended(query, rows, slots, [(0, 50)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "length"), [(1, 1), (1, 77), (5, 77), (77, 77), (64, 129)])
def test_a_request_attends_to_its_context_up_to_each_query(queries: int, length: int, dtype: torch.dtype) -> None:
    query, rows = tensors(queries, 200, dtype)
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(length))[:length]
    positions = torch.arange(length - queries, length)
    output = attend_context(query, rows, slots, query_positions=positions, scale=SCALE, value_width=reference.VALUES)
    for at, position in enumerate(positions.tolist()):
        expected = reference.attend(query[at], rows[slots[: position + 1]], SCALE)
        torch.testing.assert_close(output[at].double(), expected, rtol=1e-5, atol=1e-5)


def test_cutting_the_context_and_the_queries_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query, rows = tensors(30, 200, torch.float32)
    slots, positions = torch.arange(100), torch.arange(70, 100)

    def run() -> torch.Tensor:
        return attend_context(query, rows, slots, query_positions=positions, scale=SCALE, value_width=reference.VALUES)

    whole = run()
    monkeypatch.setattr(attend, "CONTEXT_ROWS", 16)
    monkeypatch.setattr(attend, "SCORE_BYTES", 7 * 16 * reference.HEADS * 4)
    torch.testing.assert_close(run(), whole, rtol=1e-5, atol=1e-5)
