# SPDX-License-Identifier: Apache-2.0
"""Hands the tests of ``in_bed/`` to one process that imports vLLM 0.23 and vllm-ascend, and reports each of them here.

The suite itself runs on vLLM 0.32; both cannot be imported into one process. All selected tests of the folder run
together when the first of them is due, because starting up takes most of the time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_plugin.ascend.bed import run
from tests.vllm_plugin.ascend.bed.index import SourcesUnavailable
from tests.vllm_plugin.ascend.bed.sources import Sources, ensure_sources

_OUTCOMES = pytest.StashKey[dict[str, list[run.Outcome]]]()


def _unavailable(error: SourcesUnavailable) -> str:
    return f"the pinned sources of vLLM and vllm-ascend are not in .cache and cannot be fetched: {error}"


@pytest.fixture(scope="session")
def sources() -> Sources:
    """The pinned sources, fetched when they are not there."""
    try:
        return ensure_sources()
    except SourcesUnavailable as error:
        pytest.skip(_unavailable(error))


class FailedInBed(Exception):
    """A test failed in the other process; carries its text."""


class BedItem(pytest.Item):
    """One test function of the folder; its parameters are run together."""

    def runtest(self) -> None:
        outcomes = self._outcomes()[self.nodeid]
        failed = [each for each in outcomes if each.outcome == "failed"]
        if failed:
            raise FailedInBed("\n\n".join(f"{each.node}\n{each.text}" for each in failed))
        if all(each.outcome == "skipped" for each in outcomes):
            pytest.skip(outcomes[0].text)

    def _outcomes(self) -> dict[str, list[run.Outcome]]:
        stash = self.config.stash
        if _OUTCOMES not in stash:
            nodes = [item.nodeid for item in self.session.items if isinstance(item, BedItem)]
            try:
                stash[_OUTCOMES] = run.run_nodes(nodes)
            except SourcesUnavailable as error:
                stash[_OUTCOMES] = {node: [run.Outcome(node, "skipped", _unavailable(error), 0.0)] for node in nodes}
        return stash[_OUTCOMES]

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, FailedInBed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


class BedFile(pytest.File):
    """One file of the folder, read without being imported."""

    def collect(self) -> Iterator[pytest.Item]:
        for node in ast.parse(self.path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                raise self.CollectError(f"{self.path.name}: {node.name}: tests of this folder are functions")
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                item = BedItem.from_parent(self, name=node.name)
                item.add_marker(pytest.mark.contract)
                item.add_marker(pytest.mark.timeout(run.SECONDS + 300))
                yield item


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Take the files of ``in_bed`` over, except in the process that runs them."""
    if module_path.parent != run.IN_BED or parent.config.pluginmanager.has_plugin(run.PLUGIN):
        return None
    return BedFile.from_parent(parent, path=module_path)
