# SPDX-License-Identifier: Apache-2.0
"""Prometheus text as plain numbers: what an engine's ``/metrics`` says, summed over its labels."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
IN_FLIGHT, HELD = "tidal:transfers_in_flight", "tidal:pages_held"

Series = Mapping[str, float]


def parse_series(text: str, prefixes: tuple[str, ...] = ("vllm:", "tidal:")) -> dict[str, float]:
    """Return the series whose name starts with a prefix; what cannot be read is left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith(prefixes):
            series, _, value = line.rpartition(" ")
            name = series.split("{")[0]
            with contextlib.suppress(ValueError):
                found[name] = found.get(name, 0.0) + float(value)
    return found


def work_left(series: Series) -> dict[str, int]:
    """Return what an engine that shall stop still does: empty where it is idle.

    Pages that it holds for a peer count, too: their request has ended here, but not yet there.
    """
    named = {"running": RUNNING, "waiting": WAITING, "transfers": IN_FLIGHT, "pages held": HELD}
    return {name: int(series[key]) for name, key in named.items() if series.get(key, 0.0) > 0}
