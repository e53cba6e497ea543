# SPDX-License-Identifier: Apache-2.0
"""``tidal bench``: options and exit statuses; the work is beside this file and imported late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
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

bench = typer.Typer(help="Benchmarks; alone, it runs all of them.")

KeepLogs = Annotated[Path | None, typer.Option(help="Write the processes' logs here and keep them.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw a picture: a .png, .svg or .pdf file.")]


@bench.callback(invoke_without_command=True)
def run_all(context: typer.Context) -> None:
    """Run every benchmark with its defaults where none is named."""
    if context.invoked_subcommand is None:
        gather()
        transfer()
        prefill_overhead()
        decode()
        capacity()


@bench.command(cls=ReportCommand)
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
    keep_logs: KeepLogs = None,
) -> None:
    """Prefill time while KV is pushed to a decode engine, over that of an engine without the connector.

    Exit status 1 if the median ratio is above 1.10.
    """
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
    with clear_ends(ALL_ENDED):
        check_json_file(json_file)
        found = run_overhead(options, report_console(json_file))
        write_json(found, json_file)
    if found.shortcomings():
        raise typer.Exit(1)


@bench.command(cls=ReportCommand)
def transfer(
    layers: Annotated[int, typer.Option(help="Layers, each pushed as one batch.")] = 61,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 3000,
    runs: Annotated[int, typer.Option(help="Timed runs of each case.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Layer pushes by Mooncake between two processes, as a ratio to a plain socket in the same run."""
    from tidal_connector.cli.bench.transfer import TransferOptions, run_transfer

    with clear_ends(ALL_ENDED):
        check_json_file(json_file)
        found = run_transfer(TransferOptions(layers=layers, tokens=tokens, runs=runs), report_console(json_file))
        write_json(found, json_file)


@bench.command(cls=ReportCommand)
def gather(
    pool: Annotated[str, typer.Option(help="Size of the pool; hugepages are added for it as root.")] = "2GiB",
    top_k: Annotated[int, typer.Option(help="Rows that a request selects in each step.")] = 2048,
    repetitions: Annotated[int, typer.Option(help="Timed rounds of each case.")] = 40,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Finding and copying what attention selects, beside memcpy, torch and numpy; no engine.

    Exit status 1 if the gather is below 0.70 of memcpy, a ratio to torch or numpy below 3, or the time to resolve
    a row varies by more than 1.3 x over contexts of 8K to 1M.
    """
    from tidal_connector.cli.bench.gather import GatherOptions, run_gather
    from tidal_connector.cli.bench.plot import check_plot_file

    with clear_ends(ALL_ENDED):
        check_json_file(json_file)
        check_plot_file(plot)
        options = GatherOptions(pool=pool, top_k=top_k, repetitions=repetitions, plot=plot)
        found = run_gather(options, report_console(json_file))
        write_json(found, json_file)
    if found.shortcomings():
        raise typer.Exit(1)


@bench.command(cls=ReportCommand)
def decode(
    arch: Annotated[Literal["v32", "glm", "both"], typer.Option(help="Architecture of the checkpoints.")] = "both",
    batch: Annotated[
        list[int] | None, typer.Option(help="Requests that decode at once; repeatable; 1, 4 and 8 where not said.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 4000,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 33,
    repetitions: Annotated[int, typer.Option(help="Timed rounds of each engine at batch 8; small ones get more.")] = 5,
    layers: Annotated[int, typer.Option(help="Layers of the checkpoint.")] = 8,
    top_k: Annotated[int, typer.Option(help="Rows that attention selects.")] = 256,
    slots: Annotated[int | None, typer.Option(help="selection.slots; twice top-k where not said.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the checkpoint and the KV.")] = "float32",
    json_file: JsonFile = None,
    plot: PlotFile = None,
    keep_logs: KeepLogs = None,
) -> None:
    """Time per output token with the latents in the host pool, over that with all of them on the device.

    The engines of a model run side by side; one decodes at a time, in turn. Exit status 1 if the median ratio is above
    1.05 at any batch size, or prefetch does not pay where layers share a selection.
    """
    from tidal_connector.cli.bench.decode import DecodeOptions, run_decode
    from tidal_connector.cli.bench.plot import check_plot_file

    asked = DecodeOptions(
        archs=("v32", "glm") if arch == "both" else (arch,),
        context=context,
        layers=layers,
        top_k=top_k,
        slots=slots,
        dtype=dtype,
        tokens=tokens,
        repetitions=repetitions,
        keep_logs=keep_logs,
        plot=plot,
    )
    options = msgspec.structs.replace(asked, batches=tuple(batch or asked.batches))
    with clear_ends(ALL_ENDED):
        check_json_file(json_file)
        check_plot_file(plot)
        found = run_decode(options, report_console(json_file))
        write_json(found, json_file)
    if found.shortcomings():
        raise typer.Exit(1)


@bench.command(cls=ReportCommand)
def capacity(
    fit: Annotated[int, typer.Option(help="Requests that fit with all latents on the device; sets the budget.")] = 2,
    requests: Annotated[int, typer.Option(help="Requests that are sent at once.")] = 24,
    output: Annotated[int, typer.Option(help="Tokens of each answer; the prompt has the rest of 16 x slots.")] = 640,
    arch: Annotated[Literal["v32", "glm"], typer.Option(help="Architecture of the checkpoint.")] = "v32",
    layers: Annotated[int, typer.Option(help="Layers of the checkpoint.")] = 4,
    top_k: Annotated[int, typer.Option(help="Rows that attention selects.")] = 64,
    slots: Annotated[int | None, typer.Option(help="selection.slots; twice top-k where not said.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the checkpoint and the KV.")] = "bfloat16",
    json_file: JsonFile = None,
    plot: PlotFile = None,
    keep_logs: KeepLogs = None,
) -> None:
    """Requests at once, and output tokens per second, that one device KV budget serves with and without the host pool.

    Both engines get the same budget and requests; vLLM's --max-num-seqs is what the layout lets the budget hold. Exit
    status 1 if fewer than 0.9 of that run at once, or throughput is not twice as large.
    """
    from tidal_connector.cli.bench.capacity import CapacityOptions, run_capacity
    from tidal_connector.cli.bench.plot import check_plot_file

    options = CapacityOptions(
        fit=fit,
        requests=requests,
        output=output,
        layers=layers,
        top_k=top_k,
        slots=slots,
        arch=arch,
        dtype=dtype,
        keep_logs=keep_logs,
        plot=plot,
    )
    with clear_ends(ALL_ENDED):
        check_json_file(json_file)
        check_plot_file(plot)
        found = run_capacity(options, report_console(json_file))
        write_json(found, json_file)
    if found.shortcomings():
        raise typer.Exit(1)


@bench.command(cls=ReportCommand)
def rollout(
    engines: Annotated[int, typer.Option(help="Engines of each role; 1 for --real, which then uses a surge.")] = 0,
    clients: Annotated[int, typer.Option(help="Clients that ask at once.", min=1)] = 8,
    real: Annotated[bool, typer.Option("--real", help="vLLM engines with a tiny model instead of stand-ins.")] = False,
    model: Annotated[Path | None, typer.Option(help="--real: take this checkpoint instead of making one.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="apply, agent, etcd, mixed (an agent, then etcd), never-ready, wrong or layout; repeatable; "
            "all but mixed (--real: apply) where not said."
        ),
    ] = None,
    no_etcd: Annotated[bool, typer.Option("--no-etcd", help="A folder as the registry instead of etcd.")] = False,
    keep: Annotated[Path | None, typer.Option(help="Work in this folder and keep it: logs, records, data.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Rollouts under load: upgrades, returns, killed agents, a killed etcd, bad revisions; no client may notice.

    Exit status 1 if a request failed, an answer was wrong, or a rollout ended otherwise than it should.
    """
    from tidal_connector.cli.bench.rollout import RolloutOptions, run_rollout

    options = RolloutOptions(
        engines=engines or (1 if real else 2),
        clients=clients,
        real=real,
        etcd=not no_etcd,
        only=tuple(only or ()),
        model=model,
        keep=keep,
    )
    with clear_ends(ALL_ENDED):
        check_json_file(json_file)
        found = run_rollout(options, report_console(json_file))
        write_json(found, json_file)
    if found.shortcomings():
        raise typer.Exit(1)


@bench.command(cls=ReportCommand)
def proxy(
    requests: Annotated[int, typer.Option(help="Timed requests of each kind, each way.", min=2)] = 400,
    streams: Annotated[int, typer.Option(help="Streams at once.", min=1)] = 500,
    engines: Annotated[int, typer.Option(help="Engine stand-ins of each role.", min=1)] = 2,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.", min=16)] = 512,
    tokens: Annotated[int, typer.Option(help="Tokens of each stream.", min=2)] = 40,
    token_ms: Annotated[float, typer.Option(help="Milliseconds between two tokens of a stream.", min=0)] = 100.0,
    policy: Annotated[
        Literal["least_tokens", "prefix_affinity", "random"], typer.Option(help="How the proxy chooses engines.")
    ] = "least_tokens",
    json_file: JsonFile = None,
    keep_logs: KeepLogs = None,
) -> None:
    """What a request takes longer through the proxy than by a direct connection, and many streams at once.

    Engine stand-ins, the proxy and the client are processes on the same cores. Exit status 1 if the median is more than
    3 ms longer, or a stream fails.
    """
    from tidal_connector.cli.bench.proxy import ProxyOptions, run_proxy_bench

    options = ProxyOptions(
        requests=requests,
        streams=streams,
        engines=engines,
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        token_ms=token_ms,
        policy=policy,
        keep_logs=keep_logs,
    )
    with clear_ends(ALL_ENDED):
        check_json_file(json_file)
        found = run_proxy_bench(options, report_console(json_file))
        write_json(found, json_file)
    if found.shortcomings():
        raise typer.Exit(1)
