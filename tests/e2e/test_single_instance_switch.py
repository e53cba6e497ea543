# SPDX-License-Identifier: Apache-2.0
"""``VLLM_DSA_KV_OFFLOAD=1`` alone puts the latents of an engine into the host pool and changes no answer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.checks import LOGPROB_BOUND
from tests.e2e.single_instance import EngineSettings, Order, run_order
from tests.e2e.single_instance_batches import make_batch
from tests.e2e.single_instance_matrix import LAYERS
from tidal_connector.cli.demo.compare import compare

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(300)]


def test_the_old_switch_turns_offload_on(models: Callable[..., Path]) -> None:
    model = str(models(arch="v32", layers=LAYERS))
    batches = {"alone": make_batch("alone")}
    switch = {"VLLM_DSA_KV_OFFLOAD": "1"}
    orders = [Order(EngineSettings(model, environment=each), batches) for each in ({}, switch)]
    with ThreadPoolExecutor(2) as pool:
        plain, switched = pool.map(run_order, orders)
    (name,) = plain.batches["alone"].answers
    found = compare(switched.batches["alone"].answers[name], plain.batches["alone"].answers[name])
    assert found.tokens_equal
    assert found.logprob <= LOGPROB_BOUND
    assert plain.gauges == {}
    assert switched.gauges["selection_cache_bytes"] > 0
    assert switched.gauges["pool_bytes"] > 0
    assert switched.batches["alone"].gained["rows_gathered"] > 0
    assert "VLLM_DSA_KV_OFFLOAD=1 without --kv-transfer-config" in switched.log
    assert 'VLLM_DSA_KV_OFFLOAD=1 is taken for offload = "on"' in switched.log
