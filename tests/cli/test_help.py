# SPDX-License-Identifier: Apache-2.0
"""Every command explains itself in the same way, and a shell can complete it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tidal_connector.cli.main import app

TIDAL = Path(sys.executable).with_name("tidal")
TABLES = ("plan", "doctor", "status", "rollout status", "rollout history", "bench gather", "make-model")
SHELLS = [name for name in ("bash", "zsh", "fish") if shutil.which(name)]


def commands() -> Iterator[tuple[str, typer.core.TyperCommand]]:
    def below(path: str, group: object) -> Iterator[tuple[str, typer.core.TyperCommand]]:
        for name, each in sorted(getattr(group, "commands", {}).items()):
            here = f"{path} {name}".strip()
            yield here, each
            yield from below(here, each)

    yield from below("", typer.main.get_command(app))


COMMANDS = dict(commands())


def test_a_help_speaks_of_no_option_that_the_command_lacks() -> None:
    found = CliRunner().invoke(app, ["rollout", "apply", "--help"], env={"COLUMNS": "200"})
    assert "--registry" in found.stdout
    assert "--config" not in found.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_does_and_each_of_its_options_too(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    assert command.help.splitlines()[0].strip()[0].isupper()
    for parameter in command.params:
        if parameter.name == "help":
            continue
        text = getattr(parameter, "help", None) or ""
        assert text.endswith((".", "?")), f"tidal {name}: {parameter.opts}: {text!r}"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_printed_and_names_the_options(name: str) -> None:
    found = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert found.exit_code == 0
    for parameter in COMMANDS[name].params:
        longest = max(parameter.opts, key=len)
        if longest.startswith("--"):
            assert longest in found.stdout


@pytest.mark.parametrize("name", TABLES)
def test_what_prints_a_table_prints_json_too(name: str) -> None:
    command = COMMANDS.get(name)
    assert command is not None
    assert "--json" in {option for parameter in command.params for option in parameter.opts}


def complete(words: str) -> list[str]:
    """What a bash would offer for words, by the command's own answer."""
    environment = {**os.environ, "_TIDAL_COMPLETE": "complete_bash", "COMP_WORDS": words}
    environment["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    done = subprocess.run([TIDAL], env=environment, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("tidal do", ["doctor"]),
        ("tidal pla", ["plan"]),
        ("tidal plan --draf", ["--draft-tokens"]),
        ("tidal plan --format fp8", ["fp8_ds_mla"]),
        ("tidal bench cap", ["capacity"]),
    ],
)
def test_commands_options_and_choices_are_completed(words: str, offered: list[str]) -> None:
    assert complete(words) == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_is_installed_and_used_by_the_shell(shell: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{TIDAL.parent}:{os.environ['PATH']}"}
    environment.pop("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", None)
    install = [shell, "-c", "tidal --install-completion; echo done"]
    done = subprocess.run(install, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert f"{shell} completion installed" in done.stdout, done.stdout + done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file() and "tidal" in path.read_text(errors="replace")]
    assert written
    if shell == "bash":
        ask = "COMP_WORDS=(tidal doc); COMP_CWORD=1; _tidal_completion tidal doc tidal"
        used = subprocess.run(
            ["bash", "--norc", "-c", f"source {tmp_path}/.bashrc; {ask}; complete -p tidal && echo $COMPREPLY"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert used.stdout.split("\n")[-2] == "doctor", used.stdout + used.stderr
