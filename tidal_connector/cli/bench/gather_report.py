# SPDX-License-Identifier: Apache-2.0
"""Cost of planning and fetching as a value, and as JSON; ``gather_tables`` prints it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from tidal_connector.cli.bench.figures import MachineFacts, Spread

MEMCPY_BOUND = 0.70
"""Least speed of the gather, as a multiple of memcpy's."""
NUMPY_BOUND = 3.0
TORCH_BOUND = 3.0
FLATNESS_BOUND = 1.3
"""Largest resolve time over the contexts of the sweep, as a multiple of the smallest."""


class CopyCase(msgspec.Struct, frozen=True):
    """Missed rows into their slots: all of them missed, rows and slots at random.

    Attributes:
        row_bytes: bytes of a row.
        batch: requests that miss ``rows / batch`` rows each.
        threads: of every contender.
        rows: rows of one timing.
        gather_gb_per_s: ``ops.copy_rows``, bytes of rows per second in units of 10^9.
        memcpy_gb_per_s: as many bytes in one piece, a call of libc's memcpy for each thread.
        torch_copy_gb_per_s: the same by torch's ``copy_``, whose OpenMP threads still spin after the call before.
        index_select_gb_per_s: ``torch.index_select`` into a dense buffer that exists: half of the work.
        index_select_to_slots_gb_per_s: the same, and ``index_copy_`` from there into the slots: all of the work.
        gather_over_memcpy, gather_over_torch_copy: the gather over each.
        gather_over_torch_index_select: over torch's way to put the rows into slots.
        gather_over_torch_index_select_dense: over the half of it that leaves them in a dense buffer.
            All of them: the median of the ratios within a round.
    """

    row_bytes: int
    batch: int
    threads: int
    rows: int
    gather_gb_per_s: Spread
    memcpy_gb_per_s: Spread
    torch_copy_gb_per_s: Spread
    index_select_gb_per_s: Spread
    index_select_to_slots_gb_per_s: Spread
    gather_over_memcpy: Spread
    gather_over_torch_copy: Spread
    gather_over_torch_index_select: Spread
    gather_over_torch_index_select_dense: Spread

    def label(self) -> str:
        """Return the case in a few words, for a picture."""
        return f"{self.row_bytes} B\nbatch {self.batch}\n{self.threads} thread{'s' if self.threads > 1 else ''}"


class CostSplit(msgspec.Struct, frozen=True):
    """Where the time of one resolved row goes, in microseconds; from timings that leave parts out.

    Attributes:
        call: a batch without requests: the interpreter and the way into native code, shared by the rows.
        scan: what a row that selects nothing adds: its slots in the order of their use, the new token's slot.
        find: what positions add that are all resident: their slots, and the new order of use.
        replace: what misses add: victims, and where in the pool the missed rows are.
    """

    call: float
    scan: float
    find: float
    replace: float


class ResolveCase(msgspec.Struct, frozen=True):
    """A selection resolved against the slots; a row is one request's selection in one step.

    Attributes:
        batch: rows of one call.
        threads: workers at most.
        hits: share of the selected positions that were resident, as counted by the operator.
        us_per_row: microseconds per row.
        split: where they go.
        numpy_us_per_row: the same LRU by numpy, with as little state as resolve keeps, one row after the other.
        numpy_map_us_per_row: numpy with an entry for every position of the context, which resolve may not keep: four
            bytes for each token, request and group.
        resolve_over_numpy, resolve_over_numpy_map: how many times as fast; median of the ratios within a round.
    """

    batch: int
    threads: int
    hits: float
    us_per_row: Spread
    split: CostSplit
    numpy_us_per_row: Spread
    numpy_map_us_per_row: Spread
    resolve_over_numpy: Spread
    resolve_over_numpy_map: Spread


class ContextPoint(msgspec.Struct, frozen=True):
    """Resolve time at one length of the context, one thread.

    Attributes:
        context: positions that a selection is drawn from.
        us_per_row: microseconds per row.
    """

    context: int
    us_per_row: Spread


class Gather(msgspec.Struct, frozen=True):
    """Everything that was found; its fields are the JSON's keys. Ratios at the top are those of the worst case.

    Attributes:
        gather_over_memcpy: speed of the gather over memcpy's.
        gather_over_torch_copy: over that of torch's ``copy_``.
        gather_over_torch_index_select: over ``torch.index_select`` and ``index_copy_``, which do what the gather does.
        gather_over_torch_index_select_dense: over the former alone, which leaves the rows in a dense buffer.
        resolve_us_per_row: of one thread and the largest batch.
        resolve_over_numpy: speed of resolve over that of numpy with as little state.
        resolve_over_numpy_map: over numpy with an entry for every position of the context.
        resolve_flatness: slowest context of the sweep over the fastest.
        pool: what the pool is made of.
        pool_bytes: its size.
        top_k: positions of a selection.
        slots: slots of a request.
        hit_rate: share of hits that the resolve figures were asked for.
        repetitions: timed rounds of each case.
    """

    gather_over_memcpy: float
    gather_over_torch_copy: float
    gather_over_torch_index_select: float
    gather_over_torch_index_select_dense: float
    resolve_us_per_row: Spread
    resolve_over_numpy: float
    resolve_over_numpy_map: float
    resolve_flatness: float
    pool: str
    pool_bytes: int
    top_k: int
    slots: int
    hit_rate: float
    repetitions: int
    machine: MachineFacts
    copies: tuple[CopyCase, ...]
    resolves: tuple[ResolveCase, ...]
    contexts: tuple[ContextPoint, ...]

    def shortcomings(self) -> list[str]:
        """Return what is not as it must be, one line each; empty if all is well."""
        found = []
        if self.gather_over_memcpy < MEMCPY_BOUND:
            found.append(f"gather reaches {self.gather_over_memcpy:.2f} of memcpy; expected at least {MEMCPY_BOUND}")
        if self.gather_over_torch_index_select < TORCH_BOUND:
            found.append(
                f"gather is {self.gather_over_torch_index_select:.2f} x as fast as torch's index_select and "
                f"index_copy_; expected at least {TORCH_BOUND:g}"
            )
        if self.resolve_over_numpy < NUMPY_BOUND:
            found.append(
                f"resolve is {self.resolve_over_numpy:.2f} x as fast as numpy; expected at least {NUMPY_BOUND:g}"
            )
        if self.resolve_flatness > FLATNESS_BOUND:
            found.append(
                f"resolve takes {self.resolve_flatness:.2f} x as long at one context as at another; expected at most "
                f"{FLATNESS_BOUND}"
            )
        return found


def gather_result(
    copies: Iterable[CopyCase],
    resolves: Iterable[ResolveCase],
    contexts: Iterable[ContextPoint],
    *,
    pool: str,
    pool_bytes: int,
    top_k: int,
    slots: int,
    hit_rate: float,
    repetitions: int,
    machine: MachineFacts,
) -> Gather:
    """Put cases together, and the worst of each ratio on top."""
    copied, resolved, swept = tuple(copies), tuple(resolves), tuple(contexts)

    def worst(ratio: Callable[[CopyCase], Spread]) -> float:
        return min(ratio(case).median for case in copied)

    times = [point.us_per_row.median for point in swept]
    return Gather(
        gather_over_memcpy=worst(lambda case: case.gather_over_memcpy),
        gather_over_torch_copy=worst(lambda case: case.gather_over_torch_copy),
        gather_over_torch_index_select=worst(lambda case: case.gather_over_torch_index_select),
        gather_over_torch_index_select_dense=worst(lambda case: case.gather_over_torch_index_select_dense),
        resolve_us_per_row=max(
            (case for case in resolved if case.threads == 1), key=lambda case: case.batch
        ).us_per_row,
        resolve_over_numpy=min(case.resolve_over_numpy.median for case in resolved),
        resolve_over_numpy_map=min(case.resolve_over_numpy_map.median for case in resolved),
        resolve_flatness=max(times) / min(times),
        pool=pool,
        pool_bytes=pool_bytes,
        top_k=top_k,
        slots=slots,
        hit_rate=hit_rate,
        repetitions=repetitions,
        machine=machine,
        copies=copied,
        resolves=resolved,
        contexts=swept,
    )


def context_text(context: int) -> str:
    """Return ``8K`` or ``1M``."""
    return f"{context >> 20}M" if context >= 1 << 20 else f"{context >> 10}K"
