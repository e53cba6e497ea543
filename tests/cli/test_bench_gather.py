# SPDX-License-Identifier: Apache-2.0
"""``tidal bench gather``: its numpy LRU against the definition of resolve, its ratios, and a small real run."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.cli.canned import copy_case, gather, resolve_case
from tidal_connector import ops
from tidal_connector.cli.bench import gather_copy, gather_resolve, rounds
from tidal_connector.cli.bench.figures import Spread
from tidal_connector.cli.bench.gather_lru import MappedLru, SortedLru, selections
from tidal_connector.cli.bench.gather_report import ContextPoint
from tidal_connector.cli.bench.gather_resolve import PAGE_TOKENS, Native, Steps, cost_split
from tidal_connector.cli.bench.gather_tables import show
from tidal_connector.cli.bench.rounds import Contender, interleaved
from tidal_connector.cli.main import app
from tidal_connector.errors import TidalError

SMALL = ["bench", "gather", "--pool", "64MiB", "--top-k", "64", "--repetitions", "2"]


def steps(count: int) -> Steps:
    return Steps(context=1000, batch=2, top_k=64, slots=128, hit_rate=0.9, count=count, seed=1)


@pytest.mark.parametrize("kind", [SortedLru, MappedLru])
def test_the_numpy_lru_finds_what_resolve_is_defined_to_find(kind: type[SortedLru]) -> None:
    world = steps(40)
    native = Native(world, world.selected, threads=1, implementation=ops.Implementation.REFERENCE)
    requests = [kind(world.slots, world.context + world.count) for _ in range(world.batch)]
    for step in range(world.count):
        native.prepare()()
        assert native.last is not None
        starts = native.last.miss_start
        for index, request in enumerate(requests):
            found = request.resolve(world.selected[step][index], world.context + step, world.pages[index], PAGE_TOKENS)
            rows = native.last.miss_rows[starts[index] : starts[index + 1]]
            assert sorted(rows) == sorted(found.miss_rows), f"step {step}"
            assert len(set(found.slots)) == world.top_k
            assert set(found.miss_slots) <= set(found.slots)


def test_selections_hit_as_often_as_was_asked_for() -> None:
    lru = SortedLru(128, 2000)
    pages = np.arange(40, dtype=np.int32)
    drawn = itertools.islice(selections(1000, 64, 0.75, np.random.default_rng(2)), 60)
    misses = [len(lru.resolve(chosen, 1000 + step, pages, 64).miss_rows) for step, chosen in enumerate(drawn)]
    assert misses[0] == 64
    assert set(misses[20:]) == {16}


def test_a_context_that_cannot_tell_hits_from_misses_is_refused() -> None:
    with pytest.raises(ValueError, match=r"context 150: expected at least 160"):
        next(selections(150, 64, 0.9, np.random.default_rng(0)))


def test_each_contender_begins_a_round_and_what_is_prepared_is_not_timed() -> None:
    order: list[str] = []
    rounds = 0

    def contender(name: str) -> Contender:
        def prepare() -> Any:
            order.append(f"prepare {name}")
            return lambda: order.append(name)

        return Contender(name, prepare)

    def done() -> None:
        nonlocal rounds
        rounds += 1

    found = interleaved([contender("a"), contender("b")], 2, done, warm_up=1)
    assert {name: len(values) for name, values in found.items()} == {"a": 2, "b": 2}
    assert rounds == 3
    assert [name for name in order if "prepare" not in name] == ["a", "b", "b", "a", "a", "b"]
    assert order[:4] == ["prepare a", "a", "prepare b", "b"]


def test_a_contender_works_for_a_while_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count()
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: next(now) * 0.25)
    done: list[str] = []
    work = Contender("a", lambda: lambda: done.append("a"))
    found = interleaved([work], 1, lambda: None, warm_up=0, settle_s=1.0)
    # The clock is read once for the end of the second, then before each piece of work until it is over, then twice.
    assert found == {"a": [0.25]}
    assert len(done) == 3 + 1


def test_a_cost_split_adds_up_and_noise_makes_nothing_negative() -> None:
    split = cost_split(empty=1.0, nothing=4.0, hits=9.0, whole=11.0)
    assert (split.call, split.scan, split.find, split.replace) == (1.0, 3.0, 5.0, 2.0)
    assert cost_split(empty=1.0, nothing=0.5, hits=0.4, whole=0.3).replace == 0.0


def test_the_worst_case_is_on_top() -> None:
    found = gather(
        copies=(
            copy_case(gather_over_memcpy=Spread(0.9, 0.8, 1.0)),
            copy_case(gather_over_memcpy=Spread(0.75, 0.1, 2)),
        ),
        resolves=(resolve_case(batch=1, us_per_row=Spread(9, 9, 9)), resolve_case(batch=8, threads=1)),
        contexts=(ContextPoint(8192, Spread(10, 9, 11)), ContextPoint(1 << 20, Spread(12, 9, 40))),
    )
    assert found.gather_over_memcpy == 0.75
    assert found.resolve_us_per_row == resolve_case().us_per_row
    assert found.resolve_flatness == pytest.approx(1.2)
    assert found.shortcomings() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gather_over_memcpy": 0.69}, "0.69 of memcpy"),
        ({"gather_over_torch_index_select": 2.5}, "2.50 x as fast as torch's index_select and index_copy_"),
        ({"resolve_over_numpy": 2.9}, "2.90 x as fast as numpy"),
        ({"resolve_flatness": 1.4}, "1.40 x as long at one context"),
    ],
)
def test_what_is_not_as_it_must_be_is_named(changes: dict[str, Any], words: str) -> None:
    found = msgspec.structs.replace(gather(), **changes)
    assert [words in line for line in found.shortcomings()] == [True]
    console = Console(record=True, width=200, file=io.StringIO())
    show(found, console)
    assert words in console.export_text()


@pytest.mark.native
def test_a_small_run_measures_every_case(tmp_path: Path) -> None:
    file, picture = tmp_path / "out.json", tmp_path / "out.png"
    found = CliRunner().invoke(app, [*SMALL, "--json", str(file), "--plot", str(picture)])
    assert found.exit_code in {0, 1}, found.output  # how fast a small pool is says nothing
    result = json.loads(file.read_text())
    cases = [(case["row_bytes"], case["batch"], case["threads"]) for case in result["copies"]]
    assert cases == [(size, batch, threads) for size in (1152, 656) for batch in (1, 8) for threads in (1, 2)]
    assert all(case["rows"] == 64 * case["batch"] and case["gather_gb_per_s"]["min"] > 0 for case in result["copies"])
    assert [(case["batch"], case["threads"]) for case in result["resolves"]] == [(1, 1), (1, 2), (8, 1), (8, 2)]
    assert all(case["hits"] == pytest.approx(58 / 64) for case in result["resolves"])
    assert [point["context"] for point in result["contexts"]] == [1 << 13, 1 << 15, 1 << 17, 1 << 19, 1 << 20]
    assert "64 MiB" in result["pool"]
    assert picture.stat().st_size > 10_000


@pytest.mark.native
def test_rows_at_the_wrong_place_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops.copy_rows

    def shifted(source: Any, source_rows: Any, destination: Any, destination_rows: Any, **more: Any) -> None:
        real(source, source_rows, destination, np.roll(destination_rows, 1), **more)

    monkeypatch.setattr(gather_copy.ops, "copy_rows", shifted)
    # What broke keeps rows of the pool alive for a while: as hugepages they would be in use when others count them.
    monkeypatch.setattr(f"{gather_copy.__package__}.gather.extra_hugepages", lambda size: contextlib.nullcontext(""))
    found = CliRunner().invoke(app, SMALL)
    assert found.exit_code == 2
    assert "other bytes lie in the slots" in found.stderr


@pytest.mark.native
def test_a_plan_that_fetches_other_rows_than_numpy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = steps(gather_resolve.WARM_UP + 1)
    real = ops.resolve

    def off_by_one(*args: Any, **more: Any) -> Any:
        found = real(*args, **more)
        found.miss_rows[:] += 1
        return found

    monkeypatch.setattr(gather_resolve.ops, "resolve", off_by_one)
    with pytest.raises(TidalError, match="and not the same"):
        gather_resolve.resolve_case(world, 1, 1, lambda: None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--top-k", "100"], "a multiple of 64"),
        (["--repetitions", "0"], "at least 1"),
        (["--pool", "1MiB"], "the rows of one batch"),
        (["--pool", "much"], "expected bytes"),
        (["--plot", "out.txt"], "ending in .png"),
        (["--json", "nowhere/out.json"], "a folder that exists"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(arguments: list[str], words: str) -> None:
    found = CliRunner().invoke(app, ["bench", "gather", *arguments])
    assert found.exit_code == 2
    assert words in " ".join(found.stderr.split())
