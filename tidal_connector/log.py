# SPDX-License-Identifier: Apache-2.0
"""The package's loggers, all below ``tidal``, and the one place that formats them.

Records go to standard error, as vLLM's own do, so that an engine's log stays one stream; ``log.file`` parts them.
"""

from __future__ import annotations

import logging
import sys

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_DATE = "%m-%d %H:%M:%S"


def get_logger(module: str) -> logging.Logger:
    """Return the logger of a module: ``tidal_connector.decode.receiver`` becomes ``tidal.decode.receiver``."""
    return logging.getLogger("tidal" + module.removeprefix("tidal_connector"))


def configure(level: str = "INFO", path: str | None = None) -> None:
    """Give the ``tidal`` logger one handler, on standard error or on a file.

    Args:
        level: a level name of :mod:`logging`.
        path: file to append to; standard error where None.

    Calling it again replaces the handler, so every process of an engine may call it.
    """
    root = logging.getLogger("tidal")
    handler: logging.Handler = logging.FileHandler(path) if path else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, _DATE))
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    root.propagate = False
