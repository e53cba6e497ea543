# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.vllm_plugin.cpu.configs import transfer, vllm_config

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("kind", ["v3", "v32"])
@pytest.mark.parametrize("block_size", [16, 128])
def test_the_users_choices_survive_the_stock_rules_for_mla(tmp_path: Path, kind: str, block_size: int) -> None:
    config = vllm_config(
        tmp_path,
        kind,
        block_size=block_size,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        max_num_batched_tokens=64,
        max_num_seqs=8,
    )
    assert config.cache_config.block_size == block_size
    assert config.cache_config.enable_prefix_caching is True
    assert config.scheduler_config.enable_chunked_prefill is True
    assert config.scheduler_config.max_num_batched_tokens == 64


def test_what_the_user_switches_off_stays_off(tmp_path: Path) -> None:
    config = vllm_config(tmp_path, "v32", enable_chunked_prefill=False, enable_prefix_caching=False)
    assert config.cache_config.enable_prefix_caching is False
    assert config.scheduler_config.enable_chunked_prefill is False


def test_defaults_are_blocks_of_128_and_our_worker(tmp_path: Path) -> None:
    config = vllm_config(tmp_path, "v32")
    assert config.cache_config.block_size == 128
    assert config.parallel_config.worker_cls == "tidal_connector.vllm_plugin.cpu.worker.TidalCpuWorker"


def test_a_second_pass_over_the_configuration_changes_nothing(tmp_path: Path) -> None:
    from tidal_connector.vllm_plugin.cpu.platform import TidalCpuPlatform

    config = vllm_config(tmp_path, "v32", block_size=16, enable_prefix_caching=True)
    TidalCpuPlatform.check_and_update_config(config)
    assert config.cache_config.block_size == 16
    assert config.cache_config.enable_prefix_caching is True


def test_a_block_size_that_the_backend_does_not_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--block-size 48: .* takes 16, 32, 64, 128; choose one of them"):
        vllm_config(tmp_path, "v32", block_size=48)


def test_a_dense_model_on_a_decode_node_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'no index_topk: set "offload": "off"'):
        vllm_config(tmp_path, "v3", kv_transfer_config=transfer("kv_consumer"))


@pytest.mark.parametrize(
    ("sparse", "mla", "selected", "expected"),
    [
        (True, True, None, "TidalSparseMLABackend"),
        (False, True, None, "TidalDenseMLABackend"),
        (False, True, "CPU_MLA", "MLABackend"),
        (False, False, None, "CPUAttentionBackend"),
    ],
)
def test_each_kind_of_attention_gets_its_backend(sparse: bool, mla: bool, selected: str | None, expected: str) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from tidal_connector.vllm_plugin.cpu.platform import TidalCpuPlatform

    chosen = None if selected is None else AttentionBackendEnum[selected]
    layer = SimpleNamespace(use_sparse=sparse, use_mla=mla)
    path = TidalCpuPlatform.get_attn_backend_cls(chosen, layer)  # type: ignore[arg-type]
    assert path.rpartition(".")[2].endswith(expected)


def test_the_front_door_refuses_bad_transfer_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.exceptions import VLLMValidationError

    from tidal_connector.vllm_plugin.cpu.platform import TidalCpuPlatform

    monkeypatch.setattr(TidalCpuPlatform, "_facts", None)
    bad = SimpleNamespace(extra_args={"kv_transfer_params": {"mode": "push", "rolle": "decode"}})
    TidalCpuPlatform.validate_request({}, bad)  # an engine without our connector has no say
    vllm_config(tmp_path, "v32", kv_transfer_config=transfer("kv_consumer"))
    with pytest.raises(VLLMValidationError, match=r"unknown key 'rolle'; did you mean 'role'\?"):
        TidalCpuPlatform.validate_request({}, bad)
    TidalCpuPlatform.validate_request({}, SimpleNamespace(extra_args=None))


def test_workers_get_the_patches_before_their_model_is_built() -> None:
    from tidal_connector.vllm_plugin.cpu.patches import PATCHES
    from tidal_connector.vllm_plugin.cpu.platform import TidalCpuPlatform

    TidalCpuPlatform.register_triton_kernel_overrides()
    for patch in PATCHES:
        assert getattr(patch.target(), patch.attribute) is patch.replacement, patch.name
