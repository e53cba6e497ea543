# SPDX-License-Identifier: Apache-2.0
"""How a command ends: errors as one line and an exit status, results as JSON files. Used by every command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer

from tidal_connector.errors import ConfigError, TidalError


@contextlib.contextmanager
def clear_ends() -> Iterator[None]:
    """Turn an error that was raised on purpose into one message and exit status 2, an interruption into 130."""
    try:
        yield
    except TidalError as error:
        typer.echo(f"tidal: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("tidal: interrupted; everything that was started is ended", err=True)
        raise typer.Exit(130) from None


def check_json_file(file: Path | None) -> None:
    """Refuse a file that could not be written, before the work of minutes is done for it.

    Raises:
        ConfigError: its folder does not exist, or it is a folder itself.
    """
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise ConfigError(f"--json {file}: expected a file in a folder that exists")


def write_json(result: Any, file: Path | None) -> None:
    """Write a result as indented JSON; nothing where no file was asked for.

    Raises:
        ConfigError: the file cannot be written.
    """
    if file is None:
        return
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json {file}: {error.strerror}") from None
