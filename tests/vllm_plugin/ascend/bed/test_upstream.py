# SPDX-License-Identifier: Apache-2.0
"""Every function of the hosts that we replace, override or lean on is the one that we were written for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.vllm_plugin.ascend.bed.sources import VLLM, VLLM_ASCEND, Sources
from tests.vllm_plugin.ascend.bed.upstream import ENTRIES, changes, recorded
from tests.vllm_plugin.host_signatures import read_signatures
from tidal_connector.vllm_plugin.ascend import host

pytestmark = pytest.mark.contract

SIGNATURES = Path(__file__).parents[2] / "host_signatures.json"


def test_the_pinned_releases_are_the_supported_ones() -> None:
    assert (VLLM_ASCEND.version, VLLM.version) == (host.SUPPORTED, host.SUPPORTED_VLLM)


def test_each_function_that_we_lean_on_is_the_one_that_we_were_written_for(sources: Sources) -> None:
    found = changes([sources.vllm_ascend, sources.vllm], ENTRIES, recorded())
    assert not found, "\n".join(found)


def test_the_connector_interface_is_the_one_that_we_were_written_for(sources: Sources) -> None:
    expected = json.loads(SIGNATURES.read_text())["0.23"]
    assert read_signatures(sources.vllm / "vllm") == expected


@pytest.fixture
def copy(sources: Sources, tmp_path: Path) -> Path:
    """Copy the modules that we lean on, so that they can be changed."""
    for seam in ENTRIES:
        inside = Path(*seam.module.split(".")).with_suffix(".py")
        found = next(root / inside for root in (sources.vllm_ascend, sources.vllm) if (root / inside).is_file())
        (tmp_path / inside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(found, tmp_path / inside)
    return tmp_path


def change(tree: Path, module: str, old: str, new: str) -> list[str]:
    path = tree / Path(*module.split(".")).with_suffix(".py")
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
    path.write_text(text.replace(old, new))
    return changes([tree], ENTRIES, recorded())


def test_an_unchanged_copy_has_nothing_to_report(copy: Path) -> None:
    assert changes([copy], ENTRIES, recorded()) == []


def test_a_changed_signature_is_reported_with_the_name_of_the_patch(copy: Path) -> None:
    (line,) = change(
        copy,
        "vllm_ascend.platform",
        "def check_and_update_config(cls, vllm_config: VllmConfig)",
        "def check_and_update_config(cls, vllm_config: VllmConfig, strict: bool = False)",
    )
    assert "patch ascend-configuration: check_and_update_config of NPUPlatform is now" in line
    assert "strict: bool=False" in line


def test_a_changed_default_is_reported(copy: Path) -> None:
    (line,) = change(
        copy,
        "vllm_ascend.attention.utils",
        'def notify_kv_cache_written(layer_name: str = "")',
        "def notify_kv_cache_written(layer_name: str)",
    )
    assert "patch cache-written" in line


def test_a_changed_body_is_reported(copy: Path) -> None:
    (line,) = change(
        copy,
        "vllm_ascend.attention.utils",
        'on_kv_cache_written = getattr(connector, "on_kv_cache_written", None)',
        'on_kv_cache_written = getattr(connector, "kv_cache_written", None)',
    )
    assert "patch cache-written" in line
    assert "another body" in line


def test_a_function_that_is_gone_is_reported_with_why_it_is_needed(copy: Path) -> None:
    (line,) = change(copy, "vllm_ascend.platform", "def get_attn_backend_cls(", "def get_attention_backend(")
    assert "patch ascend-attention-backend" in line
    assert "is gone" in line
    assert "fixed table" in line


def test_an_entry_nobody_wrote_down_is_reported(sources: Sources) -> None:
    table = recorded()
    del table[ENTRIES[0].name]
    (line,) = changes([sources.vllm_ascend, sources.vllm], ENTRIES, table)
    assert ENTRIES[0].name in line
