# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of its clock: whether something keeps it right, and whether it is being stepped just now."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

from tidal_connector.cli.doctor.facts import Clock

_UNSYNCHRONISED = 5  # what adjtimex returns then (TIME_ERROR)
_STEP_S = 0.2


class _Timex(ctypes.Structure):
    """The beginning of ``struct timex``; the kernel writes behind it, too, so there is room."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 512),
    )


def read_clock(root: Path, watch_s: float = _STEP_S) -> Clock:
    """Ask the kernel (nothing is changed), and compare wall time with monotonic time for a moment."""
    before = time.time() - time.monotonic()
    kernel = _Timex()
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(kernel))
    except (OSError, AttributeError):
        state = -1
    time.sleep(watch_s)
    stepped = time.time() - time.monotonic() - before
    source = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    try:
        name = source.read_text().strip()
    except OSError:
        name = ""
    known = state >= 0
    return Clock(state != _UNSYNCHRONISED if known else None, kernel.maxerror / 1e6 if known else 0.0, stepped, name)
