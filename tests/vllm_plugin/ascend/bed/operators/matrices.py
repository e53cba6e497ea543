# SPDX-License-Identifier: Apache-2.0
"""Operators on weights in plain torch. Formats of the chip mean nothing here: a cast leaves a tensor as it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.vllm_plugin.ascend.bed.operators.rules import HALVES, need, need_tensor

_BMM = "batch_matmul_transpose"
_TBMM = "npu_transpose_batchmatmul"


def format_cast(tensor: torch.Tensor, acl_format: int) -> torch.Tensor:
    """Return the tensor itself: 2 is the plain format, 29 the fractal one."""
    need(acl_format in (2, 29), "npu_format_cast", "the bed knows the formats 2 and 29", acl_format)
    return tensor


def batch_matmul_transpose(
    tensor_a: torch.Tensor,
    tensor_b: torch.Tensor,
    tensor_c: torch.Tensor,
    format_mode: str | None = None,
    quant_mode: str | None = None,
) -> None:
    """Multiply [T, N, K] by [N, K, V] head by head into ``tensor_c`` [T, N, V]."""
    need(format_mode is None and quant_mode is None, _BMM, "the bed knows the plain format only")
    need_tensor(_BMM, "tensor_a", tensor_a, (None, None, None), HALVES, contiguous=True)
    tokens, heads, inner = tensor_a.shape
    same = (tensor_a.dtype,)
    need_tensor(_BMM, "tensor_b", tensor_b, (heads, inner, None), same, contiguous=True)
    need_tensor(_BMM, "tensor_c", tensor_c, (tokens, heads, tensor_b.shape[2]), same, contiguous=True)
    product = torch.bmm(tensor_a.transpose(0, 1).float(), tensor_b.float())
    tensor_c.copy_(product.transpose(0, 1))


def transpose_batchmatmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    perm_x1: Sequence[int] = (0, 1, 2),
    perm_x2: Sequence[int] = (0, 1, 2),
    perm_y: Sequence[int] = (1, 0, 2),
    batch_split_factor: int = 1,
) -> torch.Tensor:
    """Multiply the permuted ``x`` by the permuted ``weight`` matrix by matrix, and permute the product."""
    plain = bias is None and scale is None and batch_split_factor == 1
    need(plain, _TBMM, "the bed knows neither bias, scale nor a split batch")
    need_tensor(_TBMM, "input", x, (None, None, None), HALVES)
    need_tensor(_TBMM, "weight", weight, (None, None, None), (x.dtype,))
    need(tuple(perm_y) == (1, 0, 2), _TBMM, "perm_y has to be (1, 0, 2)", perm_y)
    left, right = x.permute(*perm_x1), weight.permute(*perm_x2)
    fits = left.shape[0] == right.shape[0] and left.shape[2] == right.shape[1]
    need(fits, _TBMM, "batches and inner sizes have to agree", (left.shape, right.shape))
    return torch.bmm(left.float(), right.float()).to(x.dtype).permute(*perm_y).contiguous()


def hadamard(size: int) -> list[list[int]]:
    """Return the Hadamard matrix of a power of two."""
    return [[1 - 2 * ((row & column).bit_count() % 2) for column in range(size)] for row in range(size)]
