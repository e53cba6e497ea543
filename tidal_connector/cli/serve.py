# SPDX-License-Identifier: Apache-2.0
"""``tidal serve``: becomes a vLLM server with the connector configured."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import typer

from tidal_connector.cluster.serving import (
    engine_command,
    engine_environment,
    kv_transfer_config,
    read_serve_config,
)
from tidal_connector.errors import ConfigError
from tidal_connector.ids import Role


def run_serve(role: str, file: Path, vllm_args: Sequence[str], print_only: bool) -> None:
    """Replace this process by the engine, or print its command line.

    Raises:
        ConfigError: the file cannot be used, or vLLM's arguments configure a connector themselves.
    """
    if any(item.split("=")[0] == "--kv-transfer-config" for item in vllm_args):
        raise ConfigError("--kv-transfer-config is written by tidal serve; put the settings into the --config file")
    command = engine_command(vllm_args, kv_transfer_config(read_serve_config(file), Role(role)))
    if print_only:
        typer.echo(shlex.join(command))
        return
    os.execve(command[0], command, engine_environment())
