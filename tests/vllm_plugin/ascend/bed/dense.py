# SPDX-License-Identifier: Apache-2.0
"""What sparse MLA should give, written a second way: no paging, no absorbed matrices, no half-rotation, no kernels.

Keys and values are unfolded per head, rotation multiplies complex numbers, scores are formed for all tokens. Knows
nothing of vLLM. A comparison with it fails by saying where and by how much.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.vllm_plugin.ascend.bed.case import Run, Step
from tests.vllm_plugin.ascend.bed.layers import Weights
from tests.vllm_plugin.ascend.bed.world import INDEX, LATENT, ROPE, Shape


def attention(
    weights: Weights, shape: Shape, hidden: torch.Tensor, queries: range, chosen: torch.Tensor | None
) -> torch.Tensor:
    """Return the layer's output for the positions ``queries`` of a request whose inputs are ``hidden`` [S, hidden].

    ``chosen`` [queries, S] says which positions each query may see; None stands for all up to its own.
    """
    x = hidden.double()
    low = x @ weights.qkv_a.double().T
    q_low, latent, k_rope = low.split([shape.q_rank, LATENT, ROPE], dim=-1)
    latent = _rms(latent, weights.kv_norm)
    k_rope = _turn(k_rope, torch.arange(len(x)), shape.theta)
    unfolded = (latent @ weights.kv_b.double().T).view(len(x), shape.heads, shape.nope + shape.value)
    keys, values = unfolded.split([shape.nope, shape.value], dim=-1)

    rows = torch.arange(queries.start, queries.stop)
    q = (_rms(q_low[rows], weights.q_norm) @ weights.q_b.double().T).view(len(rows), shape.heads, -1)
    q_nope, q_rope = q.split([shape.nope, ROPE], dim=-1)
    scores = torch.einsum("qhd,shd->hqs", q_nope, keys)
    scores += torch.einsum("qhd,sd->hqs", _turn(q_rope, rows, shape.theta), k_rope)
    seen = torch.arange(len(x)) <= rows[:, None]
    if chosen is not None:
        seen &= chosen
    scores = scores.mul((shape.nope + ROPE) ** -0.5).masked_fill(~seen, float("-inf"))
    context = torch.einsum("hqs,shd->qhd", scores.softmax(dim=-1), values)
    return context.reshape(len(rows), -1) @ weights.out.double().T


def index_scores(weights: Weights, shape: Shape, hidden: torch.Tensor, queries: range) -> torch.Tensor:
    """Return the indexer's scores [queries, S]; the future is minus infinity."""
    x = hidden.double()
    rows = torch.arange(queries.start, queries.stop)
    q_low = (x[rows] @ weights.qkv_a.double().T)[:, : shape.q_rank]
    q = (_rms(q_low, weights.q_norm) @ weights.index_q.double().T).view(len(rows), shape.index_heads, INDEX)
    k, _ = (x @ weights.index_k_and_weights.double().T).split([INDEX, shape.index_heads], dim=-1)
    k = torch.nn.functional.layer_norm(k, (INDEX,), eps=1e-6)
    head_weights = (x[rows] @ weights.index_k_and_weights.double().T)[:, INDEX:]
    q = _turn_halves(q, rows, shape.theta)
    k = _turn_halves(k, torch.arange(len(x)), shape.theta)
    scores = (torch.einsum("qhd,sd->qhs", q, k).relu() * head_weights[..., None]).sum(dim=1)
    return scores.masked_fill(torch.arange(len(x)) > rows[:, None], float("-inf"))


def _rms(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * gain.double()


def _angles(positions: torch.Tensor, theta: float) -> torch.Tensor:
    return positions.double()[:, None] * theta ** (-torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE)


def _turn(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate neighbouring pairs; ``x`` is [tokens, 64] or [tokens, heads, 64]."""
    angles = _angles(positions, theta)
    turned = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], ROPE // 2, 2).contiguous())
    return torch.view_as_real(pairs * (turned if x.dim() == 2 else turned[:, None])).flatten(-2)


def _turn_halves(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate element i of the first 64 with element i + 32, as the indexer does; the others stay."""
    half = ROPE // 2
    pairs = torch.stack([x[..., :half], x[..., half:ROPE]], dim=-1).flatten(-2)
    turned = _turn(pairs, positions, theta)
    return torch.cat([turned[..., 0::2], turned[..., 1::2], x[..., ROPE:]], dim=-1)


@dataclass(frozen=True)
class Difference:
    """The largest difference of one layer's outputs in one step, relative to the size of the output there."""

    step: int
    layer: int
    request: int
    relative: float

    def __str__(self) -> str:
        return f"step {self.step}, layer {self.layer}, request {self.request}: off by {self.relative:.2%}"


def differences(run: Run, steps: slice = slice(None)) -> list[Difference]:
    """Compare every output of the steps with dense attention over the tokens that were selected, worst first."""
    found = []
    for number in range(len(run.steps))[steps]:
        step = run.steps[number]
        for layer in range(len(run.weights)):
            found += _compare(run, step, number, layer)
    return sorted(found, key=lambda each: -each.relative)


def _compare(run: Run, step: Step, number: int, layer: int) -> list[Difference]:
    found, first = [], 0
    for request, start, tokens in step.requests:
        rows = slice(first, first + tokens)
        first += tokens
        queries = range(start, start + tokens)
        hidden = run.inputs(layer, request)[: queries.stop]
        chosen = _mask(step.selected[_selector(run, layer)][rows], queries.stop)
        expected = attention(run.weights[layer], run.case.shape, hidden, queries, chosen)
        error = (step.outputs[layer][rows].double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        worst = float("inf") if error.isnan().any() else error.max().item()
        found.append(Difference(number, layer, request, worst))
    return found


def _selector(run: Run, layer: int) -> int:
    """Return which selection of the step a layer attends to: its own, or the last one before it."""
    return sum(kind == "own" for kind in run.case.layers[: layer + 1]) - 1


def _mask(selected: torch.Tensor, length: int) -> torch.Tensor:
    mask = torch.zeros(selected.shape[0], length + 1, dtype=torch.bool)
    mask.scatter_(1, torch.where(selected >= 0, selected, length).long(), True)
    return mask[:, :length]
