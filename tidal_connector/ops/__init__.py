# SPDX-License-Identifier: Apache-2.0
"""Operators: one public function each, with its shape checks; ``reference`` is the definition, ``native`` the speed."""

from __future__ import annotations

from tidal_connector.ops.copy import copy_rows
from tidal_connector.ops.gather import Implementation, gather_rows
from tidal_connector.ops.gather_selection import gather_selection_kv_cache
from tidal_connector.ops.gather_selection_call import SelectionTraffic
from tidal_connector.ops.resolve import resolve
from tidal_connector.ops.resolve_types import ResolveBuffers, Resolved, SelectionBatch
from tidal_connector.ops.slots import Seats, SlotState
from tidal_connector.ops.stream import WORTH_WAKING_BYTES, CopyStream, Move, MoveSet, StreamStatistics, Waited

__all__ = [
    "WORTH_WAKING_BYTES",
    "CopyStream",
    "Implementation",
    "Move",
    "MoveSet",
    "ResolveBuffers",
    "Resolved",
    "Seats",
    "SelectionBatch",
    "SelectionTraffic",
    "SlotState",
    "StreamStatistics",
    "Waited",
    "copy_rows",
    "gather_rows",
    "gather_selection_kv_cache",
    "resolve",
]
