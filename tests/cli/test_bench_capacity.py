# SPDX-License-Identifier: Apache-2.0
"""``tidal bench capacity``: the bound of the layout, what is made of samples, and what is refused."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.cli.canned import capacity
from tidal_connector.cli.bench import capacity as bench
from tidal_connector.cli.bench.capacity import CapacityOptions, kv_blocks, sample_of
from tidal_connector.cli.bench.capacity_report import Sample, layout_bound, served, show
from tidal_connector.cli.main import app
from tidal_connector.cluster.launch import ServerProcess
from tidal_connector.errors import ConfigError, TidalError


def test_the_bound_is_that_of_the_layout() -> None:
    assert layout_bound(1152, 132, 128, 2048) == pytest.approx(6.294, abs=1e-3)
    assert layout_bound(1152, 132, 2048, 2048) == 1, "as many slots as tokens save nothing"
    assert layout_bound(1152, 132, 128, 1 << 30) == pytest.approx(1284 / 132, rel=1e-3)


def sample(at: float, running: int, preempted: int = 0) -> Sample:
    return Sample(at=at, running=running, waiting=0, generated=0, preempted=preempted)


def test_samples_are_summed_up() -> None:
    memory = {"index_bytes": 1, "selection_bytes": 2, "device_kv_bytes": 3, "pool_bytes": 4, "kv_blocks": 5}
    found = served([sample(0.0, 0, 7), sample(0.5, 3, 7), sample(1.0, 2, 9)], 4.0, 100, **memory)
    assert (found.peak, found.preemptions, found.tokens_per_s) == (3, 2, 25.0)
    with pytest.raises(ValueError, match="no samples"):
        served([], 4.0, 100, **memory)


def test_a_sample_is_read_from_the_engines_metrics() -> None:
    metrics = {
        "vllm:num_requests_running": 12.0,
        "vllm:num_requests_waiting": 3.0,
        "vllm:generation_tokens_total": 480.0,
        "vllm:num_preemptions_total": 1.0,
    }
    assert sample_of(metrics, 2.5) == Sample(2.5, 12, 3, 480, 1)
    assert sample_of({}, 0.0) == Sample(0.0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("text", "blocks"),
    [('vllm:cache_config_info{block_size="16",num_gpu_blocks="257",x="1"} 1.0\n', 257), ("vllm:other 1.0\n", None)],
)
def test_the_number_of_blocks_is_a_label(
    text: str, blocks: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(200, text="# HELP\n" + text))
    engine = ServerProcess("engine", [], {}, "http://127.0.0.1:9", tmp_path / "log")
    if blocks is None:
        with pytest.raises(TidalError, match="how many KV blocks"):
            kv_blocks(engine)
    else:
        assert kv_blocks(engine) == blocks


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"concurrent_requests_over_bound": 0.89}, "0.89 of what the layout allows"),
        ({"throughput_on_over_off": 1.9}, "throughput is 1.90 x"),
        ({"device_kv_on_over_off": 1.01}, "1.010 x as many bytes"),
        ({"on": msgspec.structs.replace(capacity().on, preemptions=2)}, "2 requests lost their room"),
    ],
)
def test_what_is_not_as_it_must_be_is_named(changes: dict[str, Any], words: str) -> None:
    assert capacity().shortcomings() == []
    found = msgspec.structs.replace(capacity(), **changes)
    assert [words in line for line in found.shortcomings()] == [True]
    console = Console(record=True, width=200, file=io.StringIO())
    show(found, console)
    assert words in console.export_text()


def test_the_json_has_the_promised_keys() -> None:
    found = json.loads(msgspec.json.encode(capacity()))
    promised = {
        "concurrent_requests_on_over_off",
        "concurrent_requests_over_bound",
        "throughput_on_over_off",
        "device_kv_on_over_off",
        "bound",
    }
    assert promised <= set(found)
    assert len(found["on"]["samples"]) == 40
    assert {"device_kv_bytes", "index_bytes", "selection_bytes"} <= set(found["on"])


def test_a_watched_engine_is_looked_at_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []

    def metrics(engine: Any, prefix: str) -> dict[str, float]:
        looks.append(prefix)
        if len(looks) == 2:
            raise TidalError("busy")
        return {"vllm:num_requests_running": float(len(looks))}

    monkeypatch.setattr(bench, "read_metrics", metrics)
    monkeypatch.setattr(bench, "_LOOK_S", 0.001)
    with bench._watched(None) as samples:  # type: ignore[arg-type]
        while len(samples) < 3:
            pass
    assert [each.running for each in samples[:3]] == [1, 3, 4], "one look failed and did no harm"
    count = len(looks)
    time.sleep(0.05)
    assert len(looks) == count


def test_requests_are_sixteen_times_the_slots() -> None:
    assert CapacityOptions().context == 2048
    assert CapacityOptions(slots=96).context == 1536


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fit", "0"], "expected at least 1"),
        (["--requests", "2"], "more requests than fit"),
        (["--slots", "63"], "at least top-k 64 slots"),
        (["--output", "700"], "expected 1 to 681"),
        (["--output", "0"], "expected 1 to 681"),
        (["--plot", "out.gif"], "ending in .png"),
    ],
)
def test_what_would_not_measure_capacity_is_refused_before_anything_starts(arguments: list[str], words: str) -> None:
    found = CliRunner().invoke(app, ["bench", "capacity", *arguments])
    assert found.exit_code == 2
    assert words in " ".join(found.stderr.split())
    with pytest.raises(ConfigError):
        bench.run_capacity(CapacityOptions(fit=0), Console(file=io.StringIO()))
