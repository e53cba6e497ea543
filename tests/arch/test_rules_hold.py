# SPDX-License-Identifier: Apache-2.0
"""Every file of the project obeys every rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.arch import rules
from tests.arch.source import ROOT, Module, modules, tracked_files

SOURCE_ENDINGS = (".py", ".pyi", ".cpp", ".h", ".cc", ".sh", "Makefile", ".ci/run")


@pytest.mark.parametrize(
    "rule",
    [
        rules.floors,
        rules.words_are_plain,
        rules.single_importers,
        rules.nothing_executable,
        rules.environment_in_config_only,
        rules.documented,
    ],
)
def test_package(rule: Callable[[Module], list[str]]) -> None:
    assert _violations(rule, modules("tidal_connector")) == []


@pytest.mark.parametrize("rule", [rules.nothing_executable, rules.environment_in_config_only])
def test_examples(rule: Callable[[Module], list[str]]) -> None:
    assert _violations(rule, modules("examples")) == []


def test_no_probing_below_the_host() -> None:
    below = [module for module in modules("tidal_connector") if rules.FLOORS.get(module.room, 9) <= 3]
    assert len(below) >= 6
    assert _violations(rules.no_probing, below) == []


@pytest.mark.parametrize("rule", [rules.no_machine_names, rules.no_blanket_ignores])
def test_tracked_text(rule: Callable[[str, str], list[str]]) -> None:
    assert [line for path, text in _texts(tracked_files()) for line in rule(path, text)] == []


def test_sources_are_licensed() -> None:
    sources = [path for path in tracked_files() if path.endswith(SOURCE_ENDINGS)]
    assert [line for path, text in _texts(sources) for line in rules.licensed(path, text)] == []


def test_native_code_reads_no_environment() -> None:
    native = [
        path for path in tracked_files() if path.startswith(("csrc/", "ops_ascendc/")) and path.endswith((".cpp", ".h"))
    ]
    assert native
    assert [line for path, text in _texts(native) for line in rules.no_getenv_in_native_code(path, text)] == []


def _violations(rule: Callable[[Module], list[str]], files: list[Module]) -> list[str]:
    return [line for module in files for line in rule(module)]


def _texts(paths: list[str]) -> list[tuple[str, str]]:
    """Path and text of each file that is text."""
    found = []
    for path in paths:
        raw = (ROOT / path).read_bytes()
        if b"\0" not in raw:
            found.append((path, raw.decode("utf-8")))
    return found
