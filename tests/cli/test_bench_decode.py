# SPDX-License-Identifier: Apache-2.0
"""``tidal bench decode``: its ratios, what it makes of the engine's counters, and the order in which it asks."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.cli.canned import batch_case, decode
from tidal_connector.cli.bench import decode as bench
from tidal_connector.cli.bench.decode import DecodeOptions
from tidal_connector.cli.bench.decode_report import Round, moved, show, show_model
from tidal_connector.cli.bench.decode_report import batch_case as case_of
from tidal_connector.cli.bench.engines import Arrival
from tidal_connector.cli.demo.expect import RowBytes
from tidal_connector.cli.main import app

COUNTERS = {
    "selection_hits": 300.0,
    "selection_misses": 100.0,
    "bytes_gathered": 8000.0,
    "prefetches": 12.0,
    "prefetches_late": 3.0,
    "prefetch_bytes": 2000.0,
    "prefetch_wait_seconds": 0.001,
    "resolve_seconds": 0.002,
    "gather_seconds": 0.004,
}


def series(counters: dict[str, float], add: float = 0.0) -> dict[str, float]:
    return {f"tidal:{name}_total": value + add for name, value in counters.items()}


def test_counters_become_figures_per_step() -> None:
    found = moved(series(dict.fromkeys(COUNTERS, 0.0), 5), series(COUNTERS, 5), selected_per_step=100)
    assert found.steps == 4
    assert found.hit_rate == 0.75
    assert found.bytes_per_step == 2000
    assert (found.prefetched_share, found.late_share, found.prefetches_per_step) == (0.25, 0.25, 3)
    assert found.hidden_share == pytest.approx(0.75)
    assert (found.wait_ms_per_step, found.resolve_ms_per_step, found.gather_ms_per_step) == pytest.approx(
        (0.25, 0.5, 1)
    )


def test_an_engine_that_counted_nothing_divides_by_nothing() -> None:
    found = moved({}, {}, selected_per_step=100)
    assert set(msgspec.structs.asdict(found).values()) == {0.0}


def test_ratios_are_those_of_rounds_that_ran_one_after_the_other() -> None:
    def rounds(*medians: float) -> list[Round]:
        return [Round((median, median / 2, median * 9), median * 2) for median in medians]

    found = case_of(4, {"on": rounds(1.0, 4.0, 2.0), "off": rounds(1.0, 2.0, 2.5)}, batch_case().moved)
    assert found.tpot_on_over_off.median == pytest.approx(1.0)
    assert (found.tpot_on_over_off.min, found.tpot_on_over_off.max) == pytest.approx((0.8, 2.0))
    assert found.engine_tpot_on_over_off == found.tpot_on_over_off
    assert found.tpot_on_ms.median == pytest.approx(2000)
    assert found.prefetch_on_over_off is None
    found = case_of(
        1, {"on": rounds(1.0, 1.0), "off": rounds(1.0, 1.0), "no prefetch": rounds(2.0, 4.0)}, batch_case().moved
    )
    assert found.prefetch_on_over_off is not None
    assert found.prefetch_on_over_off.median == pytest.approx(0.375)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bound": 1.0}, "v32, batch 1: a token takes 1.020 x as long"),
        ({"prefetch_on_over_off": 1.1}, "prefetch makes a token take 1.100 x as long"),
    ],
)
def test_what_is_not_as_it_must_be_is_named(changes: dict[str, Any], words: str) -> None:
    assert decode().shortcomings() == []
    found = msgspec.structs.replace(decode(), **changes)
    assert words in found.shortcomings()[0]
    console = Console(record=True, width=200, file=io.StringIO())
    show(found, console)
    assert words in console.export_text()


def test_the_tables_of_a_model_show_times_and_bytes() -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    show_model(decode().models[1], console)
    text = console.export_text()
    assert [name in text for name in ("glm, 8 layers", "20.0", "19.5", "1.02 (0.92 to 1.22)")] == [True] * 4
    assert "0.95 (0.85 to 1.14)" in text
    assert "80.0%" in text


def test_the_json_has_the_promised_keys() -> None:
    found = json.loads(msgspec.json.encode(decode()))
    assert found["tpot_on_over_off"] == 1.02
    assert found["prefetch_on_over_off"] == 0.95
    case = found["models"][1]["cases"][0]
    assert set(case["tpot_on_over_off"]) == {"median", "min", "max"}
    assert {"hit_rate", "bytes_per_step", "prefetched_share"} <= set(case["moved"])


class FakeEngines:
    """Three engines whose tokens take 20, 10 and 40 ms; every answer is noted."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.tokens: dict[str, int] = {}

    def at_once(
        self, engine: Any, prompts: Sequence[Any], max_tokens: int, all_started: Callable[[], None] | None = None
    ) -> list[Arrival]:
        self.asked.append((engine.name, len(prompts), max_tokens))
        self.tokens[engine.name] = self.tokens.get(engine.name, 0) + len(prompts) * (max_tokens - 1)
        if all_started is not None:
            all_started()
        step = {"on": 0.02, "off": 0.01, "no-prefetch": 0.04}[engine.name]
        times = tuple(step * number for number in range(max_tokens))
        return [Arrival(0.0, times, tuple(range(1, max_tokens + 1)))] * len(prompts)

    def metrics(self, engine: Any, prefix: str = "tidal:") -> dict[str, float]:
        count = self.tokens.get(engine.name, 0)
        return {"vllm:inter_token_latency_seconds_sum": 0.5 * count, "vllm:inter_token_latency_seconds_count": count}


def test_prompts_are_prefilled_once_and_engines_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngines()
    monkeypatch.setattr(bench, "at_once", fake.at_once)
    monkeypatch.setattr(bench, "read_metrics", fake.metrics)
    options = DecodeOptions(batches=(4, 8), context=600, tokens=3, repetitions=3)
    engines = {name: type("Engine", (), {"name": name.replace(" ", "-")})() for name in ("on", "off", "no prefetch")}
    meter = bench._Meter(options, engines, RowBytes(8, 2304, 264), 2, Console(file=io.StringIO()))
    cases = meter.cases("glm")
    assert sorted(fake.asked[:24]) == sorted((name, 1, 1) for name in ("on", "off", "no-prefetch") for _ in range(8))
    rounds = [asked for asked in fake.asked[24:] if asked[1] == 8]
    assert [name for name, _, _ in rounds] == [
        *("on", "off", "no-prefetch"),  # not timed
        *("on", "off", "no-prefetch"),
        *("off", "no-prefetch", "on"),
        *("no-prefetch", "on", "off"),
    ]
    assert [(case.batch, case.rounds) for case in cases] == [(4, 6), (8, 3)]
    assert cases[1].tpot_on_over_off.median == pytest.approx(2.0)
    assert cases[1].prefetch_on_over_off is not None
    assert cases[1].prefetch_on_over_off.median == pytest.approx(0.5)
    assert cases[1].engine_tpot_on_over_off.median == pytest.approx(1.0)


def test_prompts_share_nothing() -> None:
    prompts = bench.random_prompts(3, 50, 1)
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert {len(prompt) for prompt in prompts} == {50}


@pytest.mark.parametrize(
    "arguments", [["--context", "100"], ["--tokens", "2"], ["--repetitions", "0"], ["--batch", "0"], ["--batch", "65"]]
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(arguments: list[str], tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["bench", "decode", *arguments, "--json", str(tmp_path / "out.json")])
    assert found.exit_code == 2
    assert found.stderr.startswith("tidal: --")
    assert "expected" in found.stderr
