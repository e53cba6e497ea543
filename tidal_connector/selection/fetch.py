# SPDX-License-Identifier: Apache-2.0
"""Room 6, fetch: pool rows of a plan move to their slots, through the one operator that reads them. Forward thread."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidal_connector.ops import gather_rows
from tidal_connector.selection.plan import GatherPlan
from tidal_connector.selection.residency import StepBuffer

Rows = npt.NDArray[np.uint8]


def fetch(pool: Rows, plan: GatherPlan, destination: Rows, buffer: StepBuffer, threads: int = 1) -> int:
    """Move the misses of a plan and commit them.

    Args:
        pool: ``[rows, row_bytes]`` uint8, one layer's rows, in the host pool or wherever else the engine keeps them.
        plan: what to move.
        destination: ``[slots, row_bytes]`` uint8, the device buffer.
        buffer: residency of the destination.
        threads: workers at most.

    Returns:
        Bytes moved.
    """
    count = len(plan.misses)
    if count:
        gather_rows(pool, plan.misses, destination[plan.first_slot : plan.first_slot + count], threads=threads)
    buffer.commit()
    return count * int(pool.shape[1])
