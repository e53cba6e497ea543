# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tidal_connector.vllm_plugin.cpu import fp8_rows


def test_widening_equals_torchs_own_conversion_for_every_byte_that_is_a_number() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    expected = every.view(torch.float8_e4m3fn).float()
    numbers = ~expected.isnan()
    assert int(numbers.sum()) == 254
    assert torch.equal(fp8_rows.widen(every)[numbers], expected[numbers])


@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1e6))
def test_a_row_comes_back_within_the_precision_of_e4m3(seed: int, size: float) -> None:
    rows = torch.randn(5, 128, generator=torch.Generator().manual_seed(seed)) * size
    back = fp8_rows.unpack(fp8_rows.pack(rows))
    # Three mantissa bits: half a step is 1/16 of the value, or half the smallest step of the row's scale.
    largest = rows.abs().amax(dim=1, keepdim=True)
    assert bool(((back - rows).abs() <= rows.abs() / 16 + largest * 2**-16).all())


def test_scales_are_the_smallest_powers_of_two_that_fit() -> None:
    largest = torch.tensor([448.0, 448.01, 224.0, 1.0, 1e-3])
    rows = torch.zeros(5, 128)
    rows[:, 7] = largest
    _, scale = fp8_rows.quantise(rows)
    assert scale.squeeze(1).tolist() == [1.0, 2.0, 0.5, 2.0**-8, 2.0**-18]


def test_a_row_of_zeros_stays_zero() -> None:
    assert torch.equal(fp8_rows.unpack(fp8_rows.pack(torch.zeros(3, 128))), torch.zeros(3, 128))


def test_a_row_takes_132_bytes() -> None:
    assert fp8_rows.pack(torch.ones(2, 128)).shape == (2, fp8_rows.ROW_BYTES) == (2, 132)
