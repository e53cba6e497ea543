# SPDX-License-Identifier: Apache-2.0
"""Host memory: one contiguous region on the best pages that can be had, of one process or shared by several."""

from __future__ import annotations

from tidal_connector.memory.region import MemoryRegion, open_region
from tidal_connector.memory.report import RegionReport
from tidal_connector.memory.shared import Share, SharedRegion, open_shared

__all__ = ["MemoryRegion", "RegionReport", "Share", "SharedRegion", "open_region", "open_shared"]
