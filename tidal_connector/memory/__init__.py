# SPDX-License-Identifier: Apache-2.0
"""Host memory: one contiguous region on the best pages that can be had."""

from __future__ import annotations

from tidal_connector.memory.region import MemoryRegion, open_region
from tidal_connector.memory.report import RegionReport

__all__ = ["MemoryRegion", "RegionReport", "open_region"]
