# SPDX-License-Identifier: Apache-2.0
"""``gather_rows``: rows of a paged pool, chosen one by one, into a dense buffer: ``copy_rows`` to rows 0, 1, 2...

Takes numpy views of memory that others own (a torch tensor on the CPU gives one by ``.numpy()``), checks them, and
hands them to one implementation. Keeps nothing; any thread. The native implementation releases the interpreter.
"""

from __future__ import annotations

from tidal_connector.ops import native, reference
from tidal_connector.ops.implementation import Implementation, default_implementation
from tidal_connector.ops.row_arrays import Indices, Rows, check_indices, outside, paged_rows, row_count

__all__ = ["Implementation", "gather_rows"]


def gather_rows(
    pool: Rows,
    slots: Indices,
    out: Rows,
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
    pages = paged_rows("pool", pool)
    paged_rows("out", out, writable=True)
    check_indices("slots", slots)
    if out.shape != (slots.shape[0], pages.shape[2]):
        raise ValueError(f"out {out.shape}: expected {(slots.shape[0], pages.shape[2])} by slots and pool")
    if threads < 1:
        raise ValueError(f"threads = {threads}: expected at least 1")
    if (implementation or default_implementation("gathering")) is Implementation.NATIVE:
        wrong = native.gather_rows(pages, slots, out, threads)
    else:
        wrong = reference.gather_rows(pages, slots, out)
    if wrong >= 0:
        raise outside("slots", slots, wrong, row_count(pages))
