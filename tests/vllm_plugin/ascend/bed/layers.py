# SPDX-License-Identifier: Apache-2.0
"""Attention layers with random weights: the modules that an implementation is given, and the same as plain numbers.

Weights are scaled so that attention is sharp: over thousands of equal scores no single row would matter, and a
comparison of outputs would judge nothing. Imported in the bed only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from tests.vllm_plugin.ascend.bed.world import INDEX, LATENT, ROPE, Shape

SHARPNESS = 2.5
"""About the standard deviation of a row of attention scores."""


class Linear(nn.Module):
    """A linear layer as vLLM's: returns (output, bias); rounds once, like a matrix unit that adds in float32."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.quant_method = UnquantizedLinearMethod()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (x.float() @ self.weight.float().T).to(x.dtype), None


class RmsNorm(nn.Module):
    """The norm over the last dimension, with vLLM's attribute names."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight.float()).to(x.dtype)


class Indexer(nn.Module):
    """What the attention implementation takes out of a model's indexer."""

    def __init__(self, weights: Weights, heads: int) -> None:
        super().__init__()
        self.n_head = heads
        self.head_dim = INDEX
        self.wq_b = Linear(weights.index_q)
        self.wk_weights_proj = Linear(weights.index_k_and_weights)
        self.k_norm = nn.LayerNorm(INDEX, eps=1e-6, dtype=weights.index_q.dtype)


@dataclass(frozen=True)
class Weights:
    """The matrices [out, in] of one layer."""

    qkv_a: torch.Tensor
    q_norm: torch.Tensor
    q_b: torch.Tensor
    kv_norm: torch.Tensor
    kv_b: torch.Tensor
    out: torch.Tensor
    index_q: torch.Tensor
    index_k_and_weights: torch.Tensor


def random_weights(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Weights:
    """Draw the weights of a layer."""

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * gain / columns**0.5).to(dtype)

    def gains(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).to(dtype)

    return Weights(
        qkv_a=matrix(shape.q_rank + LATENT + ROPE, shape.hidden),
        q_norm=gains(shape.q_rank),
        q_b=matrix(shape.heads * (shape.nope + ROPE), shape.q_rank, SHARPNESS),
        kv_norm=gains(LATENT),
        kv_b=matrix(shape.heads * (shape.nope + shape.value), LATENT),
        out=matrix(shape.hidden, shape.heads * shape.value),
        index_q=matrix(shape.index_heads * INDEX, shape.q_rank),
        index_k_and_weights=matrix(INDEX + shape.index_heads, shape.hidden),
    )


def build_implementation(
    kind: type[Any],
    shape: Shape,
    weights: Weights,
    name: str,
    indices: torch.Tensor | None,
    *,
    shared: bool,
) -> Any:
    """Build an attention implementation of class ``kind`` as vLLM's MLA layer does, ready for its first step.

    ``indices`` is the buffer in which layers that share a selection find it; None where no layer shares one.
    """
    implementation = kind(
        num_heads=shape.heads,
        head_size=LATENT + ROPE,
        scale=(shape.nope + ROPE) ** -0.5,
        num_kv_heads=1,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        q_lora_rank=shape.q_rank,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=shape.nope,
        qk_rope_head_dim=ROPE,
        qk_head_dim=shape.nope + ROPE,
        v_head_dim=shape.value,
        rotary_emb=None,
        fused_qkv_a_proj=Linear(weights.qkv_a),
        q_b_proj=Linear(weights.q_b),
        q_a_layernorm=RmsNorm(weights.q_norm),
        kv_a_layernorm=RmsNorm(weights.kv_norm),
        kv_b_proj=Linear(weights.kv_b.clone()),  # thrown away by the implementation once it is folded
        o_proj=Linear(weights.out),
        indexer=None if shared else Indexer(weights, shape.index_heads),
        skip_topk=shared,
        topk_indices_buffer=indices,
        layer_name=name,
    )
    implementation.process_weights_after_loading(weights.out.dtype)
    return implementation
