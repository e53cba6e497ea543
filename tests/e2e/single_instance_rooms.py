# SPDX-License-Identifier: Apache-2.0
"""Run an order on an engine that is broken on purpose: ``python -m tests.e2e.single_instance_rooms ORDER REPORT``.

A batch whose name is that of a room runs while that room does its work wrongly; every other batch runs on the sound
engine. Rooms are broken from here, by exchanging methods of the running engine's selection cache, never by a switch in
the product. The request that suffers is called ``victim``. Otherwise like ``single_instance_engine``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from tests.e2e.single_instance import Batch, Order, Report
from tests.e2e.single_instance_engine import Engine
from tidal_connector import ops
from tidal_connector.selection.cache import DecodeBatch
from tidal_connector.vllm_plugin.cpu.selection import EngineSelection

VICTIM = "victim"


def _broken_plan(
    selection: EngineSelection, change: Callable[[Any, int], Any]
) -> contextlib.AbstractContextManager[Any]:
    """Let ``change`` alter each plan in which the victim takes part, given its place among the requests."""
    resolve, book = ops.resolve, selection.cache.book

    def broken(state: Any, seats: Any, batch: ops.SelectionBatch, **options: Any) -> Any:
        resolved = resolve(state, seats, batch, **options)
        found = np.flatnonzero(np.asarray(batch.seat) == book._seat_of.get(VICTIM, -1))
        return change(resolved, int(found[0])) if len(found) else resolved

    return mock.patch.object(ops, "resolve", broken)


def wrong_slot(selection: EngineSelection) -> contextlib.AbstractContextManager[Any]:
    """Room 5: the victim's first entry names a slot of another request."""

    def change(resolved: ops.Resolved, place: int) -> ops.Resolved:
        others = [row for row in range(len(resolved.slots)) if row != place]
        if others and resolved.slots[others[0], 0] >= 0:
            resolved.slots[place, 0] = resolved.slots[others[0], 0]
        return resolved

    return _broken_plan(selection, change)


def skipped_miss(selection: EngineSelection) -> contextlib.AbstractContextManager[Any]:
    """Room 6: the first of the victim's misses is not copied."""

    def change(resolved: ops.Resolved, place: int) -> ops.Resolved:
        first, end = resolved.miss_start[place : place + 2]
        if first < end:
            resolved.miss_slots[first] = -1  # which copies to nowhere
        return resolved

    return _broken_plan(selection, change)


@contextlib.contextmanager
def stale_pool_row(selection: EngineSelection) -> Iterator[None]:
    """Write-back: decoded rows never reach the pool, so that they are old when they are fetched again."""
    writeback = selection.writeback

    def lost() -> None:
        writeback._rows = None

    with mock.patch.object(writeback, "submit", lost):
        yield


@contextlib.contextmanager
def stale_residency(selection: EngineSelection) -> Iterator[None]:
    """Room 7: a seat that changes hands keeps what it held, so that another request's rows count as hits."""
    book = selection.cache.book
    with mock.patch.object(book, "_forget_seat", _nothing), mock.patch.object(book, "_forget_rows", _nothing):
        yield
    selection.cache.book.release(VICTIM)


@contextlib.contextmanager
def early_follower(selection: EngineSelection) -> Iterator[None]:
    """Prefetch: followers attend before their rows are copied; these come when the next plan is made."""
    cache = selection.cache
    late, arrive = _LateFollowers(cache._stream), cache.arrive

    def early(layer: int, batch: DecodeBatch) -> None:
        if cache.leads(layer):
            arrive(layer, batch)

    with mock.patch.object(cache, "_stream", late), mock.patch.object(cache, "arrive", early):
        yield
        late.flush()


class _LateFollowers:
    """A copy stream that copies the leader's rows when told to, and the followers' one plan later."""

    def __init__(self, stream: ops.CopyStream) -> None:
        self._stream = stream
        self._late: tuple[Any, ...] = ()

    def submit(self, moves: Any, rows: Any, slots: Any, *, wake: bool) -> int:
        self.flush()
        self._late = (moves, np.array(rows), np.array(slots))
        return int(self._stream.submit(moves, rows, slots, first=0, count=1, wake=wake))

    def flush(self) -> None:
        if self._late:
            moves, rows, slots = self._late
            self._late = ()
            self._stream.submit(moves, rows, slots, first=1, count=len(moves.moves) - 1)

    def wait(self, ticket: int, seconds: float) -> Any:
        return self._stream.wait(ticket, seconds)


def _nothing(*_: Any) -> None:
    pass


ROOMS: dict[str, Callable[[EngineSelection], contextlib.AbstractContextManager[Any]]] = {
    "wrong slot": wrong_slot,
    "skipped miss": skipped_miss,
    "stale pool row": stale_pool_row,
    "stale residency": stale_residency,
    "early follower": early_follower,
}
"""How each room is broken, by its name."""


def selection_of(engine: Engine) -> EngineSelection:
    """Return the selection cache of an engine."""
    worker = engine.core.model_executor.driver_worker.worker
    found = worker.model_runner.tidal_selection
    assert isinstance(found, EngineSelection)
    return found


def main() -> None:
    """Read the order, run it, write the report."""
    order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Order)
    engine = Engine(order.settings)
    batches: dict[str, Batch] = {}
    for name, asks in order.batches.items():
        with ROOMS[name](selection_of(engine)) if name in ROOMS else contextlib.nullcontext():
            batches[name] = engine.run(asks)
    engine.close()
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(Report(0.0, batches)))


if __name__ == "__main__":
    main()
