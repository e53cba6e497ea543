# SPDX-License-Identifier: Apache-2.0
"""``copy_rows``: rows, chosen one by one, from one paged array to another.

Takes numpy views of memory that others own (a torch tensor on the CPU gives one by ``.numpy()``), checks them, and
hands them to one implementation. Keeps nothing; any thread. The native implementation releases the interpreter; the
threads that help it are started once for the process and sleep between calls.
"""

from __future__ import annotations

from tidal_connector.ops import native, reference
from tidal_connector.ops.implementation import Implementation, default_implementation
from tidal_connector.ops.row_arrays import Indices, Rows, check_indices, outside, paged_rows, row_count


def copy_rows(
    source: Rows,
    source_rows: Indices,
    destination: Rows,
    destination_rows: Indices,
    *,
    threads: int = 1,
    implementation: Implementation | None = None,
) -> None:
    """Copy row ``source_rows[i]`` of the source to row ``destination_rows[i]`` of the destination.

    Source row -1 stands for zeros; destination row -1 skips the copy. No destination row may be named twice, and no
    row that is read may be written by the same call.

    Args:
        source: uint8 ``[rows, row_bytes]``, or ``[pages, page_tokens, row_bytes]`` with row = page * page_tokens + i.
            Pages and rows may have gaps between them (any stride); the bytes of a row are contiguous.
        source_rows: int64 ``[n]``, contiguous, each in ``[-1, rows)``.
        destination: as the source, writable, with the same ``row_bytes``.
        destination_rows: as ``source_rows``, of the same length.
        threads: workers at most; small copies use fewer (native only).
        implementation: None takes native where it was built, else the reference.

    Raises:
        TypeError: an argument is no array of the demanded dtype.
        ValueError: shapes or strides do not fit; nothing was written.
        IndexError: an index is outside; nothing was written.
        NativeOpMissing: native was asked for and is not there.
    """
    from_rows = paged_rows("source", source)
    to_rows = paged_rows("destination", destination, writable=True)
    check_indices("source_rows", source_rows)
    check_indices("destination_rows", destination_rows)
    if from_rows.shape[2] != to_rows.shape[2]:
        raise ValueError(f"source {source.shape}, destination {destination.shape}: expected rows of one size")
    if source_rows.shape != destination_rows.shape:
        raise ValueError(
            f"source_rows {source_rows.shape}, destination_rows {destination_rows.shape}: expected one length"
        )
    if threads < 1:
        raise ValueError(f"threads = {threads}: expected at least 1")
    if (implementation or default_implementation("copying")) is Implementation.NATIVE:
        wrong = native.copy_rows(from_rows, source_rows, to_rows, destination_rows, threads)
    else:
        wrong = reference.copy_rows(from_rows, source_rows, to_rows, destination_rows)
    if wrong >= source_rows.size:
        raise outside("destination_rows", destination_rows, wrong - source_rows.size, row_count(to_rows))
    if wrong >= 0:
        raise outside("source_rows", source_rows, wrong, row_count(from_rows))
