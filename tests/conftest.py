# SPDX-License-Identifier: Apache-2.0
"""Order of the whole suite: what fails in a second runs before what takes minutes."""

from __future__ import annotations

import pytest

# What takes longer, in the order in which it runs.
LATER = ("sanitizers", "e2e", "faults")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort unit tests first, then the native ones once more, then tests with engines, then tests that break engines."""
    items.sort(
        key=lambda item: max((LATER.index(mark.name) for mark in item.iter_markers() if mark.name in LATER), default=-1)
    )
