# SPDX-License-Identifier: Apache-2.0
"""The measurement on the real engine: it accepts the fair judge and refuses the chaotic and the numb one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidal_connector.modelmaker.api import make_model
from tidal_connector.modelmaker.weights import Recipe

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(400)]

CHAOTIC = Recipe(query=100.0, key_rope=5.0, mlp=10.0, head=200.0)
NUMB = Recipe(attention=1e-4)


def test_the_default_checkpoint_is_a_fair_judge(tmp_path: Path) -> None:
    report = make_model(tmp_path, measure=True)
    assert report.shortcomings == []
    assert report.measurement is not None
    assert report.measurement.noise.sequences == 18
    assert {probe.layer for probe in report.measurement.sensitivity.probes} == set(range(6))
    assert report.measurement.sensitivity.without_corruption <= report.measurement.noise.largest


def test_the_bfloat16_variant_is_accepted_with_its_own_bounds(tmp_path: Path) -> None:
    report = make_model(tmp_path, dtype="bfloat16", measure=True)
    assert report.shortcomings == []
    assert report.measurement is not None
    assert report.tolerance.noise > make_model(tmp_path / "float32").tolerance.noise


def test_a_chaotic_checkpoint_is_refused(tmp_path: Path) -> None:
    report = make_model(tmp_path, layers=2, recipe=CHAOTIC, measure=True)
    assert any(line.startswith("noise is ") for line in report.shortcomings), report
    assert not (tmp_path / "config.json").exists()


def test_a_numb_checkpoint_is_refused(tmp_path: Path) -> None:
    report = make_model(tmp_path, layers=2, recipe=NUMB, measure=True)
    assert any(line.startswith("sensitivity is ") for line in report.shortcomings), report
    assert not (tmp_path / "config.json").exists()
