# SPDX-License-Identifier: Apache-2.0
"""Every function of the hosts that we replace, override or lean on is the one that we were written for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm_plugin.ascend.bed.sources import VLLM, VLLM_ASCEND, Sources
from tests.vllm_plugin.ascend.bed.upstream import ENTRIES, changes, read, recorded
from tests.vllm_plugin.host_signatures import read_signatures
from tidal_connector.vllm_plugin.ascend import host
from tidal_connector.vllm_plugin.patching import Seam

pytestmark = pytest.mark.contract

Change = Callable[[str, str, str], list[str]]

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
def change(sources: Sources, tmp_path: Path) -> Change:
    """Return a function that changes a copy of one module and says what is reported then."""

    def changed(module: str, old: str, new: str) -> list[str]:
        inside = Path(*module.split(".")).with_suffix(".py")
        text = (sources.vllm_ascend / inside).read_text()
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        (tmp_path / inside).parent.mkdir(parents=True)
        (tmp_path / inside).write_text(text.replace(old, new))
        roots = [sources.vllm_ascend, sources.vllm]
        before = changes(roots, ENTRIES, recorded())
        return [line for line in changes([tmp_path, *roots], ENTRIES, recorded()) if line not in before]

    return changed


def test_a_changed_signature_is_reported_with_the_name_of_the_patch(change: Change) -> None:
    (line,) = change(
        "vllm_ascend.platform",
        "def check_and_update_config(cls, vllm_config: VllmConfig)",
        "def check_and_update_config(cls, vllm_config: VllmConfig, strict: bool = False)",
    )
    assert "patch ascend-configuration: check_and_update_config of NPUPlatform is now" in line
    assert "strict: bool=False" in line


def test_a_changed_default_is_reported(change: Change) -> None:
    (line,) = change(
        "vllm_ascend.attention.utils",
        'def notify_kv_cache_written(layer_name: str = "")',
        "def notify_kv_cache_written(layer_name: str)",
    )
    assert "patch cache-written" in line


def test_a_changed_body_is_reported(change: Change) -> None:
    (line,) = change(
        "vllm_ascend.attention.utils",
        'on_kv_cache_written = getattr(connector, "on_kv_cache_written", None)',
        'on_kv_cache_written = getattr(connector, "kv_cache_written", None)',
    )
    assert "patch cache-written" in line
    assert "another body" in line


def test_a_function_that_is_gone_is_reported_with_why_it_is_needed(change: Change) -> None:
    (line,) = change("vllm_ascend.attention.utils", "def notify_kv_cache_written(", "def kv_cache_written(")
    assert "patch cache-written: notify_kv_cache_written of vllm_ascend.attention.utils is gone" in line
    assert "the earliest moment" in line


def test_an_override_that_is_gone_is_reported_although_a_base_has_the_method(change: Change) -> None:
    (line,) = change("vllm_ascend.platform", "def get_attn_backend_cls(", "def get_attention_backend(")
    assert "patch ascend-attention-backend: get_attn_backend_cls of NPUPlatform is now" in line


def test_a_method_is_found_where_its_class_has_it_from(sources: Sources) -> None:
    inherited = Seam("", "", "", "", "vllm_ascend.platform", "NPUPlatform", "validate_request", ())
    found = read([sources.vllm_ascend, sources.vllm], inherited)
    assert found.signature.startswith("@classmethod (cls, processed_inputs: 'EngineInput'")


def test_an_entry_nobody_wrote_down_is_reported(sources: Sources) -> None:
    (line,) = changes([sources.vllm_ascend, sources.vllm], ENTRIES[:1], {})
    assert f"patch {ENTRIES[0].name}" in line
    assert "is not in upstream.json" in line
