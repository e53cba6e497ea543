# SPDX-License-Identifier: Apache-2.0
"""Which implementation serves an operator when the caller leaves the choice.

Any thread.
"""

from __future__ import annotations

import enum
from functools import cache

from tidal_connector.errors import NativeOpMissing
from tidal_connector.log import get_logger
from tidal_connector.ops import native

_log = get_logger(__name__)


class Implementation(enum.StrEnum):
    """Implementations of an operator."""

    NATIVE = "native"
    REFERENCE = "reference"


@cache
def default_implementation(doing: str) -> Implementation:
    """Return native where it was built, else the reference, and say once in the log what is slow then.

    Args:
        doing: what the operator does, for the log: ``gathering``.
    """
    try:
        native.load()
    except NativeOpMissing as error:
        _log.warning("%s; %s with numpy, which is several times slower", error, doing)
        return Implementation.REFERENCE
    return Implementation.NATIVE
