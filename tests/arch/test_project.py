# SPDX-License-Identifier: Apache-2.0
"""The files around the code agree with one another."""

from __future__ import annotations

import re
import subprocess
import tomllib
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.arch.source import ROOT
from tidal_connector.config import TidalConfig


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _locked() -> dict[str, str]:
    lines = (ROOT / "requirements/cpu.lock").read_text().splitlines()
    return dict(_pin(line) for line in lines if line and not line.startswith("#"))


def _pin(requirement: str) -> tuple[str, str]:
    name, version = requirement.split("==")
    return _canonical(name), version


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _minimum_met(version: str, minimum: str) -> bool:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split("+", maxsplit=1)[0].split(".") if part.isdigit())

    return numbers(version) >= numbers(minimum)


def test_every_line_of_the_lock_is_an_exact_pin() -> None:
    for name, version in _locked().items():
        assert re.fullmatch(r"[0-9][0-9A-Za-z.+]*", version), f"{name}=={version}"


@pytest.mark.parametrize("extra", ["cpu", "dev"])
def test_extras_pin_what_is_locked(extra: str) -> None:
    wanted = dict(_pin(line) for line in _project()["project"]["optional-dependencies"][extra])
    locked = _locked()
    assert {name: locked.get(name) for name in wanted} == wanted


def test_base_dependencies_are_locked_at_or_above_their_minimum() -> None:
    locked = _locked()
    for line in _project()["project"]["dependencies"]:
        name, minimum = line.split(">=")
        assert _minimum_met(locked[_canonical(name)], minimum), line


def test_version_is_the_same_everywhere() -> None:
    version = _project()["project"]["version"]
    assert f'__version__ = "{version}"' in (ROOT / "tidal_connector/__init__.py").read_text()


def test_readme_shows_both_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme


def _settings(kind: type[msgspec.Struct]) -> Iterator[tuple[str, str]]:
    for name, annotation in typing.get_type_hints(kind).items():
        if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
            yield from ((f"{name}.", inner) for inner in typing.get_type_hints(annotation))
        else:
            yield "", name


def test_readme_names_every_setting_and_no_other() -> None:
    section = (ROOT / "README.md").read_text().split("## Knobs\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named: set[str] = set()
    for cell in cells:
        group = ""
        for key in re.findall(r"`([a-z_.]+)`", cell):
            group = key.rpartition(".")[0] + "." if "." in key else group
            named.add(group + key.rpartition(".")[2])
    # transfer.plane is left to tests: an engine has one plane that reaches another process.
    assert named == {group + name for group, name in _settings(TidalConfig)} - {"transfer.plane"}


def test_every_documented_target_is_listed_by_help() -> None:
    listed = subprocess.run(["make", "-s", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for target in ("setup", "demo", "test", "lint", "bench", "help"):
        assert re.search(rf"^ *make {target} ", listed, re.M), target


def test_ci_runs_make_test() -> None:
    commands = [
        line
        for line in (ROOT / ".ci/run").read_text().splitlines()
        if line and not line.startswith(("#", "set ", "cd "))
    ]
    assert commands == ["exec make --no-print-directory test"]
