# SPDX-License-Identifier: Apache-2.0
"""The first thing that runs of ``tidal``: loads the commands, and hands over to them.

Loading takes half a second, in which nothing has been started; Ctrl-C in that time ends the process without a word.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 130


def main() -> None:
    """Run the command that the command line names."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else whoever started us wants it ignored
        signal.signal(signal.SIGINT, _end)
    from tidal_connector.cli.main import app

    signal.signal(signal.SIGINT, before)
    app(prog_name="tidal")


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """End at once: an exception would come out of somebody's import, as a traceback of it."""
    del number, frame
    os._exit(_INTERRUPTED)
