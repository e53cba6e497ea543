# SPDX-License-Identifier: Apache-2.0
"""The contract with vLLM: red when the host is no longer what the patches were written for."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm


def patches() -> Any:
    from tidal_connector.vllm_plugin.cpu import patches as module

    return module


def test_an_untouched_host_has_every_attribute_with_the_signature_that_was_replaced() -> None:
    # A process of its own, with vLLM's own platform: in this one the patches may have been applied already.
    code = (
        "from tidal_connector.vllm_plugin.cpu.patches import PATCHES\n"
        "for patch in PATCHES:\n"
        "    current = getattr(patch.target(), patch.attribute)\n"
        "    assert current is not patch.replacement, patch.name\n"
        "    patch.check(current)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import os; os.environ['VLLM_PLUGINS'] = ''\n" + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_replacements_take_what_the_host_passes() -> None:
    for patch in patches().PATCHES:
        taken = inspect.signature(patch.replacement).parameters
        assert len(taken) == len(patch.parameters), patch.name
        assert list(taken)[1:] == list(patch.parameters)[1:], patch.name


def test_every_patch_says_why_and_how_to_verify_it() -> None:
    for patch in patches().PATCHES:
        for text in (patch.why, patch.what, patch.verify):
            assert len(text) > 40, patch.name


def test_applying_twice_is_the_same_as_once() -> None:
    patches().apply()
    first = [getattr(patch.target(), patch.attribute) for patch in patches().PATCHES]
    patches().apply()
    assert first == [patch.replacement for patch in patches().PATCHES]


def test_a_changed_host_is_refused_before_anything_runs() -> None:
    from tidal_connector.vllm_plugin.patching import HostChanged, Patch

    def other(self: object, something: int) -> None:
        del self, something

    host = SimpleNamespace(forward=other)
    patch = Patch("name", "why", "what", "verify", "sys", "", "version", ("self",), lambda: None)
    with pytest.raises(HostChanged, match=r"patch name: forward.*takes \('self', 'something'\), expected \('self',\)"):
        Patch("name", "", "", "", "sys", "", "forward", ("self",), lambda: None).check(host.forward)
    with pytest.raises(HostChanged, match="no_such_module"):
        Patch("name", "", "", "", "no_such_module", "", "x", (), lambda: None).apply()
    with pytest.raises(HostChanged, match="has no no_such_name"):
        Patch("name", "", "", "", "sys", "", "no_such_name", (), lambda: None).apply()
    assert patch.target() is sys


def test_a_replacement_for_a_block_ends_with_the_block() -> None:
    from tidal_connector.vllm_plugin.patching import HostChanged, replaced

    host = SimpleNamespace(value=1)
    with replaced(host, "value", 2):
        assert host.value == 2
    assert host.value == 1
    with pytest.raises(HostChanged), replaced(host, "gone", 2):
        pass


def rotary() -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        return get_rope(
            64, max_position=512, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, is_neox_style=False
        )


def test_strided_rope_tensors_are_rotated_like_contiguous_ones_and_nothing_else_is_written() -> None:
    patches().apply()
    rope = rotary()
    positions = torch.arange(40)
    fused = torch.randn(40, 4, 128)
    before = fused.clone()
    keys = torch.randn(40, 512 + 64)
    query, key = rope.forward_cpu(positions, fused[..., 64:], keys[:, 512:].unsqueeze(1))
    expected_query, expected_key = rope.forward_native(
        positions, before[..., 64:].contiguous(), keys[:, 512:].unsqueeze(1).contiguous()
    )
    torch.testing.assert_close(query, expected_query)
    torch.testing.assert_close(key, expected_key)
    assert torch.equal(fused, before)
