# SPDX-License-Identifier: Apache-2.0
"""Operators: one public function each, with its shape checks; ``reference`` is the definition, ``native`` the speed."""

from __future__ import annotations

from tidal_connector.ops.gather import Implementation, gather_rows

__all__ = ["Implementation", "gather_rows"]
