# SPDX-License-Identifier: Apache-2.0
"""How the stand-in operators refuse what the real ones refuse, and what they would silently do wrong with."""

from __future__ import annotations

import torch

HALVES = (torch.float16, torch.bfloat16)


class OperatorMisuse(Exception):
    """An argument breaks a documented rule of an NPU operator."""


def need(true: bool, operator: str, rule: str, found: object = "") -> None:
    """Raise OperatorMisuse with the rule and what came instead, unless it is kept."""
    if not true:
        raise OperatorMisuse(f"{operator}: {rule}" + (f"; got {found}" if found != "" else ""))


def need_tensor(
    operator: str,
    name: str,
    tensor: torch.Tensor | None,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    *,
    contiguous: bool = False,
) -> torch.Tensor:
    """Check one tensor: dtype, shape (None stands for any size), not empty, and contiguous where it is asked for.

    A cache has to be contiguous: the operators copy a strided input first, and a copy of a cache is both too large
    and not the cache.
    """
    if tensor is None:
        raise OperatorMisuse(f"{operator}: {name} is required")
    need(tensor.dtype in dtypes, operator, f"{name} has to be one of {_names(dtypes)}", tensor.dtype)
    fits = tensor.dim() == len(shape) and all(
        want is None or want == size for want, size in zip(shape, tensor.shape, strict=True)
    )
    need(fits, operator, f"{name} has to have the shape {_shown(shape)}", tuple(tensor.shape))
    need(tensor.numel() > 0, operator, f"{name} must not be empty", tuple(tensor.shape))
    need(not contiguous or tensor.is_contiguous(), operator, f"{name} has to be contiguous", tensor.stride())
    return tensor


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _shown(shape: tuple[int | None, ...]) -> str:
    return "(" + ", ".join("any" if size is None else str(size) for size in shape) + ")"
