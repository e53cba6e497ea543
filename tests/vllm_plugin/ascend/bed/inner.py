# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin of the process that runs inside the bed: stand-ins first, and one line of JSON per outcome."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.vllm_plugin.ascend.bed import standin
from tests.vllm_plugin.ascend.bed.sources import ensure_sources

NAME = "tidal-bed"


class Outcomes:
    """Writes what becomes of each test, as it becomes known."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, node: str, outcome: str, text: str, seconds: float) -> None:
        with self._path.open("a") as file:
            print(json.dumps([node, outcome, text, seconds]), file=file)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            shown = "\n".join([text, *(f"--- {name}\n{body}" for name, body in report.sections)])
            self._write(report.nodeid, report.outcome, shown if report.failed else text, report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", report.longreprtext, 0.0)


def join_groups() -> None:
    """Join the process groups, before a test imports the worker's modules: they put a class for HCCL in their place."""
    import torch

    from tests.vllm_plugin.ascend.bed.world import BLOCK, Shape, engine

    with engine(Shape(), ("own",), torch.float16, BLOCK, 1):
        pass


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the file that the outcomes are written to."""
    parser.addoption("--bed-outcomes", type=Path, help="write one line of JSON for each outcome")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Install the stand-ins before any test module is imported, then patch vLLM as vllm-ascend's plugin does."""
    standin.install(ensure_sources().operator_schemas)
    from vllm_ascend.utils import adapt_patch

    adapt_patch(is_global_patch=True)
    import vllm_ascend.ops  # noqa: F401  # its own modules import one another in a circle that ends well only from here

    join_groups()

    path = config.getoption("--bed-outcomes")
    if path:
        config.pluginmanager.register(Outcomes(path))
