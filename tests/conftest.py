# SPDX-License-Identifier: Apache-2.0
"""Order of the whole suite: what fails in a second runs before what takes minutes."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort unit tests first, then tests with engines, then tests that break engines."""
    items.sort(key=lambda item: 2 if item.get_closest_marker("faults") else 1 if item.get_closest_marker("e2e") else 0)
