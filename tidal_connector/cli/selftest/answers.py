# SPDX-License-Identifier: Apache-2.0
"""One small engine with its latents in the host pool and one with all of them on the device, asked the same.

The checkpoint is made for it (``modelmaker``), the engines run one after the other, so that each has the device for
itself. What is compared, and within which bounds, is the demo's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from tidal_connector.cli.bench.engines import START_S, single_engine, waiting
from tidal_connector.cli.demo.client import ask_many
from tidal_connector.cli.demo.compare import Generated, compare
from tidal_connector.cli.demo.prompts import make_prompts
from tidal_connector.cli.selftest.device import EngineNeeds
from tidal_connector.cli.selftest.report import AnswerCase
from tidal_connector.cluster.launch import wait_ready
from tidal_connector.cluster.stack import StackSettings, read_metrics

LENGTHS = (17, 129, 1000, 3000)
QUICK_LENGTHS = (17, 300)
AT_ONCE = 4

_NEW_TOKENS = 32
_FETCHED = "tidal:selection_misses_total"
_START_S = 2 * START_S  # an NPU engine compiles kernels at its first start
_KV_BYTES = 1 << 30


def compare_answers(
    needs: EngineNeeds, folder: Path, logs: Path, pool: int, seed: int, quick: bool, tell: Callable[[str], None]
) -> tuple[list[AnswerCase], int]:
    """Make a checkpoint, ask both engines, and compare each answer.

    The second result counts the rows that were fetched from the pool, so that nobody mistakes two engines without one
    for a comparison.

    Args:
        needs: what an engine on the device wants.
        folder: an empty one, for the checkpoint and scratch files.
        logs: folder for the engines' logs.
        pool: bytes of the host pool.
        seed: of checkpoint and prompts.
        quick: fewer and shorter prompts.
        tell: what is being done.

    Raises:
        TidalError: an engine did not start, or did not answer.
    """
    from tidal_connector.modelmaker.api import make_model

    tell("making a small checkpoint")
    make_model(folder / "model", arch="v32", topk=needs.topk, dtype=needs.dtype, seed=seed)
    prompts = make_prompts(QUICK_LENGTHS if quick else LENGTHS, seed, shared_prefix=False)
    scratch = folder / "scratch"
    scratch.mkdir()
    settings = StackSettings(
        model=folder / "model",
        logs=logs,
        dtype=needs.dtype,
        block_size=needs.block_size,
        max_num_seqs=AT_ONCE,
        kv_bytes=_KV_BYTES,
        vllm_args=needs.vllm_args,
        environment={"TMPDIR": str(scratch), **needs.environment},
    )
    plain, _ = _ask("latents on the device", settings, None, prompts, tell)
    pooled = {"offload": "on", "pool": {"bytes": pool}}
    held, fetched = _ask("latents in the pool", settings, pooled, prompts, tell)
    cases = [
        AnswerCase(len(prompt), at_once, difference.tokens_equal, difference.logprob)
        for at_once in (1, AT_ONCE)
        for prompt, mine, its in zip(prompts, held[at_once], plain[at_once], strict=True)
        for difference in [compare(mine, its)]
    ]
    return cases, fetched


def _ask(
    name: str,
    settings: StackSettings,
    tidal: Mapping[str, object] | None,
    prompts: list[list[int]],
    tell: Callable[[str], None],
) -> tuple[dict[int, list[Generated]], int]:
    """Return the answers of one engine, alone and several at once, and the rows that it fetched from a pool."""
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(single_engine(name.replace(" ", "-"), settings, tidal))
        wait_ready([engine], _START_S, waiting(tell))
        found = {}
        for at_once in (1, AT_ONCE):
            tell(f"{name}: {len(prompts)} prompts, {at_once} at once")
            found[at_once] = ask_many(engine.url, prompts, _NEW_TOKENS, at_once)
        return found, int(read_metrics(engine).get(_FETCHED, 0))
