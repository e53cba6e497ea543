# SPDX-License-Identifier: Apache-2.0
"""A file that is not there is told in one form, whichever command was given it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidal_connector.cli.main import app
from tidal_connector.registry.settings import RegistryConfig, open_store


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["serve", "decode", "--config", "nope.toml"], "engine configuration"),
        (["proxy", "--config", "nope.toml"], "proxy configuration"),
        (["agent", "--config", "nope.toml"], "agent configuration"),
        (["status", "--config", "nope.toml"], "configuration"),
        (["drain", "decode-0", "--config", "nope.toml"], "configuration"),
        (["rollout", "history", "--config", "nope.toml"], "configuration"),
        (["doctor", "--config", "nope.toml"], "configuration"),
        (["rollout", "apply", "nope.toml"], "cluster file"),
        (["up", "nope.toml"], "cluster file"),
    ],
)
def test_a_file_that_is_not_there(arguments: list[str], kind: str) -> None:
    found = CliRunner().invoke(app, arguments)
    assert (found.exit_code, found.stderr) == (2, f"tidal: {kind} nope.toml: no such file\n")


@pytest.mark.parametrize(
    "command",
    [["status"], ["drain", "decode-0"], *(["rollout", each] for each in ("history", "status", "undo", "pause"))],
)
def test_a_registry_that_is_not_there_is_neither_made_nor_taken_for_an_empty_one(
    command: list[str], tmp_path: Path
) -> None:
    found = CliRunner().invoke(app, [*command, "--registry", f"file://{tmp_path}/r"])
    assert found.exit_code == 2
    assert f"registry.url = 'file://{tmp_path}/r': no such folder" in found.stderr
    assert not (tmp_path / "r").exists()


def test_a_cluster_without_rollouts_has_no_empty_table_for_a_history(tmp_path: Path) -> None:
    open_store(RegistryConfig(url=f"file://{tmp_path}")).close()
    found = CliRunner().invoke(app, ["rollout", "history", "--registry", f"file://{tmp_path}"])
    assert (found.exit_code, found.stdout) == (0, "nothing was ever rolled out in this cluster\n")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["status", "--config", str(tmp_path)])
    assert (found.exit_code, found.stderr) == (2, f"tidal: configuration {tmp_path}: cannot be read (Is a directory)\n")
