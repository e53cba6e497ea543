# SPDX-License-Identifier: Apache-2.0
"""The door of the model maker: one function, used by ``tidal make-model``, the demo and the tests."""

from __future__ import annotations

from pathlib import Path

from tidal_connector.modelmaker.checkpoint import write_checkpoint
from tidal_connector.modelmaker.shape import model_shape
from tidal_connector.modelmaker.tokenizer import VOCAB
from tidal_connector.modelmaker.weights import Recipe, fair_recipe

DEFAULT_SEED = 7
DEFAULT_TOPK = 64


def make_model(
    directory: Path,
    *,
    arch: str = "v32",
    layers: int | None = None,
    topk: int = DEFAULT_TOPK,
    seed: int = DEFAULT_SEED,
    dtype: str = "float32",
    recipe: Recipe | None = None,
) -> int:
    """Write a small seeded checkpoint and return its number of parameters."""
    shape = model_shape(arch, layers=layers, topk=topk, dtype=dtype, vocab=VOCAB)
    return write_checkpoint(directory, shape, seed, recipe or fair_recipe(shape))
