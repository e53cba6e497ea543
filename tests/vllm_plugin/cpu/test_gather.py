# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from tidal_connector.errors import PoolExhausted
from tidal_connector.vllm_plugin.cpu.gather import RowBuffer, gather_rows


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 576), (torch.bfloat16, 576), (torch.uint8, 132)])
def test_rows_come_back_in_the_shape_of_the_slots(dtype: torch.dtype, width: int) -> None:
    rows = torch.randint(0, 100, (50, width)).to(dtype)
    slots = torch.tensor([[3, 49, 3], [0, -1, 7]])
    found = gather_rows(rows, slots)
    assert found.shape == (2, 3, width)
    assert found.dtype == dtype
    expected = rows[slots]
    expected[1, 1] = 0
    assert torch.equal(found, expected)


def test_a_slot_outside_the_cache_is_refused() -> None:
    with pytest.raises(IndexError, match=r"slots\[1\] = 50"):
        gather_rows(torch.zeros(50, 8), torch.tensor([0, 50]))


def test_no_slots_give_no_rows() -> None:
    assert gather_rows(torch.zeros(5, 8), torch.empty((0, 3), dtype=torch.int64)).shape == (0, 3, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_buffer_holds_each_wanted_row_once(dtype: torch.dtype) -> None:
    buffer = RowBuffer(size=8 * 576 * 4)
    rows = torch.randn(50, 576).to(dtype)
    for seed in range(3):
        wanted = torch.randint(0, 50, (4, 7), generator=torch.Generator().manual_seed(seed))
        wanted = torch.where(wanted % 8 < 6, wanted % 8 + 40, -1)  # at most six distinct rows
        held, slots = buffer.fill(rows, wanted.numpy())
        distinct = list(dict.fromkeys(wanted[wanted >= 0].tolist()))
        assert torch.equal(held, rows[distinct])
        assert torch.equal(slots >= 0, wanted >= 0)
        assert torch.equal(held[slots[slots >= 0].long()], rows[wanted[wanted >= 0]])


def test_a_buffer_keeps_its_memory_and_its_bound() -> None:
    buffer = RowBuffer(size=8 * 64)
    rows = torch.arange(50 * 64, dtype=torch.int64).to(torch.uint8).view(50, 64)
    assert buffer.capacity(64) == 8
    first, _ = buffer.fill(rows, torch.arange(8).view(1, 8).numpy())
    second, _ = buffer.fill(rows, torch.arange(8, 16).view(1, 8).numpy())
    assert first.data_ptr() == second.data_ptr()
    with pytest.raises(PoolExhausted, match="8 slots"):
        buffer.fill(rows, torch.arange(9).view(1, 9).numpy())
    with pytest.raises(IndexError, match="50"):
        buffer.fill(rows, torch.tensor([[50]]).numpy())


def test_nothing_wanted_fills_nothing() -> None:
    held, slots = RowBuffer(size=640).fill(torch.zeros(5, 8), torch.full((2, 3), -1).numpy())
    assert held.shape == (0, 8)
    assert (slots == -1).all()
