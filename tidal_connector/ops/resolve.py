# SPDX-License-Identifier: Apache-2.0
"""``resolve``: which selected rows are on the device, which are fetched, and which rows make room for them.

Takes a batch of selections, the seats of its requests, and the state of one index group, which it changes. Hands on the
slot table on which attention runs and the list of rows to copy (``gather_rows`` and its kin); it touches no rows. One
call serves the whole batch. The thread that owns the state; the native implementation releases the interpreter.
"""

from __future__ import annotations

from tidal_connector.ops import resolve_native, resolve_reference
from tidal_connector.ops.implementation import Implementation, default_implementation
from tidal_connector.ops.resolve_types import ResolveBuffers, Resolved, SelectionBatch
from tidal_connector.ops.slots import Seats, SlotState


def resolve(
    state: SlotState,
    seats: Seats,
    batch: SelectionBatch,
    *,
    eager_rows: int = 0,
    threads: int = 1,
    buffers: ResolveBuffers | None = None,
    implementation: Implementation | None = None,
) -> Resolved:
    """Find the selected rows on the device and give the missing ones a place, for a whole batch.

    An entry is valid if its position is at most that of its query and lies in the pages. A request that fits its
    capacity keeps every row that it ever fetched. Beyond that its slots are an exact LRU: rows selected or written in
    this step are never evicted by it; the longest unused make room, first for the new rows, then for the misses in the
    order of their first occurrence. Positions from ``start`` on count as not held: they are written anew, also after a
    rejected speculation. So a request whose tokens were taken back has to come here (with no queries, if it has none)
    before anybody else writes their rows anew.

    Args:
        state: of the index group; changed.
        seats: where the slots are.
        batch: the step.
        eager_rows: a request in place whose ``start`` is at most this fetches all of its context that is not held.
        threads: workers at most; small batches use fewer (native only).
        buffers: memory for the results; None allocates.
        implementation: None takes native where it was built, else the reference.

    Raises:
        TypeError: an argument is no array of the demanded dtype.
        ValueError: shapes, strides, seats, extents or positions do not fit, or the state is broken.
        PoolExhausted: a listed seat has fewer than ``queries * (k + 1)`` slots; nothing was changed.
        NativeOpMissing: native was asked for and is not there.
    """
    if threads < 1:
        raise ValueError(f"threads = {threads}: expected at least 1")
    if buffers is None:
        buffers = ResolveBuffers()
    if (implementation or default_implementation("resolving")) is Implementation.NATIVE:
        counts = resolve_native.resolve(state, seats, batch, eager_rows, threads, buffers)
    else:
        resolve_reference.check_batch(state, seats, batch)
        counts = resolve_reference.resolve(state, seats, batch, eager_rows, buffers)
    return buffers.resolved(batch, counts)
