# SPDX-License-Identifier: Apache-2.0
"""Every attribute of vLLM that the CPU backend replaces, with why, what, and how to verify it.

vLLM has no registration point for these. Each patch names the signature it was written for; where the host's differs,
:func:`apply` raises instead of running on a guess, and ``tests/vllm_plugin/cpu/test_patches.py`` fails first.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tidal_connector.errors import TidalError
from tidal_connector.vllm_plugin.cpu import indexer

_SUPPORTED = "0.32"


class HostChanged(TidalError):
    """vLLM lacks an attribute that a patch replaces, or its signature is another one."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One replaced attribute.

    Attributes:
        name: short name for messages and tests.
        why: what fails without it.
        what: what the replacement does.
        verify: how to see that it is needed and works.
        module: dotted module of the host.
        owner: class within the module; empty for a module attribute.
        attribute: name of the attribute.
        parameters: parameter names of the host's function, in order.
        replacement: what takes its place.
    """

    name: str
    why: str
    what: str
    verify: str
    module: str
    owner: str
    attribute: str
    parameters: tuple[str, ...]
    replacement: Callable[..., Any]

    def target(self) -> Any:
        """Return the object whose attribute is replaced.

        Raises:
            HostChanged: the module or the class is gone.
        """
        try:
            module = importlib.import_module(self.module)
            return getattr(module, self.owner) if self.owner else module
        except (ImportError, AttributeError) as error:
            raise HostChanged(f"patch {self.name}: {error}; use vLLM {_SUPPORTED}") from error

    def check(self, current: Any) -> None:
        """Compare the host's function with the signature that the patch was written for.

        Raises:
            HostChanged: they differ.
        """
        found = tuple(inspect.signature(current).parameters)
        if found != self.parameters:
            raise HostChanged(
                f"patch {self.name}: {self.module}.{self.owner or ''}.{self.attribute} takes {found}, expected "
                f"{self.parameters}; use vLLM {_SUPPORTED}"
            )

    def apply(self) -> None:
        """Replace the attribute unless it is replaced already.

        Raises:
            HostChanged: the host is not what the patch was written for.
        """
        target = self.target()
        current = getattr(target, self.attribute, None)
        if current is self.replacement:
            return
        if current is None:
            raise HostChanged(
                f"patch {self.name}: {self.module} has no {self.attribute}; use vLLM {_SUPPORTED}"
            )
        self.check(current)
        setattr(target, self.attribute, self.replacement)


def rotary_forward(
    self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate contiguous copies of query and key (takes the place of ``RotaryEmbedding.forward_cpu``)."""
    return self.forward_native(positions, query.contiguous(), None if key is None else key.contiguous())  # type: ignore[no-any-return]


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
        why="The CPU rotary kernel takes stride(-2) as the token stride. MLA passes strided 3-D views, so keys and queries "
        "come out wrong and neighbouring columns are overwritten, in models with unscaled rope.",
        what="Uses the torch implementation on contiguous copies.",
        verify="tests/vllm_plugin/cpu/test_patches.py rotates a strided view with both.",
        module="vllm.model_executor.layers.rotary_embedding.base",
        owner="RotaryEmbedding",
        attribute="forward_cpu",
        parameters=("self", "positions", "query", "key"),
        replacement=rotary_forward,
    ),
)


def apply() -> None:
    """Apply all patches; safe to call again.

    Raises:
        HostChanged: the host is not what a patch was written for.
    """
    for patch in PATCHES:
        patch.apply()


@contextmanager
def replaced(owner: object, attribute: str, value: object) -> Iterator[None]:
    """Give an attribute of the host another value for the length of a block.

    Raises:
        HostChanged: the host has no such attribute.
    """
    if attribute not in vars(owner):
        raise HostChanged(f"{owner!r} has no {attribute}; use vLLM {_SUPPORTED}")
    before = vars(owner)[attribute]
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, before)
