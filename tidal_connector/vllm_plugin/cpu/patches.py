# SPDX-License-Identifier: Apache-2.0
"""Every attribute of vLLM that the CPU backend replaces, with why, what, and how to verify it.

vLLM has no registration point for these. Each patch names the signature it was written for; where the host's
differs, :func:`apply` raises instead of running on a guess, and ``tests/vllm_plugin/cpu/test_patches.py``
fails first.
"""

from __future__ import annotations

from typing import Any

import torch

from tidal_connector.vllm_plugin.cpu import indexer, waiting
from tidal_connector.vllm_plugin.patching import Patch


def rotary_forward(
    self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate contiguous copies of query and key (takes the place of ``RotaryEmbedding.forward_cpu``)."""
    rotated: tuple[torch.Tensor, torch.Tensor | None] = self.forward_native(
        positions, query.contiguous(), None if key is None else key.contiguous()
    )
    return rotated


PATCHES = (
    Patch(
        name="indexer-cache-backend",
        why="DeepseekV32IndexerCache names a CUDA backend, whose metadata builder needs Triton.",
        what="Names our backend, which shares its metadata with the latents.",
        verify="Without it the engine fails while it builds metadata builders for a V3.2 model.",
        module="vllm.model_executor.models.deepseek_v2",
        owner="DeepseekV32IndexerCache",
        attribute="get_attn_backend",
        parameters=("self",),
        replacement=indexer.indexer_backend,
    ),
    Patch(
        name="indexer-forward",
        why="SparseAttnIndexer.forward_cpu serves DeepSeek-V4 only: top-k 512, no key insertion, one query per decode.",
        what="Inserts keys, scores any number of queries, any top-k, ties to the lowest position.",
        verify="Without it the first step of a V3.2 model raises NotImplementedError.",
        module="vllm.model_executor.layers.sparse_attn_indexer",
        owner="SparseAttnIndexer",
        attribute="forward_cpu",
        parameters=("self", "hidden_states", "q_quant", "k", "weights"),
        replacement=indexer.forward_indexer,
    ),
    Patch(
        name="indexer-query-quantisation",
        why="deepseek_v2 calls per_token_group_quant_fp8, a Triton kernel.",
        what="Quantises with torch; scales are powers of two.",
        verify="Without it the first step of a V3.2 model fails in Triton.",
        module="vllm.model_executor.models.deepseek_v2",
        owner="",
        attribute="per_token_group_quant_fp8",
        parameters=(
            "x",
            "group_size",
            "eps",
            "dtype",
            "column_major_scales",
            "tma_aligned_scales",
            "out_q",
            "use_ue8m0",
        ),
        replacement=indexer.quantise_query,
    ),
    Patch(
        name="rotary-strides",
        why="The CPU rotary kernel takes stride(-2) as the token stride. MLA passes strided 3-D views, so keys "
        "and queries come out wrong and neighbouring columns are overwritten, in models with unscaled rope.",
        what="Uses the torch implementation on contiguous copies.",
        verify="tests/vllm_plugin/cpu/test_patches.py rotates a strided view with both.",
        module="vllm.model_executor.layers.rotary_embedding.base",
        owner="RotaryEmbedding",
        attribute="forward_cpu",
        parameters=("self", "positions", "query", "key"),
        replacement=rotary_forward,
    ),
    waiting.PATCH,
)


def apply() -> None:
    """Apply all patches; safe to call again.

    Raises:
        HostChanged: the host is not what a patch was written for.
    """
    for patch in PATCHES:
        patch.apply()
