# SPDX-License-Identifier: Apache-2.0
"""``gather_rows``: rows of a paged pool, chosen one by one, into a dense buffer.

Takes numpy views of memory that others own (a torch tensor on the CPU gives one by ``.numpy()``), checks them, and
hands them to one implementation. Keeps nothing; any thread. The native implementation releases the interpreter.
"""

from __future__ import annotations

import enum
from functools import cache

import numpy as np
import numpy.typing as npt

from tidal_connector.errors import NativeOpMissing
from tidal_connector.log import get_logger
from tidal_connector.ops import native, reference

_log = get_logger(__name__)


class Implementation(enum.StrEnum):
    """Implementations of an operator."""

    NATIVE = "native"
    REFERENCE = "reference"


def gather_rows(
    pool: npt.NDArray[np.uint8],
    slots: npt.NDArray[np.int64],
    out: npt.NDArray[np.uint8],
    *,
    threads: int = 1,
    implementation: Implementation | None = None,
) -> None:
    """Copy row ``slots[i]`` of the pool to ``out[i]``; slot -1 fills the row with zeros.

    Args:
        pool: uint8 ``[rows, row_bytes]``, or ``[pages, page_tokens, row_bytes]`` with slot = page * page_tokens + row.
            Pages and rows may have gaps between them (any stride); the bytes of a row are contiguous.
        slots: int64 ``[n]``, contiguous, each in ``[-1, rows)``.
        out: uint8 ``[n, row_bytes]``, writable, not overlapping the pool; rows may have gaps.
        threads: workers at most; small gathers use fewer (native only).
        implementation: None takes native where it was built, else the reference.

    Raises:
        TypeError: an argument is no array of the demanded dtype.
        ValueError: shapes or strides do not fit; nothing was written.
        IndexError: a slot is outside the pool; nothing was written.
        NativeOpMissing: native was asked for and is not there.
    """
    pages = _checked(pool, slots, out, threads)
    if (implementation or _default()) is Implementation.NATIVE:
        wrong = native.gather_rows(pages, slots, out, threads)
    else:
        wrong = reference.gather_rows(pages, slots, out)
    if wrong >= 0:
        rows = pages.shape[0] * pages.shape[1]
        raise IndexError(f"slots[{wrong}] = {int(slots[wrong])}: expected -1 or a row in [0, {rows})")


@cache
def _default() -> Implementation:
    try:
        native.load()
    except NativeOpMissing as error:
        _log.warning("%s; gathering with numpy, which is several times slower", error)
        return Implementation.REFERENCE
    return Implementation.NATIVE


def _checked(
    pool: npt.NDArray[np.uint8], slots: npt.NDArray[np.int64], out: npt.NDArray[np.uint8], threads: int
) -> npt.NDArray[np.uint8]:
    """Return the pool as ``[pages, page_tokens, row_bytes]``."""
    for name, array, dtype in (("pool", pool, np.uint8), ("slots", slots, np.int64), ("out", out, np.uint8)):
        if not isinstance(array, np.ndarray) or array.dtype != dtype:
            kind = f"{array.dtype} array" if isinstance(array, np.ndarray) else type(array).__name__
            raise TypeError(f"{name}: expected a numpy array of {np.dtype(dtype)}, got {kind}")
    if pool.ndim not in (2, 3) or slots.ndim != 1 or out.ndim != 2:
        raise ValueError(
            f"pool {pool.shape}, slots {slots.shape}, out {out.shape}: expected [rows, row_bytes] or "
            "[pages, page_tokens, row_bytes], [n], [n, row_bytes]"
        )
    if out.shape != (slots.shape[0], pool.shape[-1]):
        raise ValueError(f"out {out.shape}: expected {(slots.shape[0], pool.shape[-1])} by slots and pool")
    if pool.shape[-1] > 1 and (pool.strides[-1] != 1 or out.strides[-1] != 1):
        raise ValueError("pool, out: the bytes of a row have to be contiguous")
    if not slots.flags.c_contiguous:
        raise ValueError("slots: expected a contiguous array")
    if not out.flags.writeable:
        raise ValueError("out: expected a writable array")
    if threads < 1:
        raise ValueError(f"threads = {threads}: expected at least 1")
    return pool if pool.ndim == 3 else pool[np.newaxis]
