# SPDX-License-Identifier: Apache-2.0
"""``tidal serve``: becomes the engine, or supervises it where it is announced in a registry."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import typer

from tidal_connector.cluster.engine_plan import Ports, http_wanted, plan_engine
from tidal_connector.cluster.serving import (
    ServeConfig,
    engine_command,
    engine_environment,
    kv_transfer_config,
    read_serve_config,
)
from tidal_connector.cluster.supervise import Supervisor
from tidal_connector.cluster.vllm_args import has_flag
from tidal_connector.config import load_config, log_level
from tidal_connector.errors import ConfigError
from tidal_connector.ids import Role
from tidal_connector.log import configure


def run_serve(role: str, file: Path, vllm_args: Sequence[str], print_only: bool) -> None:
    """Replace this process by the engine, supervise it, or print its command line.

    Raises:
        ConfigError: the file cannot be used, or vLLM's arguments configure a connector themselves.
        Exit: a supervised engine has ended.
    """
    if has_flag(vllm_args, "--kv-transfer-config"):
        raise ConfigError("--kv-transfer-config is written by tidal serve; put the settings into the --config file")
    config = read_serve_config(file)
    if config.registry is not None and not print_only:
        configure(log_level() or "INFO")
        raise typer.Exit(Supervisor(config, Role(role), vllm_args).run())
    command = _command(config, Role(role), vllm_args)
    if print_only:
        typer.echo(shlex.join(command))
        return
    os.execvpe(command[0], command, engine_environment())


def _command(config: ServeConfig, role: Role, vllm_args: Sequence[str]) -> list[str]:
    if config.registry is not None:
        with Ports() as ports:
            return list(plan_engine(config, role, vllm_args, ports).command)
    _ = load_config(config.tidal).transfer_host  # refused here and not a minute later by the engine
    args = list(vllm_args)
    if config.http.bind:
        host, port = http_wanted(config, vllm_args)
        args += ["--host", host, "--port", str(port)]
    return engine_command(args, kv_transfer_config(config, role), config.command)
