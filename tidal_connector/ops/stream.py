# SPDX-License-Identifier: Apache-2.0
"""``CopyStream``: the processor's copy stream, which moves rows while the caller computes, with an event for each move.

Takes arrays that others own and keep alive until the stream is closed, and row numbers, which it copies; hands on
tickets. Its threads are native and never touch the interpreter. Whoever waits for a copy that nobody has begun does it
itself at once, and one that is under way is helped, because waking a thread that sleeps takes some 50 us, as long as
copying 500 KB. Any thread may submit and wait. A stream belongs to the process that made it: in a forked child each
call raises, so make one there anew.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from tidal_connector.ops import native, reference
from tidal_connector.ops.implementation import Implementation, default_implementation
from tidal_connector.ops.row_arrays import Indices, Rows, check_indices, outside, paged_rows, row_count

WORTH_WAKING_BYTES = 128 << 10
"""Bytes of a submission from which on waking a thread pays: that costs the submitter some 5 us and the thread some 50,
in which anybody copies as much.
"""


class Waited(enum.IntEnum):
    """How a wait went, as ``csrc/include/tidal/stream.h`` numbers it."""

    READY = 0
    """The copy was done before anybody waited."""
    WAITED = 1
    """Another thread had begun it; the caller helped and waited."""
    RAN = 2
    """Nobody had begun it; the caller did it."""
    TIMEOUT = 3
    """It was not done at the deadline. It goes on, and can be waited for again."""


class StreamStatistics(NamedTuple):
    """What a stream has done so far."""

    jobs: int
    """Copies done."""
    bytes: int
    """Bytes that they wrote."""
    busy_seconds: float
    """Time that the stream's own threads spent copying."""
    stolen_seconds: float
    """Time that waiting threads spent copying."""
    waited_seconds: float
    """Time that waiting threads spent doing nothing."""
    late: int
    """Waits that found their copy not done."""


@dataclass(frozen=True)
class Move:
    """From where to where; which rows is said at each submission.

    Attributes:
        source: uint8 ``[rows, row_bytes]`` or ``[pages, page_tokens, row_bytes]``, as for ``copy_rows``.
        destination: the same, writable, with the same ``row_bytes``.
    """

    source: Rows
    destination: Rows


@dataclass(frozen=True)
class MoveSet:
    """Moves that were checked once and can be submitted often; made by ``CopyStream.prepare``.

    Attributes:
        moves: what was prepared.
        source_rows: rows of each source.
        destination_rows: rows of each destination.
        prepared: what the implementation made of them.
    """

    moves: tuple[Move, ...]
    source_rows: tuple[int, ...]
    destination_rows: tuple[int, ...]
    prepared: Any


class _Queue(Protocol):
    """What an implementation offers; see ``reference.CopyStream``."""

    def submit(
        self,
        moves: Any,
        first: int,
        count: int,
        source_rows: Indices,
        destination_rows: Indices,
        after: int,
        wake: bool,
    ) -> int: ...

    def wait(self, ticket: int, seconds: float) -> int: ...

    def settle(self, ticket: int, seconds: float) -> int: ...

    def done(self, ticket: int) -> bool: ...

    def statistics(self) -> tuple[int, int, float, float, float, int]: ...

    def close(self) -> None: ...


class CopyStream:
    """A queue of row copies and the threads that work it off; close it, or use it as a context manager."""

    def __init__(self, threads: int = 1, *, implementation: Implementation | None = None) -> None:
        """Start the threads.

        Args:
            threads: of the stream. With 0, copies are made by whoever waits for them.
            implementation: None takes native where it was built, else the reference, which copies in ``submit``.

        Raises:
            ValueError: the number of threads is negative.
            NativeOpMissing: native was asked for and is not there.
        """
        if threads < 0:
            raise ValueError(f"threads = {threads}: expected at least 0")
        chosen = implementation or default_implementation("moving rows")
        self._native = chosen is Implementation.NATIVE
        self._queue: _Queue = native.copy_stream(threads) if self._native else reference.CopyStream()
        self._sets: list[MoveSet] = []  # keeps the arrays alive

    def prepare(self, moves: Sequence[Move]) -> MoveSet:
        """Check moves for later submissions. The set is kept until the stream is closed.

        Raises:
            TypeError: an array is not uint8.
            ValueError: no moves, or the shapes or strides of one do not fit.
        """
        if not moves:
            raise ValueError("moves: expected at least one")
        sources, destinations = [], []
        for number, move in enumerate(moves):
            sources.append(paged_rows(f"moves[{number}].source", move.source))
            destinations.append(paged_rows(f"moves[{number}].destination", move.destination, writable=True))
            if sources[-1].shape[2] != destinations[-1].shape[2]:
                raise ValueError(
                    f"moves[{number}]: source {move.source.shape}, destination {move.destination.shape}: "
                    "expected rows of one size"
                )
        prepared: Any = list(zip(sources, destinations, strict=True))
        if self._native:
            prepared = native.move_set(sources, destinations)
        made = MoveSet(tuple(moves), tuple(map(row_count, sources)), tuple(map(row_count, destinations)), prepared)
        self._sets.append(made)
        return made

    def submit(
        self,
        moves: MoveSet,
        source_rows: Indices,
        destination_rows: Indices,
        *,
        first: int = 0,
        count: int | None = None,
        after: int = 0,
        wake: bool = True,
    ) -> int:
        """Queue a copy for each move, in order, all with the same rows; return the ticket of the first.

        The others have the tickets that follow. Tickets begin at 1 and rise over all submissions. Copies begin in their
        order, except that one which is waited for goes first, and several may run at once. So what one writes, another
        may read or write only ``after`` it, which also holds for the moves of one submission. The row numbers are
        copied, so their arrays may be reused at once.

        Args:
            moves: prepared by this stream.
            source_rows: int64 ``[n]``, contiguous; -1 stands for zeros.
            destination_rows: int64 ``[n]``, contiguous; -1 skips the row. No row twice.
            first: the first of the moves to submit.
            count: how many of them; None for all from ``first`` on.
            after: nothing of this begins before every ticket up to this one is done. 0 for no condition.
            wake: wake the stream's threads for it. Without, who waits for it does it; see :data:`WORTH_WAKING_BYTES`.

        Raises:
            TypeError: row numbers are not int64.
            ValueError: shapes, moves or ``after`` do not fit; nothing was queued.
            IndexError: a row is outside; nothing was queued.
            RuntimeError: the stream is closed, or was inherited from another process.
        """
        check_indices("source_rows", source_rows)
        check_indices("destination_rows", destination_rows)
        if source_rows.shape != destination_rows.shape:
            raise ValueError(
                f"source_rows {source_rows.shape}, destination_rows {destination_rows.shape}: expected one length"
            )
        if count is None:
            count = len(moves.moves) - first
        if first < 0 or count < 1 or first + count > len(moves.moves):
            raise ValueError(f"first = {first}, count = {count}: expected a part of {len(moves.moves)} moves")
        ticket = self._queue.submit(moves.prepared, first, count, source_rows, destination_rows, after, wake)
        if ticket > 0:
            return ticket
        wrong, part = ~ticket, slice(first, first + count)
        if wrong < source_rows.size:
            raise outside("source_rows", source_rows, wrong, min(moves.source_rows[part]))
        rows = min(moves.destination_rows[part])
        raise outside("destination_rows", destination_rows, wrong - source_rows.size, rows)

    def wait(self, ticket: int, timeout_s: float) -> Waited:
        """Return once the copy of one ticket is done, or at the deadline; ticket 0 is done always.

        It says nothing of other tickets, not even of older ones. A copy that the caller does itself is not cut off, so
        this may end later than the deadline by one copy.

        Raises:
            ValueError: there is no such ticket, or the timeout is negative or not finite.
            RuntimeError: the stream was inherited from another process.
        """
        return Waited(self._queue.wait(ticket, _checked(timeout_s)))

    def settle(self, ticket: int, timeout_s: float) -> Waited:
        """Return once the copies of all tickets up to this one are done, or at the deadline; otherwise as ``wait``."""
        return Waited(self._queue.settle(ticket, _checked(timeout_s)))

    def done(self, ticket: int) -> bool:
        """Return whether the copy of a ticket is done.

        Raises:
            ValueError: there is no such ticket.
        """
        return self._queue.done(ticket)

    def statistics(self) -> StreamStatistics:
        """Return what the stream has done so far."""
        return StreamStatistics(*self._queue.statistics())

    def close(self) -> None:
        """Finish what was submitted and end the threads; a second call does nothing. Tickets can still be asked for."""
        self._queue.close()
        self._sets.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked(timeout_s: float) -> float:
    if not (math.isfinite(timeout_s) and timeout_s >= 0):
        raise ValueError(f"timeout_s = {timeout_s}: expected a finite number of seconds, at least 0")
    return timeout_s
