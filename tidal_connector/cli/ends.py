# SPDX-License-Identifier: Apache-2.0
"""How a command ends: errors as one line and an exit status, results as JSON. Used by every command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from typer.core import TyperCommand

from tidal_connector.errors import ConfigError, TidalError

if TYPE_CHECKING:
    from rich.console import Console

ALL_ENDED = "everything that was started is ended"
"""What is so after an interruption of a command whose processes end with it."""

STANDARD_OUTPUT = Path("-")
"""The file that stands for standard output, as it does elsewhere."""

_JSON_HELP = "Write the result here, too; without a path to standard output, and the tables beside it."
JsonFile = Annotated[Path | None, typer.Option("--json", help=_JSON_HELP)]


@contextlib.contextmanager
def clear_ends(interrupted: str = "") -> Iterator[None]:
    """Turn an error that was raised on purpose into one message and exit status 2, an interruption into 130.

    Args:
        interrupted: what is so after an interruption, where that needs saying.
    """
    try:
        with leaves(interrupted):
            yield
    except TidalError as error:
        typer.echo(f"tidal: {error}", err=True)
        raise typer.Exit(2) from None


@contextlib.contextmanager
def leaves(behind: str) -> Iterator[None]:
    """Turn an interruption into one line and exit status 130.

    Args:
        behind: what is so, or goes on, after it: a wait may end while that which is waited for does not.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("tidal: interrupted" + (f"; {behind}" if behind else ""), err=True)
        raise typer.Exit(130) from None


class ReportCommand(TyperCommand):
    """A command whose ``--json`` may stand without a file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a ``--json`` that no file follows standard output."""
        full: list[str] = []
        for at, word in enumerate(args):
            full.append(word)
            if word == "--json" and (at + 1 == len(args) or args[at + 1].startswith("--")):
                full.append(str(STANDARD_OUTPUT))
        return super().parse_args(ctx, full)


def report_console(json_file: Path | None) -> Console:
    """Return where tables and progress go: standard error where the result itself goes to standard output."""
    from rich.console import Console

    return Console(stderr=json_file == STANDARD_OUTPUT)


def check_json_file(file: Path | None) -> None:
    """Refuse a file that could not be written, before the work of minutes is done for it.

    Raises:
        ConfigError: its folder does not exist, or it is a folder itself.
    """
    if file is not None and file != STANDARD_OUTPUT and (file.is_dir() or not file.parent.is_dir()):
        raise ConfigError(f"--json {file}: expected a file in a folder that exists")


def write_json(result: Any, file: Path | None) -> None:
    """Write a result as indented JSON, to standard output for ``-``; nothing where no file was asked for.

    Raises:
        ConfigError: the file cannot be written.
    """
    if file is None:
        return
    if file == STANDARD_OUTPUT:
        print_json(result)
        return
    try:
        file.write_bytes(_indented(result) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json {file}: {error.strerror}") from None


def print_json(result: Any) -> None:
    """Print a result as indented JSON."""
    typer.echo(_indented(result).decode())


def _indented(result: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(result))
