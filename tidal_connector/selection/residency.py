# SPDX-License-Identifier: Apache-2.0
"""Room 7, hold: which slots of the device buffer are taken. The only writer of residency; forward thread.

:class:`StepBuffer` holds rows for one step: slots are handed out in order, and :meth:`StepBuffer.release` takes all
back.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidal_connector.errors import PoolExhausted


class StepBuffer:
    """Slots of one device buffer within one step.

    Args:
        capacity: number of slots.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._reserved = 0
        self._committed = 0
        self._marks = np.empty(0, np.int32)

    def marks(self, rows: int) -> npt.NDArray[np.int32]:
        """Lend working memory: ``[rows or more]`` int32, one for each pool row, of which nothing is kept between calls.

        It is lent rather than made anew because the pool may have millions of rows and a step selects a few hundred.
        """
        if rows > len(self._marks):
            self._marks = np.empty(max(rows, 2 * len(self._marks)), np.int32)
        return self._marks

    def reserve(self, count: int) -> int:
        """Take ``count`` consecutive slots and return the first; they are readable after :meth:`commit`.

        Raises:
            PoolExhausted: fewer are free.
        """
        if self._reserved + count > self._capacity:
            raise PoolExhausted(
                f"the selection buffer has {self._capacity} slots, {self._reserved} taken; {count} more were asked for"
            )
        first = self._reserved
        self._reserved += count
        return first

    def commit(self) -> None:
        """Declare the reserved slots filled."""
        self._committed = self._reserved

    def release(self) -> None:
        """Give all slots back at the end of the step."""
        self._reserved = self._committed = 0

    @property
    def resident(self) -> int:
        """Number of slots that hold rows."""
        return self._committed

    def check(self) -> None:
        """Verify the invariant 0 <= resident <= reserved <= capacity."""
        assert 0 <= self._committed <= self._reserved <= self._capacity
