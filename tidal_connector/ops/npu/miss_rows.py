# SPDX-License-Identifier: Apache-2.0
"""GatherMissRows on the CPU: the definition that the kernel is held to. Any thread."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tidal_connector import ops


def copy_miss_rows(
    selection_k_rope: torch.Tensor,
    selection_kv_cache: torch.Tensor,
    full_k_rope: torch.Tensor,
    full_kv_cache: torch.Tensor,
    miss_rows: torch.Tensor,
    miss_slots: torch.Tensor,
    miss_count: torch.Tensor,
) -> None:
    """Do what ``library.gather_miss_rows`` says with tensors on the CPU.

    Raises:
        TypeError: caches of different dtypes, or lists that are not int32.
        ValueError: shapes that do not fit one another.
        IndexError: a row or a slot that counts is outside its cache, or more are counted than there are.
    """
    caches = (selection_k_rope, selection_kv_cache, full_k_rope, full_kv_cache)
    _check_caches(*caches)
    _check_lists(miss_rows, miss_slots, miss_count)
    rows, slots, counts = miss_rows.numpy(), miss_slots.numpy(), miss_count.numpy()
    if (counts > rows.shape[1]).any():
        raise IndexError(f"miss_count: {counts.max()}: expected at most {rows.shape[1]}, the entries of a list")
    counted = np.arange(rows.shape[1]) < counts[:, np.newaxis]
    asked = counted & (rows >= 0) & (slots >= 0)
    source, destination = rows[asked].astype(np.int64), slots[asked].astype(np.int64)
    for pool, cache in ((full_kv_cache, selection_kv_cache), (full_k_rope, selection_k_rope)):
        if cache.dim() == 3:
            ops.copy_rows(_bytes(pool), source, _bytes(cache), destination)


def _bytes(paged: torch.Tensor) -> npt.NDArray[np.uint8]:
    array: npt.NDArray[np.uint8] = paged.detach().view(torch.uint8).numpy()
    return array


def _check_caches(
    selection_k_rope: torch.Tensor,
    selection_kv_cache: torch.Tensor,
    full_k_rope: torch.Tensor,
    full_kv_cache: torch.Tensor,
) -> None:
    for name, full, selection in (
        ("kv_cache", full_kv_cache, selection_kv_cache),
        ("k_rope", full_k_rope, selection_k_rope),
    ):
        none = name == "k_rope" and full.shape == selection.shape == (0,)
        if not none and (full.dim() != 3 or selection.dim() != 3 or full.shape[2] != selection.shape[2]):
            raise ValueError(
                f"full_{name} {tuple(full.shape)}, selection_{name} {tuple(selection.shape)}: expected "
                "[blocks, block size, dim] with one dim"
            )
        for side, cache in (("full", full), ("selection", selection)):
            if cache.dtype != full_kv_cache.dtype:
                raise TypeError(f"{side}_{name}: dtype {cache.dtype}: expected {full_kv_cache.dtype}, as full_kv_cache")
    for side, kv, rope in (
        ("full", full_kv_cache, full_k_rope),
        ("selection", selection_kv_cache, selection_k_rope),
    ):
        if rope.dim() == 3 and rope.shape[:2] != kv.shape[:2]:
            raise ValueError(
                f"{side}_k_rope {tuple(rope.shape)}: expected {list(kv.shape[:2])} and elements, as its kv"
            )


def _check_lists(miss_rows: torch.Tensor, miss_slots: torch.Tensor, miss_count: torch.Tensor) -> None:
    for name, ints in (("miss_rows", miss_rows), ("miss_slots", miss_slots), ("miss_count", miss_count)):
        if ints.dtype != torch.int32:
            raise TypeError(f"{name}: dtype {ints.dtype}: expected int32")
    if miss_rows.dim() != 2 or miss_slots.shape != miss_rows.shape or miss_count.shape != miss_rows.shape[:1]:
        raise ValueError(
            f"miss_rows {tuple(miss_rows.shape)}, miss_slots {tuple(miss_slots.shape)}, miss_count "
            f"{tuple(miss_count.shape)}: expected [r, m] twice, then [r]"
        )
