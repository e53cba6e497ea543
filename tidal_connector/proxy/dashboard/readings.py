# SPDX-License-Identifier: Apache-2.0
"""What the dashboard takes from an engine's ``/metrics``: a few numbers by name, and what counters gained. Pure.

The text was written by somebody else: what cannot be understood is left out, and nothing here raises for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

Reading = Mapping[str, float]
"""Values by name, without ``tidal:``, ``vllm:`` and ``_total``; the series of one name are added up."""

COUNTERS = frozenset(
    {
        "bytes_pushed",
        "bytes_received",
        "handshakes_refused",
        "selection_hits",
        "selection_misses",
        "transfers_failed",
    }
)
GAUGES = frozenset(
    {
        "kv_cache_usage_perc",
        "num_requests_running",
        "num_requests_waiting",
        "pages_quarantined",
        "pool_pages",
        "pool_pages_used",
        "selection_slots",
        "selection_slots_used",
        "transfers_in_flight",
    }
)

_NAMES = b"|".join(
    [name.encode() + b"_total" for name in sorted(COUNTERS)] + [name.encode() for name in sorted(GAUGES)]
)
# Labels may hold anything in quotes, braces too. One pass in C over the text: about 0.1 ms for 100 KB.
_LINE = re.compile(
    rb"^(?:tidal|vllm):(" + _NAMES + rb')(?:\{(?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*\})?[ \t]+([^\s]+)', re.MULTILINE
)


def parse_metrics(text: bytes) -> Reading:
    """Return the numbers of an exposition text that the dashboard shows."""
    found: dict[str, float] = {}
    for raw_name, raw_value in _LINE.findall(text):
        try:
            value = float(raw_value)
        except ValueError:
            continue
        if math.isfinite(value) and value >= 0:
            name = raw_name.decode().removesuffix("_total")
            found[name] = found.get(name, 0.0) + value
    return found


class Gains:
    """What one engine's counters gained from reading to reading; one that fell began anew, with its engine."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def since_last(self, reading: Reading) -> dict[str, float]:
        """Return the gains since the last reading; nothing for what is read for the first time."""
        gains = {}
        for name in COUNTERS & reading.keys():
            value, before = reading[name], self._last.get(name)
            if before is not None:
                gains[name] = value - before if value >= before else value
            self._last[name] = value
        return gains
