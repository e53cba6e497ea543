# SPDX-License-Identifier: Apache-2.0
"""``tidal plan``: options, exit status; the work is beside this file and imported late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tidal_connector.cli.ends import clear_ends, print_json
from tidal_connector.config import parse_bytes
from tidal_connector.errors import ConfigError

_LEAST = 1 << 20


def _size(option: str, text: str) -> int:
    """Return a size of memory; a number so small was meant in another unit.

    Raises:
        ConfigError: it is no size, or cannot be meant.
    """
    found = parse_bytes(option, text)
    if found < _LEAST:
        raise ConfigError(f'{option} {text}: that is {found} bytes; give the unit, as in "64GiB"')
    return found


def plan(
    model_config: Annotated[
        str,
        typer.Argument(
            help="A config.json, its folder, or deepseek-v3.2, glm-5.1, glm-5.2, deepseek-v4-flash, deepseek-v4-pro."
        ),
    ],
    hbm: Annotated[str, typer.Option(help="Memory of one device, such as 64GiB.")],
    dram: Annotated[str, typer.Option(help="Memory of the decode host, such as 1TiB.")],
    context: Annotated[int, typer.Option(help="Tokens of a request, prompt and answer.", min=1)],
    concurrency: Annotated[int, typer.Option(help="Requests at once on one engine.", min=1)],
    latent_format: Annotated[
        Literal["bf16", "fp8_ds_mla", "int8", "float32"], typer.Option("--format", help="Of the latent rows.")
    ] = "bf16",
    index_format: Annotated[
        Literal["fp8", "int8", "bf16"], typer.Option(help="Of the index keys; vllm-ascend keeps int8 or bf16.")
    ] = "fp8",
    weights: Annotated[str, typer.Option(help="Device memory that the weights take, on one device.")] = "0",
    utilization: Annotated[float, typer.Option(help="vLLM's --gpu-memory-utilization.", min=0.01, max=1.0)] = 0.92,
    dram_share: Annotated[float, typer.Option(help="Share of --dram that pools may take.", min=0.01, max=1.0)] = 0.85,
    engines: Annotated[int, typer.Option(help="Decode engines that share the host.", min=1)] = 1,
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block; 128, V4: 256.", min=1)] = None,
    slots: Annotated[int | None, typer.Option(help="selection.slots; twice top-k if not said.", min=1)] = None,
    draft_tokens: Annotated[int, typer.Option(help="Tokens drafted per step (MTP).", min=0)] = 0,
    hit_rate: Annotated[
        float, typer.Option(help="Selected rows that are on the device already; measure it.", min=0.0, max=1.0)
    ] = 0.7,
    tpot: Annotated[float, typer.Option(help="Longest time per output token, in ms.", min=0.1)] = 50.0,
    link: Annotated[float, typer.Option(help="Host to device, in GB/s.", min=0.1)] = 50.0,
    memory: Annotated[float, typer.Option(help="The host's memory, all engines together, in GB/s.", min=0.1)] = 200.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw a picture: a .png, .svg or .pdf file.")] = None,
) -> None:
    """What a model needs of device, host and network, how many requests fit, and which limit binds where.

    Exit status 1 if the requests that were asked for do not fit.
    """
    from rich.console import Console

    from tidal_connector.cli.bench.plot import check_plot_file
    from tidal_connector.cli.plan.capacity import Question
    from tidal_connector.cli.plan.models import find_model
    from tidal_connector.cli.plan.picture import draw
    from tidal_connector.cli.plan.planned import make_plan
    from tidal_connector.cli.plan.report import show

    with clear_ends():
        check_plot_file(plot)
        model = find_model(model_config)
        size = block_size or (256 if model.compressed else 128)
        if model.compressed and size % 256:
            raise ConfigError(f"--block-size {size}: {model.name} needs a multiple of 256")
        question = Question(
            model=model,
            latent_format=latent_format,
            index_format=index_format,
            hbm=_size("--hbm", hbm),
            weights=0 if weights.strip() == "0" else _size("--weights", weights),
            utilization=utilization,
            dram=_size("--dram", dram),
            dram_share=dram_share,
            engines=engines,
            context=context,
            concurrency=concurrency,
            block_size=size,
            slots=slots,
            queries=1 + draft_tokens,
            hit_rate=hit_rate,
            tpot_s=tpot / 1e3,
            link=link * 1e9,
            memory=memory * 1e9,
        )
        found = make_plan(question)
        draw(found, plot)
        if as_json:
            print_json(found)
        else:
            show(found, Console())
    raise typer.Exit(0 if found.fits else 1)
