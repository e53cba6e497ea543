# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint, drawn from a seed. Owns the recipe that makes the model a fair judge of its KV path.

How the recipe works, in the order in which a token meets it:

* **Code lane.** The first hidden elements of each embedding are a constant 1, a code of +1 and -1 that names the
  token, and one flag of four. No layer ever writes there, so every layer reads them unharmed. Index keys, index
  queries and attention queries are made from this lane alone.
* **Exact selection.** An index key is a code (after its LayerNorm exactly +1 and -1, which fp8 keeps) and a rotated
  constant; so is the query; one index head, named by the token's flag, has weight. A score is thus a small whole
  number (likeness of codes) plus a smooth function of the distance, and a rounding difference elsewhere in the model
  cannot reorder it. A random indexer would flip choices near the k-th place with every change of the chunk size.
* **Context lane.** Latents (keys and values) mix code and context, attention writes into the context lane, and so a
  row holds what its whole past was. Attention logits spread by less than 1, so each selected row matters and none
  rules.
* **Peaked head.** The logits are scaled at the head only: the tokens' margins grow, the layers stay well-conditioned.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidal_connector.modelmaker.shape import Dtype, ModelShape, rope_frequency

if TYPE_CHECKING:
    import torch

CODE = 64  # elements of the constant and the code
FLAGS = 4  # one for each index head
SLOW_PAIR = 20  # about 8,000 tokens a turn: the reach of an index head
MID_PAIR = 15  # about 750 tokens a turn: ripples that scatter the choice
MATCHED = 4  # code elements that an index head compares
LEVEL = 2.0  # about the size of the likeliest token's logit, in units of the head's spread
PRINTABLE = range(0x20, 0x7F)
_REACH = (0.0, 250.0, 1_000.0, 2_500.0)  # distance in tokens at which each index head looks best


@dataclass(frozen=True, slots=True)
class Recipe:
    """Scales of the random tensors; the defaults make the fair judge, other values make test subjects.

    Attributes:
        context: size of the context lane in an embedding, before attention adds to it.
        query: size of an attention query's elements; sets the spread of the attention logits.
        key_rope: size of the rotated key's elements.
        attention: gain of each layer's attention output into the context lane.
        mlp: gain of each layer's MLP output into the context lane.
        head: spread of the logits.
        successor: liking for the current token's successor, in units of ``head``.
        repeat: dislike of the current token, in units of ``head``.
    """

    context: float = 0.2
    query: float = 0.5
    key_rope: float = 1.0
    attention: float = 0.6
    mlp: float = 0.1
    head: float = 14.0
    successor: float = 0.3
    repeat: float = 1.0


def fair_recipe(shape: ModelShape) -> Recipe:
    """Return the recipe of a fair judge: the more rows share the attention, the more the head makes of one."""
    rows = shape.topk if shape.sparse else 1024
    return Recipe(head=14.0 if rows <= 128 else 28.0)


class _Draw:
    """Named random tensors: each depends on the seed and its own name only, never on the order of drawing."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def _generator(self, name: str) -> torch.Generator:
        import torch

        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def normal(self, name: str, rows: int, columns: int, scale: float) -> torch.Tensor:
        import torch

        return torch.randn(rows, columns, generator=self._generator(name), dtype=torch.float32) * scale

    def signs(self, name: str, rows: int, columns: int) -> torch.Tensor:
        import torch

        return torch.randint(0, 2, (rows, columns), generator=self._generator(name)).float() * 2 - 1

    def order(self, name: str, count: int) -> list[int]:
        import torch

        return [int(i) for i in torch.randperm(count, generator=self._generator(name))]

    def uniform(self, name: str, count: int) -> list[float]:
        import torch

        return [float(x) for x in torch.rand(count, generator=self._generator(name))]


def tensors(shape: ModelShape, seed: int, recipe: Recipe) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (checkpoint name, tensor) for every weight, in the shape's dtype; k_norm stays float32."""
    import torch

    draw = _Draw(seed)
    dtype = torch.float32 if shape.dtype is Dtype.FLOAT32 else torch.bfloat16
    named = [*_ends(shape, draw, recipe)]
    for layer in range(shape.layers):
        named += _layer(shape, draw, recipe, layer)
    for name, tensor in named:
        yield name, tensor.contiguous() if ".k_norm." in name else tensor.to(dtype).contiguous()


def _ends(shape: ModelShape, draw: _Draw, recipe: Recipe) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    lane = CODE + FLAGS
    embedding = torch.zeros(shape.vocab, shape.hidden)
    embedding[:, :CODE] = draw.signs("code", shape.vocab, CODE)
    embedding[:, 0] = 1.0
    flags = [i % FLAGS for i in draw.order("flag", shape.vocab)]
    embedding[torch.arange(shape.vocab), CODE + torch.tensor(flags)] = 1.0
    embedding[:, lane:] = draw.normal("context", shape.vocab, shape.hidden - lane, recipe.context)
    yield "model.embed_tokens.weight", embedding

    head = torch.zeros(shape.vocab, shape.hidden)
    width = shape.hidden - lane
    head[:, lane:] = draw.normal("head", shape.vocab, width, recipe.head / math.sqrt(width))
    # The code lane adds what a real model's bigrams would: a liking for one successor, a dislike of repetition. Without
    # it, greedy output of so small a model falls into a loop of one or two tokens and hides what the context says.
    codes = embedding[:, 1:CODE]
    ring = [PRINTABLE[i] for i in draw.order("ring", len(PRINTABLE))]
    before = torch.tensor(ring[-1:] + ring[:-1])
    head[:, 1:CODE] -= codes * (recipe.repeat * recipe.head / (CODE - 1))
    head[torch.tensor(ring), 1:CODE] += codes[before] * (recipe.successor * recipe.head / (CODE - 1))
    # The constant acts as a bias. It brings the likeliest tokens near logit 0, where bfloat16 is finest, and keeps
    # special and unprintable tokens out of greedy output.
    hidden_tokens = [token for token in range(shape.vocab) if token not in PRINTABLE]
    head[:, 0] = -LEVEL * recipe.head
    head[hidden_tokens, 0] = -12.0 * recipe.head
    yield "lm_head.weight", head
    yield "model.norm.weight", torch.ones(shape.hidden)


def _layer(shape: ModelShape, draw: _Draw, recipe: Recipe, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    prefix = f"model.layers.{layer}"
    attention = f"{prefix}.self_attn"
    lane = CODE + FLAGS
    qk = shape.nope_dim + shape.rope_dim

    yield f"{prefix}.input_layernorm.weight", torch.ones(shape.hidden)
    yield f"{prefix}.post_attention_layernorm.weight", torch.ones(shape.hidden)

    q_a = torch.zeros(shape.q_lora_rank, shape.hidden)
    q_a[:, : shape.q_lora_rank] = torch.eye(shape.q_lora_rank)
    yield f"{attention}.q_a_proj.weight", q_a
    yield f"{attention}.q_a_layernorm.weight", torch.ones(shape.q_lora_rank)
    yield (
        f"{attention}.q_b_proj.weight",
        draw.normal(f"{layer}.q_b", shape.heads * qk, shape.q_lora_rank, recipe.query / math.sqrt(shape.q_lora_rank)),
    )

    kv_a = draw.normal(f"{layer}.kv_a", shape.kv_lora_rank + shape.rope_dim, shape.hidden, 1 / math.sqrt(shape.hidden))
    kv_a[:, 0] = 0.0  # the constant would give all rows a common part, which only dilutes what tells them apart
    kv_a[shape.kv_lora_rank :] *= recipe.key_rope
    yield f"{attention}.kv_a_proj_with_mqa.weight", kv_a
    yield f"{attention}.kv_a_layernorm.weight", torch.ones(shape.kv_lora_rank)
    yield (
        f"{attention}.kv_b_proj.weight",
        draw.normal(
            f"{layer}.kv_b",
            shape.heads * (shape.nope_dim + shape.value_dim),
            shape.kv_lora_rank,
            1 / math.sqrt(shape.kv_lora_rank),
        ),
    )
    width = shape.heads * shape.value_dim
    o = draw.normal(f"{layer}.o", shape.hidden, width, recipe.attention / math.sqrt(width))
    o[:lane] = 0.0
    yield f"{attention}.o_proj.weight", o

    inner = shape.intermediate
    for name in ("gate_proj", "up_proj"):
        yield (
            f"{prefix}.mlp.{name}.weight",
            draw.normal(f"{layer}.{name}", inner, shape.hidden, 1 / math.sqrt(shape.hidden)),
        )
    down = draw.normal(f"{layer}.down", shape.hidden, inner, recipe.mlp / math.sqrt(inner))
    down[:lane] = 0.0
    yield f"{prefix}.mlp.down_proj.weight", down

    if shape.has_indexer(layer):
        yield from _indexer(shape, draw, layer, f"{attention}.indexer")


def _indexer(shape: ModelShape, draw: _Draw, layer: int, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    rope = shape.rope_dim
    code = shape.index_dim - rope
    key_order = draw.order(f"{layer}.index_key", CODE)
    key_signs = draw.signs(f"{layer}.index_key_sign", 1, code)[0]

    # Plain half: the code, permuted. Rotated half: its negative, so that the LayerNorm's mean is 0 and its output
    # exactly +1 and -1; there a constant then replaces it (weight 0, bias), which rope turns into the position.
    wk = torch.zeros(shape.index_dim, shape.hidden)
    for i in range(code):
        wk[rope + i, key_order[i % CODE]] = key_signs[i]
    wk[:rope] = -wk[rope:]
    yield f"{prefix}.wk.weight", wk
    norm = torch.ones(shape.index_dim)
    norm[:rope] = 0.0
    bias = torch.zeros(shape.index_dim)
    for pair in (SLOW_PAIR, MID_PAIR):
        bias[_halves(shape, pair)[0]] = 1.0
    yield f"{prefix}.k_norm.weight", norm
    yield f"{prefix}.k_norm.bias", bias

    wq = torch.zeros(shape.index_heads * shape.index_dim, shape.q_lora_rank)
    jitter = draw.uniform(f"{layer}.index_jitter", shape.index_heads)
    ripple = draw.uniform(f"{layer}.index_ripple", shape.index_heads)
    for head in range(shape.index_heads):
        base = head * shape.index_dim
        seen = draw.order(f"{layer}.{head}.index_seen", code)[:MATCHED]
        asked = draw.order(f"{layer}.{head}.index_asked", CODE - 1)[:MATCHED]
        signs = draw.signs(f"{layer}.{head}.index_sign", 1, MATCHED)[0]
        for place, source, sign in zip(seen, asked, signs, strict=True):
            wq[base + rope + place, 1 + source] = sign
        reach = _REACH[head % len(_REACH)] * (0.75 + 0.5 * jitter[head])
        aims = (
            (SLOW_PAIR, 1.5, -reach * rope_frequency(SLOW_PAIR)),
            (MID_PAIR, 1.0, 2 * math.pi * ripple[head]),
        )
        for pair, size, phase in aims:
            first, second = _halves(shape, pair)
            wq[base + first, 0] = size * math.cos(phase)
            wq[base + second, 0] = size * math.sin(phase)
    yield f"{prefix}.wq_b.weight", wq

    gates = torch.zeros(shape.index_heads, shape.hidden)
    for head, flag in enumerate(draw.order(f"{layer}.index_gate", FLAGS)):
        gates[head % shape.index_heads, CODE + flag] = 1.0
    yield f"{prefix}.weights_proj.weight", gates


def _halves(shape: ModelShape, pair: int) -> tuple[int, int]:
    """Return the two elements that rope rotates together."""
    if shape.interleaved_index_rope:
        return 2 * pair, 2 * pair + 1
    return pair, pair + shape.rope_dim // 2
