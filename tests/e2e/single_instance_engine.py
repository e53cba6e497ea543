# SPDX-License-Identifier: Apache-2.0
"""Run an order on one vLLM engine: ``python -m tests.e2e.single_instance_engine ORDER.json REPORT.json``.

Takes and hands on the values of ``single_instance``, as JSON. The engine lives in this process
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``) and is stepped by hand, so that requests join and leave at known steps and the
worker's counters can be read after each. One thread, besides the connector's own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from tests.e2e.single_instance import POOL_BYTES, Ask, Batch, EngineSettings, Order, Report, Step
from tidal_connector.cli.demo.compare import Generated
from tidal_connector.metrics import COUNTERS, GAUGES

BLOCK = 16
MAX_MODEL_LEN = 6400
TOP = 5
_METRICS = ("vllm:num_preemptions", "vllm:spec_decode_num_accepted_tokens")


class Engine:
    """One engine, stepped by hand.

    Attributes:
        core: vLLM's engine core, for tests that break something in it.
    """

    def __init__(self, settings: EngineSettings) -> None:
        options: dict[str, Any] = {}
        if settings.tidal is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "TidalConnector",
                "kv_role": "kv_both",
                "engine_id": "single",
                "kv_connector_extra_config": {"pool": {"bytes": POOL_BYTES}, **settings.tidal},
            }
        if settings.draft_tokens:
            options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": settings.draft_tokens}
        if settings.blocks:
            options["num_gpu_blocks_override"] = settings.blocks
        self._llm = LLM(
            settings.model,
            dtype="float32",
            enforce_eager=True,
            kv_cache_memory_bytes=256 << 20,
            block_size=BLOCK,
            # One request of the greatest length must fit, or vLLM refuses to start; one block is never given out.
            max_model_len=BLOCK * (settings.blocks - 1) if settings.blocks else MAX_MODEL_LEN,
            max_num_seqs=settings.seats,
            max_num_batched_tokens=settings.chunk,
            enable_prefix_caching=settings.prefix_caching,
            disable_log_stats=False,  # preemptions and accepted drafts are read from vLLM's own metrics
            seed=0,
            **options,
        )
        self._engine = self._llm.llm_engine
        self.core = self._engine.engine_core.engine_core
        self._drafts: list[dict[str, list[int]]] = []
        if settings.draft_tokens:
            self._note_drafts()

    def run(self, asks: Sequence[Ask]) -> Batch:
        """Run a batch to its end."""
        waiting, running = list(asks), {ask.name: ask for ask in asks}
        answers: dict[str, Generated] = {}
        ended: dict[str, list[int]] = {}
        steps: list[Step] = []
        before_all, counted = self._metrics(), self._counters()
        started = time.monotonic()
        number = 0
        while waiting or self._engine.has_unfinished_requests():
            for ask in [
                each for each in waiting if each.joins <= number and (not each.follows or each.follows in ended)
            ]:
                waiting.remove(ask)
                self._add(ask, [*ended.get(ask.follows, []), *ask.prompt])
            number += 1
            if not self._engine.has_unfinished_requests():
                continue
            tokens = []
            for output in self._engine.step():
                ask, before = running[output.request_id], answers.get(output.request_id)
                answers[ask.name] = answer = _generated(output)
                if before is None or len(before.tokens) < len(answer.tokens):
                    tokens.append(ask.name)
                if output.finished:
                    ended[ask.name] = [*output.prompt_token_ids, *answer.tokens]
                elif ask.leaves and len(answer.tokens) >= ask.leaves:
                    self._engine.abort_request([ask.name])
            now = self._counters()
            steps.append(Step(tokens, {name: now[name] - counted[name] for name in now if now[name] != counted[name]}))
            counted = now
        seconds = time.monotonic() - started
        preempted, accepted = (after - before for after, before in zip(self._metrics(), before_all, strict=True))
        drafts, self._drafts = self._drafts, []
        return Batch(answers, steps, preempted, drafts, accepted, seconds)

    def gauges(self) -> dict[str, float]:
        """Return the connector's gauges; none where there is no connector."""
        return self._values(GAUGES)

    def close(self) -> None:
        """End the engine and with it the connector's threads."""
        self._engine.engine_core.shutdown()

    def _add(self, ask: Ask, prompt: list[int]) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=ask.new_tokens, logprobs=TOP, ignore_eos=True)
        self._engine.add_request(ask.name, {"prompt_token_ids": prompt}, sampling)

    def _note_drafts(self) -> None:
        """Keep what the drafter proposes: with asynchronous scheduling it never leaves vLLM's runner."""
        runner = self.core.model_executor.driver_worker.worker.model_runner
        propose = runner.propose_draft_token_ids

        def noted(*args: Any, **options: Any) -> Any:
            proposed = propose(*args, **options)
            names = runner.input_batch.req_ids
            self._drafts.append(dict(zip(names, proposed.tolist(), strict=True)))
            return proposed

        runner.propose_draft_token_ids = noted

    def _metrics(self) -> list[int]:
        """Return preemptions and accepted draft tokens since the start."""
        found = {metric.name: getattr(metric, "value", 0) for metric in self._llm.get_metrics()}
        return [int(found.get(name, 0)) for name in _METRICS]

    def _counters(self) -> dict[str, float]:
        return self._values(COUNTERS)

    def _values(self, names: Iterable[str]) -> dict[str, float]:
        if not has_kv_transfer_group():
            return {}
        values = get_kv_transfer_group().worker.counters.snapshot()
        return {name: values[name] for name in names}


def _generated(output: Any) -> Generated:
    """Turn vLLM's output, cumulative, into an answer."""
    made = output.outputs[0]
    places = [{token: entry.logprob for token, entry in place.items()} for place in made.logprobs]
    tokens = tuple(made.token_ids)
    return Generated(tokens, tuple(place[token] for token, place in zip(tokens, places, strict=True)), tuple(places))


def main() -> None:
    """Read the order, run it, write the report."""
    started = time.monotonic()
    order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Order)
    engine = Engine(order.settings)
    start_s = time.monotonic() - started
    batches = {name: engine.run(asks) for name, asks in order.batches.items()}
    gauges = engine.gauges()
    engine.close()
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(Report(start_s, batches, gauges)))


if __name__ == "__main__":
    main()
