# SPDX-License-Identifier: Apache-2.0
"""The example files are valid and offer what there is; no metric is named that is not counted."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from tidal_connector.cluster.serving import HttpConfig, SuperviseConfig, read_serve_config
from tidal_connector.config import PoolConfig, SelectionConfig
from tidal_connector.metrics import COUNTERS, GAUGES
from tidal_connector.registry.settings import RegistryConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
ENGINES = ("decode", "prefill", "single")


@pytest.mark.parametrize("text", [README, (ROOT / "configs/decode.toml").read_text()])
def test_metrics_that_are_named_exist(text: str) -> None:
    known = {*GAUGES, *(f"{name}_total" for name in COUNTERS), *COUNTERS}
    named = set(re.findall(r"tidal:(\w+)", text))
    assert named
    assert named <= known


@pytest.mark.parametrize("name", ENGINES)
def test_the_example_files_are_valid_as_they_are_and_with_all_that_they_offer(name: str, tmp_path: Path) -> None:
    path = ROOT / f"configs/{name}.toml"
    read_serve_config(path)
    offered = re.sub(r"(?m)^# (\[[\w.]+\]|[\w-]+ = )", r"\1", path.read_text())
    tomllib.loads(offered)
    everything = tmp_path / path.name
    everything.write_text(offered)
    read_serve_config(everything)


@pytest.mark.parametrize("name", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("table", "kind"), [("registry", RegistryConfig), ("http", HttpConfig), ("supervise", SuperviseConfig)]
)
def test_an_engine_file_offers_every_setting_of_being_announced(
    name: str, table: str, kind: type[msgspec.Struct]
) -> None:
    text = (ROOT / f"configs/{name}.toml").read_text()
    _, _, rest = text.partition(f"# [{table}]")
    offered = re.findall(r"(?m)^# (\w+) = ", rest.partition("# [")[0])
    assert sorted(offered) == sorted(field.name for field in msgspec.structs.fields(kind))


@pytest.mark.parametrize(("table", "kind"), [("pool", PoolConfig), ("selection", SelectionConfig)])
def test_the_decode_file_offers_every_setting_of_the_pool_and_the_selection_cache(
    table: str, kind: type[msgspec.Struct]
) -> None:
    text = (ROOT / "configs/decode.toml").read_text()
    part = text[text.index(f"[tidal.{table}]") + 1 :].partition("\n[")[0]
    assert set(re.findall(r"(?m)^#? ?(\w+) = ", part)) == {field.name for field in msgspec.structs.fields(kind)}
