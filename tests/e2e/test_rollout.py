# SPDX-License-Identifier: Apache-2.0
"""One rollout and its undo with real engines under load, the conducting agent and etcd killed on the way."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.etcd import needs_etcd
from tidal_connector.cli.bench.rollout import RolloutOptions, run_rollout


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_etcd
def test_real_engines_are_upgraded_and_brought_back_without_a_failed_or_wrong_answer(
    models: Callable[..., Path], tmp_path: Path
) -> None:
    said = io.StringIO()
    options = RolloutOptions(engines=1, clients=4, real=True, only=("mixed",), model=models(), keep=tmp_path)
    found = run_rollout(options, Console(file=said, width=160))
    assert found.shortcomings() == [], said.getvalue()
    assert [item.outcome for item in found.scenarios] == ["done", "done"]
    assert found.requests > 20
