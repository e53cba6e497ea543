# SPDX-License-Identifier: Apache-2.0
"""Order of the whole suite: what fails in a second runs before what takes minutes, and what takes many is asked for."""

from __future__ import annotations

import signal

import pytest

# What takes longer, in the order in which it runs.
LATER = ("sanitizers", "e2e", "faults")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slow``."""
    parser.addoption("--slow", action="store_true", help="run the tests that take many minutes, too")


def pytest_configure() -> None:
    """Let the processes that tests start hear what the run itself may have been told to ignore.

    ``nohup``, and a shell that runs the tests in the background, have hangups and interruptions ignored, which children
    inherit. A handler that does nothing keeps the run as it was, and ends with each ``exec``.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort unit tests first, then the native ones once more, then tests with engines, then tests that break engines."""
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes many minutes; make test ARGS=--slow runs it, too"))
    items.sort(
        key=lambda item: max((LATER.index(mark.name) for mark in item.iter_markers() if mark.name in LATER), default=-1)
    )
