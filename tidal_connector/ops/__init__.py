# SPDX-License-Identifier: Apache-2.0
"""Operators: one public function each, with its shape checks; ``reference`` is the definition, ``native`` the speed."""

from __future__ import annotations

from tidal_connector.ops.gather import Implementation, gather_rows
from tidal_connector.ops.resolve import ResolveBuffers, Resolved, SelectionBatch, resolve
from tidal_connector.ops.slots import Seats, SlotState

__all__ = [
    "Implementation",
    "ResolveBuffers",
    "Resolved",
    "Seats",
    "SelectionBatch",
    "SlotState",
    "gather_rows",
    "resolve",
]
