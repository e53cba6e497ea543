# SPDX-License-Identifier: Apache-2.0
"""Measure a checkpoint on the plain engine: how much noise it makes, and how well it notices one wrong KV row.

Run as ``python -m tidal_connector.vllm_plugin.measure_model MODEL OUT.json`` in a process of its own, with vLLM's
engine in that process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``): the measurement changes the scheduler's token budget
between runs and overwrites rows of the KV cache in place. No connector takes part.

Owns the engine; takes a model directory; hands on one JSON object (see :func:`measure`). One thread.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

BLOCK = 16
CHUNKS = (2048, 512, 64)
STEPS = 32
PROBE_STEPS = 8
TOP = 5
_LONG = 2257  # more than one chunk of the largest size
_BATCH_LENGTHS = (15, 64, 65, 129, 300, 517, 800, 1000)
_ENDING = 64
_BEGINNINGS = 4
_PROSE = (
    "the low road to an old harbour is dry by noon and boats wait there for rain while five people count grey stones, "
    "ask for news, mend nets, boil tea; then all go home when lamps are lit over 17 doors and no one sings"
)


@dataclass(frozen=True, slots=True)
class Trace:
    """Greedy tokens of one request and, for each step, the logprobs of the likeliest tokens by token id."""

    tokens: list[int]
    logprobs: list[dict[int, float]]


@dataclass(slots=True)
class _Selections:
    """For each layer, the positions that the last query of the first recorded step attended to."""

    recording: bool = False
    rows: dict[int, list[int]] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)


def prompt_text(length: int, seed: int) -> list[int]:
    """Return a prompt of ``length`` byte tokens of plain words."""
    rng = random.Random(seed)
    words = _PROSE.split()
    text = ""
    while len(text) < length:
        text += rng.choice(words) + rng.choice((" ", " ", " ", ", ", ".\n"))
    return list(text[:length].encode())


def largest_difference(reference: Trace, other: Trace) -> float:
    """Return the largest change of a logprob (nats) among each step's five likeliest tokens.

    Steps count up to the first different token, that step included: later steps have other contexts. A token that
    is missing among the other trace's logprobs counts as if it were as likely as the least likely one there.
    """
    largest = 0.0
    for step, expected in enumerate(reference.logprobs):
        got = other.logprobs[step]
        least = min(got.values())
        likeliest = sorted(expected, key=lambda token: -expected[token])[:TOP]
        changes = [abs(expected[token] - got.get(token, least)) for token in likeliest]
        if any(math.isnan(change) for change in changes):
            return math.nan
        largest = max(largest, *changes)
        if reference.tokens[step] != other.tokens[step]:
            break
    return largest


class Bench:
    """One engine in this process, and the few things that the measurement does with it."""

    def __init__(self, model: str, dtype: str) -> None:
        from vllm import LLM

        self._llm: Any = LLM(  # the parts that are measured are not in its published types
            model,
            dtype=dtype,  # type: ignore[arg-type]  # one of its literals, by the caller's table
            enforce_eager=True,
            kv_cache_memory_bytes=256 << 20,
            max_num_seqs=8,
            max_model_len=4096,
            max_num_batched_tokens=max(CHUNKS),
            block_size=BLOCK,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            max_logprobs=40,
            seed=0,
            disable_log_stats=True,
        )
        core = self._llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]  # that of one process has it
        self._scheduler = core.scheduler
        self._seen = _Selections()
        self._caches: dict[int, Any] = {}
        self._llm.apply_model(self._hook)

    def _hook(self, model: Any) -> None:
        for number, layer in enumerate(model.model.layers):
            self._caches[number] = layer.self_attn.mla_attn.mla_attn
            layer.self_attn.register_forward_hook(self._recorder(number, layer.self_attn))

    def _recorder(self, number: int, attention: Any) -> Callable[..., None]:
        def record(*_: Any) -> None:
            seen = self._seen
            if not seen.recording or number in seen.rows:
                return
            request = self._scheduler.running[0]
            length = request.num_prompt_tokens
            if attention.indexer is not None:
                chosen = attention.indexer.topk_indices_buffer[0].tolist()
                seen.rows[number] = sorted(position for position in chosen if 0 <= position < length)
            elif attention.is_v32:
                seen.rows[number] = seen.rows[number - 1]  # a follower reads what its leader chose
            else:
                seen.rows[number] = list(range(length))
            seen.blocks = list(self._scheduler.kv_cache_manager.get_block_ids(request.request_id)[0])

        return record

    def forget(self) -> None:
        """Drop vLLM's prefix cache, so that the next run computes everything."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache; a request is still running")

    def run(self, prompts: list[list[int]], chunk: int, steps: int) -> list[Trace]:
        """Run prompts at once, greedily, with at most ``chunk`` tokens a step."""
        from vllm import SamplingParams

        self._scheduler.max_num_scheduled_tokens = chunk
        parameters = SamplingParams(temperature=0.0, max_tokens=steps, logprobs=40, ignore_eos=True)
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
        return [
            Trace(
                tokens=list(output.outputs[0].token_ids),
                logprobs=[{t: lp.logprob for t, lp in step.items()} for step in output.outputs[0].logprobs],
            )
            for output in outputs
        ]

    def select(self, prompt: list[int]) -> tuple[Trace, dict[int, list[int]], list[int]]:
        """Run a cached prompt; return its trace, what each layer selected at its last token, and its blocks."""
        self._seen = _Selections(recording=True)
        trace = self.run([prompt], max(CHUNKS), PROBE_STEPS)[0]
        self._seen.recording = False
        return trace, dict(self._seen.rows), list(self._seen.blocks)

    def row(self, layer: int, blocks: list[int], position: int) -> torch.Tensor:
        """Return the KV row of a position as a view of the cache: ``[576]`` of the model's dtype."""
        cache: torch.Tensor = self._caches[layer].kv_cache
        flat = cache.reshape(cache.shape[0], BLOCK, cache.shape[-1])
        return flat[blocks[position // BLOCK], position % BLOCK]


def measure(model: str, dtype: str) -> dict[str, Any]:
    """Measure a checkpoint; return plain data for ``tidal_model.json`` (logprobs in nats, times in seconds)."""
    started = time.monotonic()
    bench = Bench(model, dtype)
    ready = time.monotonic()
    result: dict[str, Any] = {"noise": _noise(bench), "sensitivity": _sensitivity(bench), "reach": _reach(bench)}
    result["engine_start_s"] = round(ready - started, 1)
    result["measured_s"] = round(time.monotonic() - ready, 1)
    return result


def _noise(bench: Bench) -> dict[str, Any]:
    long = prompt_text(_LONG, 1)
    group = [prompt_text(length, 10 + i) for i, length in enumerate(_BATCH_LENGTHS)]
    bench.forget()
    base = bench.run([long], CHUNKS[0], STEPS)[0]
    alone = []
    for prompt in group:
        bench.forget()
        alone.append(bench.run([prompt], CHUNKS[0], STEPS)[0])

    cases: dict[str, list[tuple[Trace, Trace]]] = {}
    for chunk in CHUNKS[1:]:
        bench.forget()
        cases[f"chunk {chunk}"] = [(base, bench.run([long], chunk, STEPS)[0])]
    for chunk in (CHUNKS[0], CHUNKS[-1]):
        bench.forget()
        together = bench.run(group, chunk, STEPS)
        cases[f"batch 8, chunk {chunk}"] = list(zip(alone, together, strict=True))

    pairs = [pair for case in cases.values() for pair in case]
    everything = [base, *alone]
    return {
        "largest": max(largest_difference(a, b) for a, b in pairs),
        "by_case": {name: max(largest_difference(a, b) for a, b in case) for name, case in cases.items()},
        "sequences": len(pairs),
        "sequences_with_equal_tokens": sum(a.tokens == b.tokens for a, b in pairs),
        "smallest_greedy_margin": min(_margin(step) for trace in everything for step in trace.logprobs),
        "prompt_tokens": [_LONG, *_BATCH_LENGTHS],
        "new_tokens": STEPS,
    }


def _margin(step: dict[int, float]) -> float:
    first, second = sorted(step.values(), reverse=True)[:2]
    return first - second


def _sensitivity(bench: Bench) -> dict[str, Any]:
    # One token past a whole block: the prefix cache then holds all rows but the last one, and a run that follows
    # computes that one token and its successors from the cache, as a decode engine does from rows it was sent.
    prompt = prompt_text(48 * BLOCK + 1, 2)
    bench.forget()
    bench.run([prompt], CHUNKS[0], 1)
    clean, selected, blocks = bench.select(prompt)
    again = bench.run([prompt], CHUNKS[0], PROBE_STEPS)[0]
    probes: list[dict[str, Any]] = []
    for layer, rows in sorted(selected.items()):
        cached = [position for position in rows if position < len(prompt) - 1]
        for position in _spread(cached, 3):
            row = bench.row(layer, blocks, position)
            original = row.clone()
            foreign = bench.row(layer, blocks, _another(prompt, position)).clone()
            for kind, wrong in (("negated", -original), ("zeroed", 0 * original), ("foreign", foreign)):
                row.copy_(wrong)
                trace = bench.run([prompt], CHUNKS[0], PROBE_STEPS)[0]
                row.copy_(original)
                change = largest_difference(clean, trace)
                probes.append({"layer": layer, "position": position, "kind": kind, "change": change})
    return {
        "smallest": min(probe["change"] for probe in probes),
        "median": statistics.median(probe["change"] for probe in probes),
        "by_kind": {
            kind: min(probe["change"] for probe in probes if probe["kind"] == kind)
            for kind in ("negated", "zeroed", "foreign")
        },
        "without_corruption": largest_difference(clean, again),
        "prompt_tokens": len(prompt),
        "probes": probes,
    }


def _reach(bench: Bench) -> dict[str, Any]:
    """Ask the same last words after different beginnings; output that ignores the beginnings repeats itself."""
    ending = prompt_text(_ENDING, 99)
    prompts = [prompt_text(500 - _ENDING, 30 + i) + ending for i in range(_BEGINNINGS)]
    bench.forget()
    outputs = {tuple(trace.tokens) for trace in bench.run(prompts, CHUNKS[0], STEPS)}
    return {"prompts": _BEGINNINGS, "shared_ending_tokens": _ENDING, "distinct_outputs": len(outputs)}


def _another(prompt: list[int], position: int) -> int:
    """Return a position about half a prompt away that holds another token, so that its row differs in each layer."""
    cached = len(prompt) - 1
    candidates = ((position + len(prompt) // 2 + step) % cached for step in range(cached))
    return next(other for other in candidates if prompt[other] != prompt[position])


def _spread(rows: list[int], count: int) -> list[int]:
    """Return up to ``count`` of the sorted rows: early, middle and late ones."""
    if len(rows) <= count:
        return rows
    return [rows[i * (len(rows) - 1) // (count - 1)] for i in range(count)]


def main() -> None:
    """Parse the command line, measure, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    result = measure(arguments.model, arguments.dtype)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
