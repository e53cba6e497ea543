# SPDX-License-Identifier: Apache-2.0
"""The door of the model maker: one function, used by ``tidal make-model``, the demo and the tests."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tidal_connector.modelmaker.checkpoint import REPORT_FILE, disable_checkpoint, write_checkpoint
from tidal_connector.modelmaker.measure import measure_checkpoint
from tidal_connector.modelmaker.report import ModelReport, shortcomings_of, tolerance_of
from tidal_connector.modelmaker.shape import Dtype, model_shape
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
    measure: bool = False,
    recipe: Recipe | None = None,
) -> ModelReport:
    """Write a small seeded checkpoint, measure it if asked to, and return the report (also in ``tidal_model.json``).

    Writing takes about a second. The same arguments give the same bytes. A checkpoint that was measured and fails a
    bound is made unusable: its config and weights are removed, the report says why.

    Args:
        directory: where to; created, or empty, or an earlier checkpoint of this tool.
        arch: ``v32``, ``glm`` or ``v3``.
        layers: number of layers; None for the default (6; 8 for ``glm``).
        topk: rows that attention selects for each query (tokens).
        seed: seed of all weights.
        dtype: ``float32`` or ``bfloat16``.
        measure: run the engine on it.
        recipe: scales of the weights; None for the fair judge. Others are for tests of the measurement.

    Raises:
        ConfigError: an argument is out of range, or the directory holds something else.
        TidalError: the engine could not run the checkpoint.
    """
    shape = model_shape(arch, layers=layers, topk=topk, dtype=dtype, vocab=VOCAB)
    parameters = write_checkpoint(directory, shape, seed, recipe or fair_recipe(shape))
    report = ModelReport(
        arch=shape.arch.value,
        layers=shape.layers,
        topk=shape.topk if shape.sparse else 0,
        seed=seed,
        dtype=shape.dtype.value,
        parameters=parameters,
        kv_row_bytes=(shape.kv_lora_rank + shape.rope_dim) * (4 if shape.dtype is Dtype.FLOAT32 else 2),
        tolerance=tolerance_of(shape.dtype),
    )
    if measure:
        measurement = measure_checkpoint(directory, shape.dtype.value)
        report = msgspec.structs.replace(
            report, measurement=measurement, shortcomings=shortcomings_of(measurement, report.tolerance)
        )
    report.write(directory / REPORT_FILE)
    if report.shortcomings:
        disable_checkpoint(directory)
    return report
