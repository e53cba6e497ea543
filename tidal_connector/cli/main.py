# SPDX-License-Identifier: Apache-2.0
"""``tidal``: the commands, their options and exit statuses; the work is elsewhere.

Exit status 0: done; 1: done, and the answer is no (a check failed); 2: wrong use or an error that has a clear
text; 130: interrupted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tidal_connector import __version__
from tidal_connector.cli.bench.commands import bench
from tidal_connector.cli.doctor.command import doctor
from tidal_connector.cli.drain import drain
from tidal_connector.cli.ends import ALL_ENDED, JsonFile, ReportCommand, check_json_file, clear_ends, report_console
from tidal_connector.cli.make_model import make_model
from tidal_connector.cli.plan.command import plan
from tidal_connector.cli.rollout import rollout
from tidal_connector.cli.selftest.command import selftest
from tidal_connector.cli.status import status

app = typer.Typer(
    name="tidal",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.command("make-model")(make_model)
app.command()(doctor)
app.command()(plan)
app.command()(status)
app.command()(drain)
app.add_typer(bench, name="bench")
app.add_typer(rollout, name="rollout")
app.add_typer(selftest, name="selftest")

_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def tidal(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Prefill pushes KV into decode's host pool: engines, proxy, demo and benchmarks."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def proxy(
    config: Annotated[Path | None, typer.Option(help="TOML file (configs/proxy.toml).")] = None,
    prefill: Annotated[
        list[str] | None, typer.Option(help="ID=URL[,CONTROL_HOST:PORT] of a prefill engine; repeatable.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(help="ID=URL[,CONTROL_HOST:PORT] of a decode engine; repeatable.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(help="HOST:PORT or [IPv6]:PORT to serve on, port 0: a free one; 127.0.0.1:8000 if not said."),
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(help="Where engines announce themselves: etcd://HOST:2379 or file:///FOLDER."),
    ] = None,
    policy: Annotated[
        Literal["least_tokens", "prefix_affinity", "random"] | None,
        typer.Option(help="How engines are chosen; least_tokens if not said."),
    ] = None,
) -> None:
    """OpenAI-compatible proxy: picks a prefill and a decode engine and dispatches both at once."""
    with clear_ends():
        from tidal_connector.cli.proxy import proxy_config, run_proxy

        run_proxy(proxy_config(config, prefill or [], decode or [], listen, registry, policy))


@app.command(context_settings=_PASS_ON)
def serve(
    context: typer.Context,
    role: Annotated[Literal["prefill", "decode", "both"], typer.Argument(help="What the engine does.")],
    config: Annotated[Path, typer.Option(help="TOML file (configs/prefill.toml, configs/decode.toml).")],
    print_only: Annotated[bool, typer.Option("--print", help="Show the command line instead of running it.")] = False,
) -> None:
    """A vLLM engine with the connector: tidal serve ROLE --config FILE -- VLLM_ARGUMENTS.

    With a [registry] table in FILE this process stays beside the engine: it announces it, and lets its requests finish
    before it stops it, at SIGTERM or tidal drain. Otherwise it becomes the engine.

    Exit status of the former: 0 stopped as told; 1 the engine ended by itself or never served; 2 a setting is wrong.
    """
    with clear_ends():
        from tidal_connector.cli.serve import run_serve

        run_serve(role, config, context.args, print_only)


@app.command()
def agent(
    config: Annotated[Path | None, typer.Option(help="TOML file (configs/agent.toml).")] = None,
    registry: Annotated[str, typer.Option(help="etcd://host:2379 or file:///folder; counts before the file.")] = "",
    node: Annotated[str, typer.Option(help="Name of this machine in cluster.toml; its host name if not said.")] = "",
    host: Annotated[str, typer.Option(help="Address under which others reach this machine's engines.")] = "",
    state: Annotated[Path | None, typer.Option(help="Folder for records and logs; /var/lib/tidal if not said.")] = None,
) -> None:
    """Runs on each node: starts, watches and drains the node's engines as rollouts want it."""
    with clear_ends():
        from tidal_connector.cli.agent import agent_config, run_agent

        run_agent(agent_config(config, registry, node, host, state))


@app.command()
def up(
    file: Annotated[
        Path,
        typer.Argument(help="What the cluster shall be, such as configs/cluster.toml."),
    ],
    model: Annotated[Path | None, typer.Option(help="Serve this checkpoint in place of the file's.")] = None,
    count: Annotated[int, typer.Option(help="Engines of each group, at most; 0: as many as the file says.", min=0)] = 1,
    listen: Annotated[str, typer.Option(help="127.0.0.1:PORT of the proxy.")] = "127.0.0.1:8000",
    keep: Annotated[Path | None, typer.Option(help="Work in this folder and keep it: logs, records, data.")] = None,
    until_ready: Annotated[
        bool, typer.Option("--until-ready", help="End as soon as all is ready; for checks.")
    ] = False,
) -> None:
    """A whole cluster on this machine, for development: registry, agents, engines and proxy; Ctrl-C ends everything.

    A model that is not on this machine is replaced by a small one with random weights, as in tidal demo.
    """
    with clear_ends(ALL_ENDED):
        from rich.console import Console

        from tidal_connector.cli.up import UpOptions, run_up

        run_up(UpOptions(file, model, count, listen, keep, until_ready), Console())


@app.command(cls=ReportCommand)
def demo(
    arch: Annotated[Literal["v32", "glm"], typer.Option(help="DeepSeek-V3.2, or GLM-like with index sharing.")] = "v32",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the checkpoint and the KV.")] = "float32",
    model: Annotated[Path | None, typer.Option(help="Take this checkpoint instead of making one.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block: 16, 32, 64 or 128.", min=1)] = 16,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens per step; longer prompts come in chunks.", min=1)
    ] = 2048,
    prefix_caching: Annotated[bool, typer.Option("--prefix-caching", help="Keep the KV of earlier prompts.")] = False,
    pool: Annotated[str, typer.Option(help="Size of the decode engine's host pool.")] = "256MiB",
    json_file: JsonFile = None,
    keep_logs: Annotated[Path | None, typer.Option(help="Write the processes' logs here and keep them.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter prompts.")] = False,
) -> None:
    """Two engines, a proxy and real transfers on this machine; every answer beside a single engine's."""
    with clear_ends(ALL_ENDED):
        from tidal_connector.cli.demo.run import DemoOptions, run_demo

        options = DemoOptions(
            arch=arch,
            dtype=dtype,
            model=model,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            prefix_caching=prefix_caching,
            pool=pool,
            json_file=json_file,
            keep_logs=keep_logs,
            quick=quick,
        )
        check_json_file(json_file)
        result = run_demo(options, report_console(json_file))
    raise typer.Exit(1 if result.shortcomings() else 0)
