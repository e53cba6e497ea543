# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from tidal_connector.vllm_plugin.cpu.gather import gather_rows


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
