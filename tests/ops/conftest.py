# SPDX-License-Identifier: Apache-2.0
"""What the tests of several operators share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from tidal_connector.ops import native
from tidal_connector.ops.implementation import default_implementation


@pytest.fixture
def no_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The native module cannot be loaded."""
    monkeypatch.setenv("TIDAL_NATIVE", "missing.so")
    monkeypatch.setattr(native, "load", cache(native.load.__wrapped__))  # the module that is loaded stays as it is
    default_implementation.cache_clear()
    yield
    default_implementation.cache_clear()
