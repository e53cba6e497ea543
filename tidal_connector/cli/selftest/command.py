# SPDX-License-Identifier: Apache-2.0
"""``tidal selftest``: options and exit status; the work is beside this file and imported late."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tidal_connector.cli.ends import (
    ALL_ENDED,
    JsonFile,
    ReportCommand,
    check_json_file,
    clear_ends,
    report_console,
    write_json,
)

if TYPE_CHECKING:
    from tidal_connector.cli.selftest.device import TestDevice

selftest = typer.Typer(no_args_is_help=True, help="Prove on this machine's device what simulations proved elsewhere.")

_ONLY = "operators, bandwidth or answers; repeatable: only these. All three if not said."


@selftest.callback()
def _group() -> None:
    """Prove on this machine's device what simulations proved elsewhere."""


@selftest.command(cls=ReportCommand)
def npu(
    only: Annotated[list[str] | None, typer.Option(help=_ONLY)] = None,
    device: Annotated[int, typer.Option(help="Which NPU, of those that are visible.", min=0)] = 0,
    pool: Annotated[str, typer.Option(help="Host pool from which random rows are gathered.")] = "4GiB",
    engine_pool: Annotated[str, typer.Option(help="Host pool of the engine that is compared.")] = "1GiB",
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer calls, rounds and prompts.")] = False,
    json_file: JsonFile = None,
    keep_logs: Annotated[Path | None, typer.Option(help="Write the engines' logs here and keep them.")] = None,
) -> None:
    """Both operators against their definition, the gather from the host pool, and an engine with the pool beside one
    without.

    Exit status 0: all is as it must be; 1: something is not, or could not be done; 2: there is no NPU, CANN or operator
    package, or an option is wrong.
    """
    with clear_ends(ALL_ENDED):
        from tidal_connector.cli.selftest.run import PARTS, SelfTestOptions, run_selftest
        from tidal_connector.cli.selftest.worker import Stuck
        from tidal_connector.errors import ConfigError

        unknown = [name for name in only or () if name not in PARTS]
        if unknown:
            raise ConfigError(f"--only {unknown[0]}: expected {', '.join(PARTS)}")
        check_json_file(json_file)
        options = SelfTestOptions(
            only=tuple(only or PARTS),
            pool=pool,
            engine_pool=engine_pool,
            seed=seed,
            quick=quick,
            keep_logs=keep_logs,
        )
        try:
            found = run_selftest(options, lambda: _open(device), report_console(json_file))
        except Stuck as error:
            typer.echo(f"tidal: {error}", err=True)
            _leave(1)
        write_json(found, json_file)
        status = 0 if found.passed else 1
        if found.stuck:
            _leave(status)
    raise typer.Exit(status)


def _open(index: int) -> TestDevice:
    from tidal_connector.errors import DeviceMissing

    try:
        # With torch_npu installed and CANN not, torch itself cannot be imported: it loads such extensions by itself.
        from tidal_connector.cli.selftest.npu import open_npu
    except ModuleNotFoundError as error:
        raise DeviceMissing(
            f"{error}: {sys.executable} is not the Python of an engine; install vllm-ascend for it, or run tidal where "
            "that is installed"
        ) from None
    except (ImportError, OSError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise DeviceMissing(f"torch cannot be imported: {text}; source the set_env.sh of the CANN toolkit") from None
    return open_npu(index)


def _leave(status: int) -> NoReturn:
    """End the process without waiting for the device's thread, which a call that never returns holds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
