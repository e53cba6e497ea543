# SPDX-License-Identifier: Apache-2.0
"""The simulated kernels, built once for the session, and the summary of what they did."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from tests.ops_ascendc.build import RELEASE, build
from tests.ops_ascendc.kernels import Kernels
from tests.ops_ascendc.tally import Tally

TALLY = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count."""
    config.stash[TALLY] = Tally()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what the kernels did in this run, if they ran."""
    tally = config.stash[TALLY]
    if tally.lines or tally.coverage:
        terminalreporter.section("AscendC kernels in simulation")
        console = Console(file=terminalreporter._tw._file, width=150)
        if tally.lines:
            console.print(tally.table())
        for word in tally.words():
            terminalreporter.write_line(word)


@pytest.fixture(scope="session")
def tally(request: pytest.FixtureRequest) -> Tally:
    """Takes what the tests of this session saw."""
    return request.config.stash[TALLY]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels as they are, optimised."""
    return build(tmp_path_factory.mktemp("kernels"), RELEASE)


@pytest.fixture
def kernels(library: Path) -> Kernels:
    """The kernels on a machine of four cores."""
    return Kernels(library)
