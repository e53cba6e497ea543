# SPDX-License-Identifier: Apache-2.0
"""``ops.resolve`` by the compiled module, which looks at long-lived arrays once and at a batch within its one call.

What it refuses is put into words by ``resolve_reference.check_batch``. The thread that owns the state; the interpreter
is released during the call.
"""

from __future__ import annotations

from types import ModuleType

from tidal_connector.ops import native
from tidal_connector.ops.resolve_reference import check_batch
from tidal_connector.ops.resolve_types import Counts, ResolveBuffers, SelectionBatch
from tidal_connector.ops.slots import Seats, SlotState

# As csrc/include/tidal/resolve.h numbers them.
_DONE, _REFUSED, _NO_ROOM, _BROKEN = range(4)


def resolve(
    state: SlotState, seats: Seats, batch: SelectionBatch, eager_rows: int, threads: int, buffers: ResolveBuffers
) -> Counts:
    """Do what ``resolve_reference.resolve`` does.

    Raises:
        TypeError, ValueError, PoolExhausted: as ``check_batch``; ValueError also for a state that contradicts itself.
        NativeOpMissing: the native module is not there.
    """
    try:
        status, *counts = _call(state, seats, batch, eager_rows, threads, buffers)
        if status == _NO_ROOM:
            buffers.reserve_misses(counts[0])
            status, *counts = _call(state, seats, batch, eager_rows, threads, buffers)
    except (TypeError, ValueError, AttributeError):  # an array that is none, or of another kind
        check_batch(state, seats, batch)
        raise
    if status == _DONE:
        return Counts(*counts)
    check_batch(state, seats, batch)
    raise ValueError(f"the state of a seat in {batch.seat.tolist()} contradicts itself: SlotState.check says how")


def _call(
    state: SlotState, seats: Seats, batch: SelectionBatch, eager_rows: int, threads: int, buffers: ResolveBuffers
) -> tuple[int, ...]:
    module = native.load()
    buffers.reserve(batch)
    if buffers.view is None:
        buffers.view = module.ResolveBuffersView(
            buffers.slots, buffers.written, buffers.miss_start, buffers.miss_rows, buffers.miss_slots
        )
    answer: tuple[int, ...] = module.resolve(
        state.view or _view_state(module, state),
        seats.view or _view_seats(module, seats),
        buffers.view,
        batch.selected,
        batch.query_start,
        batch.seat,
        batch.start,
        batch.pages,
        batch.page_tokens,
        eager_rows,
        threads,
    )
    return answer


def _view_state(module: ModuleType, state: SlotState) -> object:
    view = module.SlotStateView(state.held, state.order, state.listed, state.filled, state.length)
    object.__setattr__(state, "view", view)
    return view


def _view_seats(module: ModuleType, seats: Seats) -> object:
    view = module.SeatsView(seats.capacity, seats.extents, seats.extent_rows)
    object.__setattr__(seats, "view", view)
    return view
