# SPDX-License-Identifier: Apache-2.0
"""What ``resolve`` is compared with: the same exact LRU by vectorised numpy, and the selections that all of them get.

Two numpy versions, because neither is the obvious one: :class:`SortedLru` keeps what ``resolve`` keeps, a few bytes per
slot, and finds a position by binary search; :class:`MappedLru` keeps an entry for every position of the context, which
is fast to look up and grows with the context. One thread.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_APART = 15
"""A position that was left out for so many steps has lost its slot under any tie-break of LRU: at 90 % hits and twice
top-k slots, ten steps replace everything that is not selected."""


class NumpyResolved:
    """What one step found for one request.

    Attributes:
        slots: ``[k]`` slot of each selected position.
        miss_rows: ``[m]`` pool rows to fetch.
        miss_slots: ``[m]`` slots to fetch them into.
    """

    __slots__ = ("miss_rows", "miss_slots", "slots")

    def __init__(self, slots: Int64, miss_rows: Int64, miss_slots: Int64) -> None:
        self.slots = slots
        self.miss_rows = miss_rows
        self.miss_slots = miss_slots


class SortedLru:
    """LRU of one request whose positions are found by binary search.

    Args:
        slots: slots of the request.
        context: positions that may be selected; of no consequence here.
    """

    def __init__(self, slots: int, context: int) -> None:
        self._held = np.full(slots, -1, np.int64)
        self._used = np.zeros(slots, np.int64)
        self._step = 0

    def find(self, wanted: Int64) -> Int64:
        """Return the slot of each position, -1 where it has none."""
        order = np.argsort(self._held)
        held = self._held[order]
        at = np.minimum(np.searchsorted(held, wanted), len(held) - 1)
        found: Int64 = np.where(held[at] == wanted, order[at], -1)
        return found

    def keep(self, victims: Int64, missed: Int64) -> None:
        """Give slots to other positions."""
        self._held[victims] = missed

    def resolve(self, selected: Int32, written: int, pages: Int32, page_tokens: int) -> NumpyResolved:
        """Find slots for the selected positions (distinct, none of them new) and for the one written in this step."""
        self._step += 1
        wanted = np.append(selected, written).astype(np.int64)
        slots = self.find(wanted)
        hit = slots >= 0
        self._used[slots[hit]] = self._step
        missed = wanted[~hit]
        victims = np.argpartition(self._used, len(missed))[: len(missed)]
        self.keep(victims, missed)
        self._used[victims] = self._step
        slots[~hit] = victims
        fetched = missed[:-1]  # the last one is computed here
        rows = pages[fetched // page_tokens].astype(np.int64) * page_tokens + fetched % page_tokens
        return NumpyResolved(slots[:-1], rows, victims[:-1])


class MappedLru(SortedLru):
    """LRU of one request with an entry for every position of its context."""

    def __init__(self, slots: int, context: int) -> None:
        super().__init__(slots, context)
        self._slot_of = np.full(context, -1, np.int32)

    def find(self, wanted: Int64) -> Int64:
        """Return the slot of each position, -1 where it has none."""
        return self._slot_of[wanted].astype(np.int64)

    def keep(self, victims: Int64, missed: Int64) -> None:
        """Give slots to other positions."""
        lost = self._held[victims]
        self._slot_of[lost[lost >= 0]] = -1
        self._held[victims] = missed
        self._slot_of[missed] = victims


def selections(context: int, top_k: int, hit_rate: float, generator: np.random.Generator) -> Iterator[Int32]:
    """Yield the distinct positions ``[top_k]`` that successive steps of one request select, in random order.

    After the first step the given share of a selection is drawn from the one before, so that it hits in any LRU of at
    least ``top_k`` slots. The rest has not been selected for 15 steps, or never: with twice ``top_k`` slots it misses.

    Args:
        context: positions ``[0, context)`` are selected.
        top_k: positions of a selection.
        hit_rate: share of hits.
        generator: where randomness comes from.

    Raises:
        ValueError: the context has too few positions to tell hits from misses.
    """
    fresh = top_k - round(top_k * hit_rate)
    if context < top_k + (_APART + 1) * fresh:
        raise ValueError(f"context {context}: expected at least {top_k + (_APART + 1) * fresh} for top-k {top_k}")
    last_step = np.full(context, -_APART - 1, np.int64)
    chosen = generator.permutation(context)[:top_k]
    step = 0
    while True:
        last_step[chosen] = step
        yield chosen.astype(np.int32)
        step += 1
        away = np.flatnonzero(last_step < step - _APART)
        others = generator.choice(away, fresh, replace=False)
        kept = generator.choice(chosen, top_k - fresh, replace=False)
        chosen = generator.permutation(np.concatenate((kept, others)))
