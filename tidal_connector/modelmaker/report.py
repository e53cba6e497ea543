# SPDX-License-Identifier: Apache-2.0
"""What was measured of a checkpoint, the bounds, and the verdict. Pure values; any thread.

``tidal_model.json`` is one :class:`ModelReport`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec

from tidal_connector.modelmaker.shape import Dtype


class Noise(msgspec.Struct, frozen=True):
    """How much an unharmed engine's logprobs move when only chunk size and batch change.

    Attributes:
        largest: largest change in nats, over the chosen and the five likeliest tokens of each step.
        by_case: the same for each case.
        sequences: pairs of runs compared.
        sequences_with_equal_tokens: pairs whose greedy tokens were the same.
        smallest_greedy_margin: smallest lead of a chosen token over the second, in nats.
        prompt_tokens: lengths of the prompts.
        new_tokens: greedy tokens of each run.
    """

    largest: float
    by_case: dict[str, float]
    sequences: int
    sequences_with_equal_tokens: int
    smallest_greedy_margin: float
    prompt_tokens: list[int]
    new_tokens: int


class Probe(msgspec.Struct, frozen=True):
    """One corrupted KV row: where, how, and the largest logprob change that it caused (nats)."""

    layer: int
    position: int
    kind: str
    change: float


class Sensitivity(msgspec.Struct, frozen=True):
    """How far the logprobs move when one selected KV row is wrong.

    Attributes:
        smallest: smallest change of all probes, in nats.
        median: median change.
        by_kind: smallest change for each kind of corruption.
        without_corruption: change between two clean runs of the same kind; 0 where the engine is deterministic.
        prompt_tokens: length of the prompt.
        probes: every probe.
    """

    smallest: float
    median: float
    by_kind: dict[str, float]
    without_corruption: float
    prompt_tokens: int
    probes: list[Probe]


class Reach(msgspec.Struct, frozen=True):
    """Whether greedy output depends on distant rows: prompts with one ending and different beginnings."""

    prompts: int
    shared_ending_tokens: int
    distinct_outputs: int


class Measurement(msgspec.Struct, frozen=True):
    """Result of ``tidal_connector.vllm_plugin.measure_model`` (times in seconds)."""

    noise: Noise
    sensitivity: Sensitivity
    reach: Reach
    engine_start_s: float
    measured_s: float

    @property
    def gap(self) -> float:
        """Smallest change by a wrong row over largest change by rounding."""
        return _ratio(self.sensitivity.smallest, self.noise.largest)

    @property
    def typical_gap(self) -> float:
        """Median change by a wrong row over largest change by rounding."""
        return _ratio(self.sensitivity.median, self.noise.largest)


def _ratio(change: float, noise: float) -> float:
    return math.inf if noise == 0 else change / noise


class Tolerance(msgspec.Struct, frozen=True):
    """Bounds of a dtype.

    Attributes:
        noise: largest noise allowed, in nats.
        sensitivity: least sensitivity allowed, in nats.
        gap: least ratio of sensitivity to noise; 0 where none is asked for.
        typical_gap: least ratio of the median change by a wrong row to noise.
        equal_tokens: whether all greedy tokens must be equal.
    """

    noise: float
    sensitivity: float
    gap: float
    typical_gap: float
    equal_tokens: bool


class ModelReport(msgspec.Struct, frozen=True):
    """One checkpoint as made, and as measured.

    Attributes:
        arch, layers, topk, seed, dtype: what was asked for; ``topk`` is 0 for dense attention.
        parameters: number of weights.
        kv_row_bytes: bytes of one latent KV row (one token and layer).
        tolerance: bounds that hold for the dtype.
        measurement: None where it was not measured.
        shortcomings: bounds that the checkpoint fails, one line each; empty also where it was not measured.
    """

    arch: str
    layers: int
    topk: int
    seed: int
    dtype: str
    parameters: int
    kv_row_bytes: int
    tolerance: Tolerance
    measurement: Measurement | None = None
    shortcomings: list[str] = []

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_text(json.dumps(msgspec.to_builtins(self), indent=2) + "\n")


def read_report(path: Path) -> ModelReport:
    """Return the report that a checkpoint directory's ``tidal_model.json`` holds."""
    return msgspec.convert(json.loads(path.read_text()), ModelReport)


def measurement_of(data: dict[str, Any]) -> Measurement:
    """Return the measurement in the plain data that the measuring process wrote."""
    return msgspec.convert(data, Measurement)


def tolerance_of(dtype: str) -> Tolerance:
    """Return the bounds for a dtype.

    float32: rounding is about 1e-4 nats, so a wrong row is told from it by a wide margin. bfloat16 rounds every
    hidden state to 8 bits; that moves logprobs by 0.3 to 0.4 nats (measured), more than the least important of 64
    rows does. There the bounds say only that the typical wrong row does more than rounding, and two runs of the same
    prompt are equal only up to the allowed noise.
    """
    if dtype == Dtype.BFLOAT16:
        return Tolerance(noise=0.6, sensitivity=0.02, gap=0.0, typical_gap=1.0, equal_tokens=False)
    return Tolerance(noise=0.01, sensitivity=0.02, gap=20.0, typical_gap=20.0, equal_tokens=True)


def shortcomings_of(measurement: Measurement, tolerance: Tolerance) -> list[str]:
    """Return the bounds that a measurement fails: property, value, bound and remedy, one line each.

    A value that is not a number fails its bound.
    """
    noise, sensitivity = measurement.noise, measurement.sensitivity
    lines = []
    if not noise.largest <= tolerance.noise:
        lines.append(
            f"noise is {noise.largest:.3g} nats, at most {tolerance.noise:g} is allowed: chunk size or batch changes "
            "the output of an unharmed engine; take another --seed or fewer --layers"
        )
    if tolerance.equal_tokens and noise.sequences_with_equal_tokens != noise.sequences:
        lines.append(
            f"equal tokens in {noise.sequences_with_equal_tokens} of {noise.sequences} pairs of runs, all are "
            "required: a greedy choice is too close; take another --seed"
        )
    reach = measurement.reach
    if reach.distinct_outputs != reach.prompts:
        lines.append(
            f"reach is {reach.distinct_outputs} different outputs for {reach.prompts} prompts that share only their "
            f"last {reach.shared_ending_tokens} tokens, all must differ: output does not depend on distant rows; take "
            "another --seed"
        )
    if not sensitivity.smallest >= tolerance.sensitivity:
        lines.append(
            f"sensitivity is {sensitivity.smallest:.3g} nats, at least {tolerance.sensitivity:g} is required: a "
            "wrong KV row would go unseen; take a smaller --topk, fewer --layers or another --seed"
        )
    if not measurement.gap >= tolerance.gap:
        lines.append(
            f"gap between sensitivity and noise is {measurement.gap:.3g}, at least {tolerance.gap:g} is "
            "required: a wrong KV row cannot be told from rounding; take --dtype float32, a smaller --topk or another "
            "--seed"
        )
    elif not measurement.typical_gap >= tolerance.typical_gap:
        lines.append(
            f"gap between the median sensitivity and noise is {measurement.typical_gap:.3g}, at least "
            f"{tolerance.typical_gap:g} is required: a wrong KV row cannot be told from rounding; take "
            "--dtype float32, a smaller --topk or another --seed"
        )
    return lines
