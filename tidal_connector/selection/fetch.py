# SPDX-License-Identifier: Apache-2.0
"""Room 6, fetch: pool rows of a plan move to their slots, through the one operator that reads the pool. Forward thread."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidal_connector.ops import gather_rows
from tidal_connector.selection.plan import GatherPlan
from tidal_connector.selection.residency import StepBuffer

Rows = npt.NDArray[np.uint8]


def fetch(pool: Rows, plan: GatherPlan, destination: Rows, buffer: StepBuffer) -> int:
    """Move the misses of a plan and commit them.

    Args:
        pool: ``[rows, row_bytes]`` uint8, one layer's region of the host pool.
        plan: what to move.
        destination: ``[slots, row_bytes]`` uint8, the device buffer.
        buffer: residency of the destination.

    Returns:
        Bytes moved.
    """
    count = len(plan.misses)
    gather_rows(pool, plan.misses, destination[plan.first_slot : plan.first_slot + count])
    buffer.commit()
    return count * pool.shape[1]
