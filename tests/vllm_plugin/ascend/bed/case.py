# SPDX-License-Identifier: Apache-2.0
"""Runs an attention implementation of vllm-ascend through prefill and decode, and keeps what went in and came out.

``run_case(AscendSFAImpl, Case(contexts=(2300, 150), steps=4))`` returns a :class:`Run`; ``dense.py`` says what should
have come out. For finer control open :func:`bed` and call ``step``. Imported in the bed only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm_ascend.attention.attention_v1 import AscendAttentionState
from vllm_ascend.attention.sfa_v1 import AscendSFAMetadataBuilder
from vllm_ascend.attention.utils import AscendCommonAttentionMetadata
from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec

from tests.vllm_plugin.ascend.bed.layers import RmsNorm, Weights, build_implementation, random_weights
from tests.vllm_plugin.ascend.bed.world import BLOCK, INDEX, LATENT, ROPE, TOP_K, Shape, engine, forward

Cache = tuple[torch.Tensor, ...]
Allocate = Callable[[int, int], Cache]
"""(layer, blocks) -> the cache tuple of that layer, zeroed."""


@dataclass(frozen=True)
class Case:
    """What is run.

    Attributes:
        contexts: tokens of each request's prompt.
        steps: decode steps after it.
        layers: for each layer ``own`` (it has an indexer) or ``shared`` (it uses the last selection).
        queries: new tokens per request and decode step (more than one with speculative decoding).
        chunk: most tokens of a prompt in one step; 0 for all.
        padding: requests of padding in a decode step, as a captured graph has them.
        quantised: index keys are int8 with float16 scales (``enable_sparse_li_c8``); takes bfloat16.
    """

    contexts: tuple[int, ...]
    steps: int
    layers: tuple[str, ...] = ("own", "own")
    queries: int = 1
    chunk: int = 0
    padding: int = 0
    quantised: bool = False
    dtype: torch.dtype = torch.float16
    seed: int = 0
    shape: Shape = field(default_factory=Shape)

    @property
    def longest(self) -> int:
        return max(self.contexts) + self.steps * self.queries


@dataclass
class Step:
    """One forward pass: ``requests`` holds (request, first position, tokens) in batch order; tensors lack padding."""

    requests: list[tuple[int, int, int]]
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    selected: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Run:
    """All steps of a case, and the weights that they ran with."""

    case: Case
    weights: list[Weights]
    steps: list[Step]

    def inputs(self, layer: int, request: int) -> torch.Tensor:
        """Return what a layer was given for all tokens of a request so far, [tokens, hidden]."""
        return torch.cat([rows for step in self.steps for rows in _rows_of(step, step.inputs[layer], request)])


def _rows_of(step: Step, rows: torch.Tensor, wanted: int) -> Iterator[torch.Tensor]:
    first = 0
    for request, _, tokens in step.requests:
        if request == wanted:
            yield rows[first : first + tokens]
        first += tokens


class Bed:
    """One engine's attention: layers, their caches, and the batch that vLLM's model runner would make."""

    def __init__(
        self, case: Case, config: VllmConfig, kind: type[Any], builder: type[Any], allocate: Allocate | None
    ) -> None:
        generator = torch.Generator().manual_seed(case.seed)
        self.case, self.config = case, config
        self.weights = [random_weights(case.shape, case.dtype, generator) for _ in case.layers]
        names = [f"model.layers.{index}.self_attn.attn" for index in range(len(case.layers))]
        for name in names:
            config.compilation_config.static_forward_context[name] = SimpleNamespace(prefill_backend=None)
        widest = config.scheduler_config.max_num_batched_tokens
        self.indices = torch.full((widest, TOP_K), -1, dtype=torch.int32) if "shared" in case.layers else None
        self.layers = [
            build_implementation(kind, case.shape, weights, name, self.indices, shared=kind_of == "shared")
            for weights, name, kind_of in zip(self.weights, names, case.layers, strict=True)
        ]
        self.names = names
        self._norms = [RmsNorm(torch.ones(case.shape.hidden, dtype=case.dtype)) for _ in case.layers]
        self._place_blocks(generator)
        self.caches = [(allocate or self._plain_cache)(layer, self.blocks) for layer in range(len(case.layers))]
        spec = AscendMLAAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=1,
            head_size=LATENT + ROPE + INDEX,
            sparse_head_dim=(LATENT, ROPE, INDEX),
            dtype=case.dtype,
        )
        self.builder = builder(spec, names, config, torch.device("cpu"))
        self.lengths = [0] * len(case.contexts)
        self.run = Run(case, self.weights, [])
        self._tokens = torch.Generator().manual_seed(case.seed + 1)

    def _place_blocks(self, generator: torch.Generator) -> None:
        """Give each request blocks from all over the cache; block 0 belongs to nobody, as in vLLM."""
        width = -(-self.case.longest // BLOCK)
        counts = [-(-(length + self.case.longest - max(self.case.contexts)) // BLOCK) for length in self.case.contexts]
        self.blocks = 1 + sum(counts) + 3
        order = (torch.randperm(self.blocks - 1, generator=generator) + 1).int()
        self.block_table = torch.zeros(len(counts) + self.case.padding, width, dtype=torch.int32)
        for request, pages in enumerate(order[: sum(counts)].split(counts)):
            self.block_table[request, : len(pages)] = pages

    def _plain_cache(self, layer: int, blocks: int) -> Cache:
        kinds = [(LATENT, self.case.dtype), (ROPE, self.case.dtype)]
        if self.case.layers[layer] == "own" and self.case.quantised:
            kinds += [(INDEX, torch.int8), (1, torch.float16)]
        elif self.case.layers[layer] == "own":
            kinds += [(INDEX, self.case.dtype)]
        return tuple(torch.zeros(blocks, BLOCK, 1, width, dtype=dtype) for width, dtype in kinds)

    def slots(self, request: int, first: int, tokens: int) -> torch.Tensor:
        """Return the cache rows of positions ``first .. first + tokens`` of a request."""
        positions = torch.arange(first, first + tokens)
        return (self.block_table[request, positions // BLOCK] * BLOCK + positions % BLOCK).int()

    def prefill(self) -> None:
        """Run each prompt by itself, in chunks where the case says so."""
        for request, context in enumerate(self.case.contexts):
            while self.lengths[request] < context:
                left = context - self.lengths[request]
                tokens = min(left, self.case.chunk or left)
                fresh = self.lengths[request] == 0
                state = AscendAttentionState.PrefillNoCache if fresh else AscendAttentionState.ChunkedPrefill
                self.step([(request, tokens)], state)

    def decode(self, order: Sequence[int] | None = None) -> Step:
        """Run one decode step of all requests, or of those in ``order``, and the case's padding."""
        batch = [(request, self.case.queries) for request in (order or range(len(self.lengths)))]
        spec = self.case.queries > 1
        state = AscendAttentionState.SpecDecoding if spec else AscendAttentionState.DecodeOnly
        return self.step(batch, state, self.case.padding)

    def step(self, batch: Sequence[tuple[int, int]], state: AscendAttentionState, padding: int = 0) -> Step:
        """Run one forward pass over (request, new tokens), through all layers with a residual around each."""
        step = Step([(request, self.lengths[request], tokens) for request, tokens in batch])
        actual = sum(tokens for _, tokens in batch)
        padded = actual + padding * (batch[-1][1] if padding else 0)
        common = self._common_metadata(step, state, padding, padded)
        metadata = self.builder.build(0, common)
        hidden = torch.randn(padded, self.case.shape.hidden, generator=self._tokens).to(self.case.dtype)
        with forward(self.config, dict.fromkeys(self.names, metadata), padded), _watched(step, actual):
            for layer, (name, implementation) in enumerate(zip(self.names, self.layers, strict=True)):
                given = self._norms[layer](hidden)
                output = torch.empty_like(hidden)
                implementation.forward(name, given, self.caches[layer], metadata, output=output)
                step.inputs.append(given[:actual].clone())
                step.outputs.append(output[:actual].clone())
                hidden = hidden + output
        for request, tokens in batch:
            self.lengths[request] += tokens
        self.run.steps.append(step)
        return step

    def _common_metadata(
        self, step: Step, state: AscendAttentionState, padding: int, padded: int
    ) -> AscendCommonAttentionMetadata:
        rows = [request for request, _, _ in step.requests]
        counts = [tokens for _, _, tokens in step.requests]
        width = counts[-1] if padding else 0
        ends = torch.tensor([0, *counts, *[width] * padding], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        # Padding requests have no keys; their tokens are written nowhere.
        lengths = torch.tensor([first + tokens for _, first, tokens in step.requests] + [0] * padding).int()
        positions = torch.zeros(padded, dtype=torch.int64)
        slots = torch.full((padded,), -1, dtype=torch.int32)
        at = 0
        for request, first, tokens in step.requests:
            positions[at : at + tokens] = torch.arange(first, first + tokens)
            slots[at : at + tokens] = self.slots(request, first, tokens)
            at += tokens
        table = torch.zeros(len(rows) + padding, self.block_table.shape[1], dtype=torch.int32)
        table[: len(rows)] = self.block_table[rows]
        return AscendCommonAttentionMetadata(
            query_start_loc=ends,
            query_start_loc_cpu=ends.clone(),
            seq_lens=lengths,
            _seq_lens_cpu=lengths.clone(),
            seq_lens_cpu=lengths.clone(),
            num_computed_tokens_cpu=torch.tensor([first for _, first, _ in step.requests] + [0] * padding),
            num_reqs=len(rows) + padding,
            num_actual_tokens=at,
            max_query_len=max(counts),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table,
            slot_mapping=slots,
            positions=positions,
            attn_state=state,
            num_input_tokens=padded,
            decode_token_per_req=self.case.queries,
        )


@contextmanager
def _watched(step: Step, actual: int) -> Iterator[None]:
    """Keep what the device's adaptor is told to attend to, layer after layer."""
    from vllm_ascend.device.device_op import DeviceOperator

    original = DeviceOperator.indexer_select_post_process

    def watch(*args: Any, **kwargs: Any) -> torch.Tensor:
        selected = original(*args, **kwargs)
        step.selected.append(selected[:actual, 0].clone())
        return selected

    DeviceOperator.indexer_select_post_process = staticmethod(watch)
    try:
        yield
    finally:
        DeviceOperator.indexer_select_post_process = staticmethod(original)


@contextmanager
def bed(
    case: Case,
    kind: type[Any],
    builder: type[Any] = AscendSFAMetadataBuilder,
    allocate: Allocate | None = None,
    **engine_settings: Any,
) -> Iterator[Bed]:
    """Open a bed: ``kind`` is the implementation's class, ``allocate`` where its caches come from."""
    requests = len(case.contexts) + case.padding
    engine_settings.setdefault("additional", {"enable_sparse_li_c8": case.quantised})
    with engine(case.shape, case.layers, case.dtype, case.longest, requests, **engine_settings) as config:
        yield Bed(case, config, kind, builder, allocate)


def run_case(kind: type[Any], case: Case, **settings: Any) -> Run:
    """Run a case from the first token of its prompts to its last decode step."""
    with bed(case, kind, **settings) as opened:
        opened.prefill()
        for _ in range(case.steps):
            opened.decode()
        return opened.run
