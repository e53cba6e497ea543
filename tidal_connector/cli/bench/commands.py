# SPDX-License-Identifier: Apache-2.0
"""``tidal bench``: options and exit statuses; the work is beside this file and imported late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tidal_connector.cli.ends import check_json_file, clear_ends, write_json

bench = typer.Typer(help="Benchmarks; alone, it runs all of them.")

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result here, too.")]


@bench.callback(invoke_without_command=True)
def run_all(context: typer.Context) -> None:
    """Run every benchmark with its defaults where none is named."""
    if context.invoked_subcommand is None:
        transfer()
        prefill_overhead()


@bench.command()
def prefill_overhead(
    tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 3000,
    pairs: Annotated[int, typer.Option(help="Prompts that are timed both ways.")] = 7,
    arch: Annotated[Literal["v32", "glm"], typer.Option(help="Architecture of the checkpoint.")] = "v32",
    layers: Annotated[int | None, typer.Option(help="Layers; 6 (glm: 8) where not said.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the checkpoint and the KV.")] = "float32",
    block_size: Annotated[int, typer.Option(help="Tokens per KV block: 16, 32, 64 or 128.", min=1)] = 16,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens per step; longer prompts come in chunks.", min=1)
    ] = 2048,
    json_file: JsonFile = None,
    keep_logs: Annotated[Path | None, typer.Option(help="Write the processes' logs here and keep them.")] = None,
) -> None:
    """Prefill time while KV is pushed to a decode engine, over that of an engine without the connector.

    Exit status 1 if the median ratio is above 1.10.
    """
    from rich.console import Console

    from tidal_connector.cli.bench.overhead import OverheadOptions, run_overhead

    options = OverheadOptions(
        tokens=tokens,
        pairs=pairs,
        arch=arch,
        layers=layers,
        dtype=dtype,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        keep_logs=keep_logs,
    )
    with clear_ends():
        check_json_file(json_file)
        found = run_overhead(options, Console())
        write_json(found, json_file)
    if found.shortcomings():
        raise typer.Exit(1)


@bench.command()
def transfer(
    layers: Annotated[int, typer.Option(help="Layers, each pushed as one batch.")] = 61,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 3000,
    runs: Annotated[int, typer.Option(help="Timed runs of each case.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Layer pushes by Mooncake between two processes, as a ratio to a plain socket in the same run."""
    from rich.console import Console

    from tidal_connector.cli.bench.transfer import TransferOptions, run_transfer

    with clear_ends():
        check_json_file(json_file)
        found = run_transfer(TransferOptions(layers=layers, tokens=tokens, runs=runs), Console())
        write_json(found, json_file)
