# SPDX-License-Identifier: Apache-2.0
"""Checks of the arrays that operators on rows take: each names the argument, what it is and what was expected.

Any thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]


def paged_rows(name: str, rows: Rows, *, writable: bool = False) -> Rows:
    """Return rows as ``[pages, page_tokens, row_bytes]``.

    Raises:
        TypeError: no uint8 array.
        ValueError: neither ``[rows, row_bytes]`` nor paged, bytes of a row apart, or read-only although written to.
    """
    _check_type(name, rows, np.uint8)
    if rows.ndim not in (2, 3):
        raise ValueError(f"{name} {rows.shape}: expected [rows, row_bytes] or [pages, page_tokens, row_bytes]")
    if rows.shape[-1] > 1 and rows.strides[-1] != 1:
        raise ValueError(f"{name}: the bytes of a row have to be contiguous, their stride is {rows.strides[-1]}")
    if writable and not rows.flags.writeable:
        raise ValueError(f"{name}: expected a writable array")
    return rows if rows.ndim == 3 else rows[np.newaxis]


def check_indices(name: str, indices: Indices) -> None:
    """Refuse what is no contiguous int64 array of one dimension.

    Raises:
        TypeError: no int64 array.
        ValueError: of another shape, or with gaps.
    """
    _check_type(name, indices, np.int64)
    if indices.ndim != 1:
        raise ValueError(f"{name} {indices.shape}: expected [n]")
    if not indices.flags.c_contiguous:
        raise ValueError(f"{name}: expected a contiguous array")


def row_count(paged: Rows) -> int:
    """Return how many rows ``[pages, page_tokens, row_bytes]`` has."""
    pages, page_tokens, _ = paged.shape
    return int(pages * page_tokens)


def outside(name: str, indices: Indices, position: int, rows: int) -> IndexError:
    """Return the error for an index that is neither -1 nor a row."""
    return IndexError(f"{name}[{position}] = {int(indices[position])}: expected -1 or a row in [0, {rows})")


def _check_type(name: str, array: npt.NDArray[Any], dtype: type[np.generic]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        kind = f"{array.dtype} array" if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name}: expected a numpy array of {np.dtype(dtype)}, got {kind}")
