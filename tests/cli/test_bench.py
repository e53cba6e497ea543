# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' figures, verdict and command line; and one small run of each part that needs no engine."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tidal_connector.cli.bench import commands, overhead, transfer
from tidal_connector.cli.bench.figures import MachineFacts, Spread, cpu_model, cpu_seconds, machine_facts, spread
from tidal_connector.cli.bench.overhead import Meter, OverheadOptions, run_overhead
from tidal_connector.cli.bench.overhead_report import Overhead, Pair, ratios, show
from tidal_connector.cli.demo.expect import RowBytes
from tidal_connector.cli.main import app
from tidal_connector.cluster.stack import Stack, StackSettings
from tidal_connector.errors import ConfigError, TidalError

MACHINE = MachineFacts(cores=2, cpu="some cpu", kernel="6", load_at_start=0.5, versions={"python": "3.11"})
PAIRS = (
    Pair("plain", 2.0, 2.1, 1.9, 2.09, 1.9, 2.2, 0.5, 2.3, 0.1),
    Pair("push", 4.0, 4.0, 3.8, 3.8, 3.9, 4.0, 0.6, 4.3, 0.2),
    Pair("plain", 1.0, 2.5, 1.0, 2.2, 1.0, 1.1, 0.4, 1.9, 0.3),
)


def result(**changes: Any) -> Overhead:
    ratio, engine = ratios(PAIRS)
    one = Spread(2.0, 1.0, 4.0)
    found = Overhead(
        ratio=ratio,
        engine_ratio=engine,
        bound=1.10,
        plain_s=one,
        push_s=one,
        plain_engine_s=one,
        push_engine_s=one,
        plain_cpu_s=one,
        push_cpu_s=one,
        decode_cpu_s=one,
        bytes_pushed=100,
        bytes_expected=100,
        landed_before_prefill_end=0.9,
        tokens=3000,
        arch="v32",
        layers=6,
        dtype="float32",
        block_size=16,
        max_num_batched_tokens=2048,
        threads="1",
        beside="nothing",
        machine=MACHINE,
        pairs=PAIRS,
    )
    return msgspec.structs.replace(found, **changes)


def shown(found: Overhead) -> str:
    text = io.StringIO()
    show(found, Console(file=text, width=160))
    return text.getvalue()


def test_ratios_are_taken_within_pairs_and_not_between_medians() -> None:
    ratio, engine = ratios(PAIRS)
    assert (ratio.median, ratio.min, ratio.max) == pytest.approx((1.05, 1.0, 2.5))
    assert (engine.median, engine.min, engine.max) == pytest.approx((1.1, 1.0, 2.2))


def test_a_spread_of_nothing_is_refused() -> None:
    assert spread([3, 1, 2]) == Spread(2, 1, 3)
    with pytest.raises(ValueError, match="no values"):
        spread([])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ratio": Spread(1.11, 1.0, 1.2)}, "1.110 x as long"),
        ({"bytes_pushed": 99}, "99 bytes were pushed, 100"),
    ],
)
def test_what_is_not_as_it_must_be_is_named(changes: dict[str, Any], words: str) -> None:
    assert result().shortcomings() == []
    assert "within the bound" in shown(result())
    assert [words in line for line in result(**changes).shortcomings()] == [True]
    assert words in shown(result(**changes))


def test_the_json_has_the_promised_keys() -> None:
    found = json.loads(msgspec.json.encode(result()))
    assert set(found["ratio"]) == {"median", "min", "max"}
    assert set(found["machine"]) == {"cores", "cpu", "kernel", "load_at_start", "versions"}
    assert len(found["pairs"]) == 3
    assert {"engine_ratio", "bytes_pushed", "landed_before_prefill_end", "threads", "beside"} <= set(found)


def test_the_machine_is_described() -> None:
    assert cpu_model("processor : 0\nmodel name\t: EPYC 9\nmodel name : other\n") == "EPYC 9"
    facts = machine_facts()
    assert facts.cores >= 1
    assert {"python", "tidal"} <= set(facts.versions)
    assert "load" in facts.line()


def test_processor_time_is_that_of_live_processes_with_any_name() -> None:
    script = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, b"a) b 1 2")
while time.process_time() < 0.3:
    pass
print(flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        found = cpu_seconds([process.pid])
        process.stdin.close()
    assert 0.1 < found < 10
    assert cpu_seconds([process.pid]) == 0


class FakeEngines:
    """Metrics of two engines; an answer raises them as a real one does, the bytes only later."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any] | None]] = []
        self.late = 0
        self.pushed = 0.0

    def metrics(self, server: Any, prefix: str = "tidal:") -> dict[str, float]:
        if prefix == "tidal:":
            self.late -= 1
            return {"tidal:bytes_pushed_total": self.pushed if self.late <= 0 else 0.0}
        count = sum(name == server.name for name, _ in self.requests)
        return {f"{prefix}_count": count, f"{prefix}_sum": 0.25 * count}

    def ask(self, server: Any, prompt: Any, params: dict[str, str] | None = None) -> None:
        self.requests.append((server.name, params))
        if params is not None and params["role"] == "prefill":
            self.late = 2
            self.pushed += (len(prompt) - 1) * 10


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[FakeEngines, Meter]:
    fake = FakeEngines()
    monkeypatch.setattr(overhead, "read_metrics", fake.metrics)
    monkeypatch.setattr(overhead, "_POLL_S", 0.0)
    monkeypatch.setattr(overhead, "_HEAD_START_S", 0.01)
    monkeypatch.setattr(overhead, "_SETTLE_S", 0.2)
    meter = Meter(Stack(StackSettings(model=tmp_path, logs=tmp_path)), RowBytes(1, 6, 4), None)  # type: ignore[arg-type]
    monkeypatch.setattr(meter, "_ask", fake.ask)
    return fake, meter


@pytest.mark.parametrize("plain_first", [True, False])
def test_a_pair_runs_in_the_order_that_was_asked_for(engines: tuple[FakeEngines, Meter], plain_first: bool) -> None:
    fake, meter = engines
    pair = meter.pair([1, 2, 3], plain_first=plain_first)
    order = [name for name, _ in fake.requests]
    assert order == (["reference", "decode", "prefill"] if plain_first else ["decode", "prefill", "reference"])
    assert pair.first == ("plain" if plain_first else "push")
    assert (pair.plain_engine_s, pair.push_engine_s) == (0.25, 0.25)
    assert fake.late <= 0, "the next timing began before the bytes of this one were counted"
    legs = {params["role"]: params for _, params in fake.requests if params is not None}
    assert legs["prefill"]["transfer_id"] == legs["decode"]["transfer_id"]


def test_bytes_that_never_come_are_an_error(
    engines: tuple[FakeEngines, Meter], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, meter = engines
    monkeypatch.setattr(fake, "metrics", lambda server, prefix="tidal:": {f"{prefix}_count": 9.0, f"{prefix}_sum": 1.0})
    monkeypatch.setattr(overhead, "read_metrics", fake.metrics)
    with pytest.raises(TidalError, match="do not show"):
        meter.pair([1, 2, 3], plain_first=True)


def test_prompts_are_fresh_for_each_pair() -> None:
    prompts = overhead._prompts(OverheadOptions(tokens=20, pairs=3))
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == 5
    assert all(len(prompt) == 20 for prompt in prompts)


def test_bench_alone_runs_everything_and_a_named_one_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for name in ("gather", "transfer", "prefill_overhead", "decode", "capacity"):
        monkeypatch.setattr(commands, name, lambda name=name: ran.append(name))
    assert CliRunner().invoke(app, ["bench"]).exit_code == 0
    assert ran == ["gather", "transfer", "prefill_overhead", "decode", "capacity"]
    assert CliRunner().invoke(app, ["bench", "prefill-overhead", "--pairs", "0"]).exit_code == 2
    assert len(ran) == 5


@pytest.mark.parametrize("arguments", [["--tokens", "1"], ["--pairs", "0"]])
def test_what_cannot_be_measured_is_refused_before_anything_starts(arguments: list[str]) -> None:
    found = CliRunner().invoke(app, ["bench", "prefill-overhead", *arguments])
    assert found.exit_code == 2
    assert found.stderr.startswith("tidal: ")
    with pytest.raises(ConfigError):
        run_overhead(OverheadOptions(tokens=0), Console(file=io.StringIO()))


@pytest.mark.mooncake
def test_layer_pushes_arrive_and_are_compared(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = ["bench", "transfer", "--layers", "2", "--tokens", "100", "--runs", "1", "--json", str(file)]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    cases = json.loads(file.read_text())["cases"]
    assert [(case["page_tokens"], case["pages"]) for case in cases] == [
        (16, "contiguous"),
        (16, "scattered"),
        (128, "contiguous"),
        (128, "scattered"),
    ]
    # Neighbours merge: a layer is one write where pages are contiguous, and nearly one per page where they are not.
    contiguous, scattered = cases[0]["descriptors"], cases[1]["descriptors"]
    assert contiguous == 2
    assert 8 <= scattered <= 14


@pytest.mark.mooncake
@pytest.mark.parametrize("arguments", [["--json"], ["--json", "-"], ["--json", "--pairs", "2"]])
def test_json_without_a_file_is_all_that_goes_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    def measured(options: OverheadOptions, console: Console) -> Overhead:
        show(result(), console)
        return result()

    monkeypatch.setattr(overhead, "run_overhead", measured)
    found = CliRunner().invoke(app, ["bench", "prefill-overhead", *arguments])
    assert json.loads(found.stdout)["ratio"] == msgspec.to_builtins(result().ratio)
    assert "within the bound" in found.stderr


def test_other_bytes_than_were_sent_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(self: Any, pieces: Any) -> str:
        return "other"

    monkeypatch.setattr(transfer._Target, "digest", spoilt)
    found = CliRunner().invoke(app, ["bench", "transfer", "--layers", "1", "--tokens", "10", "--runs", "1"])
    assert found.exit_code == 2
    assert "other bytes landed" in found.stderr
