# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tidal_connector.modelmaker.report import (
    Measurement,
    ModelReport,
    Noise,
    Probe,
    Reach,
    Sensitivity,
    read_report,
    shortcomings_of,
    tolerance_of,
)

FLOAT32 = tolerance_of("float32")


def _measured(noise: float = 1e-4, sensitivity: float = 0.1, equal: int = 18, outputs: int = 4) -> Measurement:
    return Measurement(
        noise=Noise(
            largest=noise,
            by_case={"chunk 64": noise},
            sequences=18,
            sequences_with_equal_tokens=equal,
            smallest_greedy_margin=0.01,
            prompt_tokens=[2257],
            new_tokens=32,
        ),
        sensitivity=Sensitivity(
            smallest=sensitivity,
            median=sensitivity,
            by_kind={"zeroed": sensitivity},
            without_corruption=0.0,
            prompt_tokens=769,
            probes=[Probe(layer=0, position=3, kind="zeroed", change=sensitivity)],
        ),
        reach=Reach(prompts=4, shared_ending_tokens=64, distinct_outputs=outputs),
        engine_start_s=9.0,
        measured_s=30.0,
    )


def test_a_fair_judge_has_no_shortcomings() -> None:
    assert shortcomings_of(_measured(), FLOAT32) == []


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (_measured(noise=0.02, sensitivity=9.0), r"^noise is 0\.02 nats, at most 0\.01 .*take another --seed"),
        (_measured(noise=math.nan), r"^noise is nan"),
        (_measured(sensitivity=0.01), r"^sensitivity is 0\.01 nats, at least 0\.02 .*smaller --topk"),
        (_measured(noise=0.008), r"^gap .* is 12\.5, at least 20 .*take --dtype float32"),
        (_measured(outputs=3), r"^reach is 3 different outputs for 4 .*take another --seed"),
        (_measured(equal=17), r"^equal tokens in 17 of 18 .*take another --seed"),
    ],
)
def test_each_bound_is_named_with_value_bound_and_remedy(measured: Measurement, said: str) -> None:
    lines = shortcomings_of(measured, FLOAT32)
    assert any(re.search(said, line) for line in lines), lines
    assert all("\n" not in line for line in lines)


def test_no_noise_at_all_is_an_infinite_gap() -> None:
    assert _measured(noise=0.0).gap == math.inf
    assert shortcomings_of(_measured(noise=0.0), FLOAT32) == []


def test_bfloat16_has_wider_bounds_that_still_bind() -> None:
    wide = tolerance_of("bfloat16")
    assert wide.noise > FLOAT32.noise
    assert shortcomings_of(_measured(noise=5.0), wide)
    assert shortcomings_of(_measured(sensitivity=0.0), wide)


def test_a_report_comes_back_from_its_file(tmp_path: Path) -> None:
    report = ModelReport(
        arch="v32",
        layers=6,
        topk=64,
        seed=7,
        dtype="float32",
        parameters=5,
        kv_row_bytes=2304,
        tolerance=FLOAT32,
        measurement=_measured(),
    )
    report.write(tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == report


def test_bfloat16_asks_that_the_typical_wrong_row_stands_out() -> None:
    measured = _measured(noise=0.4, sensitivity=0.3)
    lines = shortcomings_of(measured, tolerance_of("bfloat16"))
    assert len(lines) == 1
    assert lines[0].startswith("gap between the median sensitivity and noise is 0.75, at least 1 ")
