# SPDX-License-Identifier: Apache-2.0
"""The planner's numbers are those of the layout and of the division that an engine makes; what it prints can be set."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from tidal_connector.cli.bench import plot
from tidal_connector.cli.main import app
from tidal_connector.cli.plan.capacity import Limit, Question, divide, most_on_device, room_for, seat_bytes, step_bytes
from tidal_connector.cli.plan.models import BUILT_IN, find_model, model_of
from tidal_connector.cli.plan.planned import Plan, make_plan
from tidal_connector.config import Offload, PoolConfig, SelectionConfig, TidalConfig
from tidal_connector.errors import ConfigError
from tidal_connector.layout import RegionKind
from tidal_connector.modelmaker.shape import hf_config, model_shape
from tidal_connector.selection.budget import ModelCosts, divide_memory, slot_bytes

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
ARGUMENTS = ["--hbm", "64GiB", "--dram", "1TiB", "--context", "131072", "--concurrency", "24", "--weights", "20GiB"]


def question(model: str = "deepseek-v3.2", **changes: Any) -> Question:
    known = find_model(model)
    plain: dict[str, Any] = {
        "model": known,
        "latent_format": "bf16",
        "index_format": "fp8",
        "hbm": 64 * GIB,
        "weights": 20 * GIB,
        "utilization": 0.92,
        "dram": 1024 * GIB,
        "dram_share": 0.85,
        "engines": 1,
        "context": 131_072,
        "concurrency": 24,
        "block_size": 256 if known.compressed else 128,
        "slots": None,
        "queries": 1,
        "hit_rate": 0.7,
        "tpot_s": 0.05,
        "link": 50e9,
        "memory": 200e9,
    }
    return Question(**{**plain, **changes})


@pytest.mark.parametrize(
    ("model", "latent_format", "layers", "leaders", "bytes_per_token"),
    [
        ("deepseek-v3.2", "bf16", 61, 61, 70_272),
        ("deepseek-v3.2", "fp8_ds_mla", 61, 61, 40_016),
        ("glm-5.1", "bf16", 78, 78, 89_856),
        ("glm-5.2", "bf16", 78, 21, 89_856),
        ("glm-5.2", "int8", 78, 21, 51_168),
        ("deepseek-v4-flash", "bf16", 21, 21, 5_376),
        ("deepseek-v4-flash", "fp8_ds_mla", 21, 21, 3_066),
        ("deepseek-v4-pro", "bf16", 30, 30, 7_680),
    ],
)
def test_built_in_models_have_their_published_sizes(
    model: str, latent_format: str, layers: int, leaders: int, bytes_per_token: int
) -> None:
    known = find_model(model)
    assert (len(known.layers), len(known.leaders)) == (layers, leaders)
    row = known.layout(latent_format, "fp8").row_bytes(RegionKind.LATENT)
    assert row == bytes_per_token * known.row_tokens


def test_layers_of_glm_share_as_vllm_says() -> None:
    assert find_model("glm-5.2").leaders == (0, *range(1, 78, 4))
    given_types = {**BUILT_IN["glm-5.1"], "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]}
    assert model_of(given_types, "m").leaders == (0, 2)
    by_pattern = {**BUILT_IN["glm-5.1"], "num_hidden_layers": 4, "index_topk_pattern": "FSSF"}
    assert model_of(by_pattern, "m").leaders == (0, 3)


@pytest.mark.parametrize("arch", ["v32", "glm"])
def test_a_checkpoint_folder_is_read_as_its_maker_meant_it(arch: str, tmp_path: Path) -> None:
    shape = model_shape(arch, layers=None, topk=64, dtype="bfloat16", vocab=300)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape, bos=1, eos=2, pad=0)))
    found = find_model(str(tmp_path))
    assert found.leaders == tuple(layer for layer in range(shape.layers) if shape.has_indexer(layer))
    assert (found.top_k, found.latent_bytes("bf16"), found.index_bytes("fp8")) == (64, 1152, 132)


@pytest.mark.parametrize(
    ("model", "mib"), [("deepseek-v3.2", 137), ("glm-5.1", 175.5), ("deepseek-v4-flash", 10.5), ("deepseek-v4-pro", 30)]
)
def test_a_step_that_misses_everything_moves_what_the_facts_say(model: str, mib: float) -> None:
    asked = question(model)
    assert step_bytes(asked, asked.context, 0.0) / (1 << 20) == pytest.approx(mib, rel=0.01)
    assert step_bytes(asked, asked.slot_rows() * asked.model.row_tokens, 0.0) == 0


@given(
    model=st.sampled_from(sorted(BUILT_IN)),
    hbm=st.integers(4, 200),
    dram=st.integers(1, 2048),
    context=st.integers(1, 300_000),
    slots=st.none() | st.integers(2048, 9000),
    queries=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_what_fits_is_what_an_engine_would_serve_and_one_more_is_not(
    model: str, hbm: int, dram: int, context: int, slots: int | None, queries: int
) -> None:
    asked = question(model, hbm=hbm * GIB, weights=0, dram=dram * GIB, slots=slots, queries=queries)
    rows = asked.rows_of(context)
    room = room_for(asked, context)
    assert room.fit == min(value for value in (room.pool, room.device, room.copying) if value is not None)
    assert room.device == most_on_device(asked, context)
    if room.device:
        assert divide(asked, context, room.device).concurrent(rows) == room.device
    over = room.device + 1
    if over * asked.window_bytes < asked.budget:
        with contextlib.suppress(ConfigError):  # not even the division can be made
            assert divide(asked, context, over).concurrent(rows) < over


@pytest.mark.parametrize(("model", "context"), [("deepseek-v3.2", 131_072), ("glm-5.2", 262_144), ("glm-5.1", 65_536)])
def test_without_pool_and_bandwidth_the_gain_is_what_the_layout_allows(model: str, context: int) -> None:
    room = room_for(question(model, hbm=4096 * GIB), context)
    assert room.device / room.off == pytest.approx(room.bound, rel=0.02)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("deepseek-v3.2", {}),
        ("deepseek-v3.2", {"context": 8192, "concurrency": 110, "hit_rate": 0.99}),  # slots above half of the budget
        ("glm-5.2", {"concurrency": 500}),
        ("deepseek-v3.2", {"dram": 64 * GIB}),
    ],
)
def test_the_settings_that_are_printed_give_the_requests_that_were_planned(model: str, changes: dict[str, Any]) -> None:
    asked = question(model, **changes)
    found = make_plan(asked)
    selection = SelectionConfig(bytes=found.device.selection_bytes if found.device.set_selection_bytes else None)
    config = TidalConfig(offload=Offload.ON, pool=PoolConfig(bytes=found.pool.bytes), selection=selection)
    costs = ModelCosts(
        top_k=asked.model.top_k,
        queries=1,
        requests=found.device.requests,
        context=asked.context,
        block_size=asked.block_size,
        latent_block_bytes=asked.block_size * asked.layout.row_bytes(RegionKind.LATENT),
        index_block_bytes=asked.block_size * asked.layout.row_bytes(RegionKind.INDEX),
        slot_bytes=sum(slot_bytes(each.row_bytes) for each in asked.layout.regions if each.kind is RegionKind.LATENT),
    )
    division = divide_memory(config, costs, asked.budget)
    assert division.concurrent(asked.context) == found.device.requests == found.most
    assert found.fits is (found.most == asked.concurrency)


def test_slots_are_as_wide_as_an_engine_makes_them() -> None:
    asked = question(latent_format="fp8_ds_mla")
    assert seat_bytes(asked, asked.context) == 4112 * 61 * 704  # rows of 656 bytes, in whole cache lines


def test_slots_beyond_half_of_the_budget_have_to_be_set() -> None:
    wide = make_plan(question(context=8192, concurrency=110, hit_rate=0.99))
    assert wide.device.set_selection_bytes
    assert wide.device.selection_bytes > wide.device.budget // 2
    assert not make_plan(question()).device.set_selection_bytes


@pytest.mark.parametrize("model", ["deepseek-v3.2", "glm-5.2", "deepseek-v4-flash"])
def test_at_a_knee_the_limit_changes_from_one_block_to_the_next(model: str) -> None:
    asked = question(model)
    found = make_plan(asked)
    assert found.knees
    for knee in found.knees:
        assert room_for(asked, knee.context).binds is knee.after
        assert room_for(asked, knee.context - asked.block_size).binds is knee.before
        assert room_for(asked, knee.context).fit == knee.requests


@pytest.mark.parametrize(
    ("changes", "limit", "words"),
    [
        ({"dram": 64 * GIB}, Limit.POOL, "A pool of"),
        ({"concurrency": 1000, "hit_rate": 1.0}, Limit.INDEX, "More device memory"),
        ({"concurrency": 1000, "hit_rate": 0.0}, Limit.COPYING, "a higher hit rate"),
        ({"concurrency": 1000, "context": 4000}, Limit.SLOTS, "Fewer slots"),
    ],
)
def test_the_limit_that_binds_is_named_with_what_helps(changes: dict[str, Any], limit: Limit, words: str) -> None:
    found = make_plan(question(**changes))
    assert not found.fits
    assert found.first is limit
    assert any(words in note for note in found.notes)


@pytest.mark.parametrize("dram", [20 * GIB, 1024 * GIB])
@pytest.mark.parametrize("engines", [1, 8])
def test_hugepages_hold_the_pools_of_all_engines_within_the_host(dram: int, engines: int) -> None:
    pool = make_plan(question(dram=dram, engines=engines)).pool
    assert pool.hugepages_2m << 21 >= pool.bytes * engines
    assert pool.hugepages_1g << 30 >= pool.bytes * engines
    assert pool.bytes * engines <= dram
    count = int(pool.boot_line.rpartition("=")[2])
    assert str(count) in pool.reserve_line
    assert count == (pool.hugepages_1g if "1G" in pool.boot_line else pool.hugepages_2m)


def test_engines_of_one_host_share_memory_and_bandwidth() -> None:
    one, eight = make_plan(question()), make_plan(question(engines=8))
    assert eight.pool.room == one.pool.room // 8
    assert eight.copy_speed == pytest.approx(0.6 * 200e9 / 8)


def test_a_faster_link_carries_a_context_in_proportion() -> None:
    asked = question()
    found = make_plan(asked)
    assert found.transfer_bytes == asked.layout.transfer_bytes(131_072)
    for line in found.transfers:
        assert line.seconds * line.gbit_per_s == pytest.approx(found.transfers[0].seconds * 10)
        assert line.seconds * line.tokens_per_s == pytest.approx(131_072)


def test_v4_keeps_more_on_the_device_and_hands_it_over_too() -> None:
    asked = question("deepseek-v4-flash")
    found = make_plan(asked)
    assert asked.device_block / asked.block_size == 21 * 132 / 4 + 20 * 1024 / 128  # keys, and a row of 128 tokens
    assert asked.window_bytes / (1 << 20) == pytest.approx(5.4, rel=0.01)
    assert found.transfer_bytes == 131_072 * (5_376 + 21 * 132 // 4 + 160) + asked.window_bytes


def test_drafting_adds_a_layer_with_its_own_indexer_and_rows_to_select() -> None:
    plain, drafting = question("glm-5.2"), question("glm-5.2", queries=2)
    assert len(drafting.layout.regions) == len(plain.layout.regions) + 2
    assert step_bytes(drafting, 131_072, 0.0) == 2 * step_bytes(plain, 131_072, 0.0) * 79 // 78


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"num_hidden_layers": 61, "kv_lora_rank": 512}', "no index_topk"),
        ('{"index_topk": 2048, "num_hidden_layers": 0}', "num_hidden_layers = 0"),
        ('{"index_topk": 2048, "num_hidden_layers": 2, "qk_rope_head_dim": 64}', "index_head_dim = None"),
        ("{", "expected a model's config.json"),
        ("[]", "an object"),
        (json.dumps({**BUILT_IN["deepseek-v4-flash"], "compress_ratios": [3] * 43}), "compress_ratios holds [3]"),
    ],
)
def test_a_configuration_that_cannot_be_planned_is_one_clear_line(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    found = CliRunner().invoke(app, ["plan", str(file), *ARGUMENTS])
    assert found.exit_code == 2
    assert found.stderr.startswith("tidal: ")
    assert words in found.stderr
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--hbm", "1GiB"], "leaves nothing for KV"),
        (["--slots", "10"], "selection.slots = 10"),
        (["--dram", "many"], "--dram = 'many'"),
        (["--hbm", "64"], '--hbm 64: that is 64 bytes; give the unit, as in "64GiB"'),
        (["--hbm", "64GB"], "--hbm = '64GB': GB is unknown; write GiB, as in \"64GiB\""),
        (["--plot", "absent/x.png"], "--plot absent/x.png"),
    ],
)
def test_options_that_cannot_be_planned_are_one_clear_line(more: list[str], words: str) -> None:
    found = CliRunner().invoke(app, ["plan", "deepseek-v3.2", *ARGUMENTS, *more])
    assert found.exit_code == 2
    assert words in found.stderr


def test_the_exit_status_says_whether_it_fits() -> None:
    assert CliRunner().invoke(app, ["plan", "deepseek-v3.2", *ARGUMENTS]).exit_code == 0
    found = CliRunner().invoke(app, ["plan", "deepseek-v3.2", *ARGUMENTS, "--concurrency", "90"])
    assert found.exit_code == 1
    assert "does not fit: 90 requests of 131,072 tokens" in found.stdout


def test_json_is_the_plan() -> None:
    found = CliRunner().invoke(app, ["plan", "glm-5.2", *ARGUMENTS, "--json"])
    read = msgspec.json.decode(found.stdout, type=Plan)
    assert (read.model, read.layers, read.groups, read.fits) == ("glm-5.2", 78, 21, True)


def test_tables_fit_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for model in BUILT_IN:
        found = CliRunner().invoke(app, ["plan", model, *ARGUMENTS])
        assert "…" not in found.stdout
        assert max(map(len, found.stdout.splitlines())) <= 90


def test_the_picture_opens_and_shows_both_sides(tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    assert CliRunner().invoke(app, ["plan", "glm-5.2", *ARGUMENTS, "--plot", str(file)]).exit_code == 0
    with Image.open(file) as image:
        assert (image.format, image.size) == ("PNG", (plot.WIDTH, plot.HEIGHT))
        colours = {colour: count for count, colour in image.convert("RGB").getcolors(1 << 20)}
    for colour in (plot.OURS, plot.OTHER):
        assert colours.get(tuple(bytes.fromhex(colour[1:])), 0) > 2000, colour


def test_the_output_in_the_documentation_is_what_is_printed() -> None:
    text = (ROOT / "tidal_connector/cli/README.md").read_text()
    block = text[text.index("$ tidal plan ") :].partition("\n```")[0]
    command, _, shown = block.partition("\n")
    found = CliRunner().invoke(app, command.split()[2:], env={"COLUMNS": "100"})
    assert [line.rstrip() for line in found.stdout.splitlines()] == shown.splitlines()
