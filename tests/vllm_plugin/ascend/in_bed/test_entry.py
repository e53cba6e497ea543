# SPDX-License-Identifier: Apache-2.0
"""The plugin entry on vllm-ascend: what it changes with offload, and that it changes nothing without."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm_ascend.platform import NPUPlatform
from vllm_ascend.worker import worker as stock_worker

from tidal_connector.errors import ConfigError
from tidal_connector.vllm_plugin import plugins
from tidal_connector.vllm_plugin.ascend import host, patches, platform
from tidal_connector.vllm_plugin.patching import HostChanged

STOCK = {name: vars(NPUPlatform)[name] for name in ("check_and_update_config", "get_attn_backend_cls")}
ADDED = ("validate_request", "tidal_facts")


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin and end with the host as it was, of the versions that we know."""
    versions = {"vllm-ascend": host.SUPPORTED, "vllm": host.SUPPORTED_VLLM}
    monkeypatch.setattr(host, "installed", lambda name="vllm-ascend": versions.get(name))
    for name, value in STOCK.items():
        setattr(NPUPlatform, name, value)
    yield
    for name, value in STOCK.items():
        setattr(NPUPlatform, name, value)
    for name in ADDED:
        if name in vars(NPUPlatform):
            delattr(NPUPlatform, name)


def engine(role: str | None = "kv_consumer", worker: str = platform.STOCK_WORKER, **changed: Any) -> Any:
    """Return what the entry reads of an engine's configuration, after the stock rules."""
    extra = changed.pop("extra", {})
    transfer = SimpleNamespace(
        kv_connector="TidalConnector",
        kv_role=role,
        kv_connector_extra_config=extra,
        engine_id="e",
        kv_load_failure_policy="fail",
    )
    hf = SimpleNamespace(index_topk=changed.pop("index_topk", 2048))
    parallel = SimpleNamespace(worker_cls=worker, nnodes_within_dp=changed.pop("machines", 1), tensor_parallel_size=2)
    return SimpleNamespace(
        kv_transfer_config=None if role is None else transfer,
        model_config=SimpleNamespace(model="m", hf_config=hf, enable_sleep_mode=changed.pop("sleeps", False)),
        parallel_config=parallel,
        cache_config=SimpleNamespace(block_size=changed.pop("block_size", 128)),
        additional_config=changed.pop("additional", {}),
    )


def configure(config: Any) -> list[Any]:
    """Run the entry's version of the platform's rules; the stock ones are noted."""
    seen: list[Any] = []
    run: Any = platform.configuring(lambda cls, given: seen.append(given))
    run(NPUPlatform, config)
    return seen


def test_with_offload_the_stock_rules_run_and_the_worker_is_ours() -> None:
    config = engine()
    assert configure(config) == [config]
    assert config.parallel_config.worker_cls == platform.WORKER


@pytest.mark.parametrize(
    "config", [engine("kv_producer"), engine("kv_both"), engine(extra={"offload": "off"}), engine(None)]
)
def test_without_offload_the_stock_rules_run_and_nothing_else(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "check_versions", lambda: pytest.fail("the version does not matter without offload"))
    assert configure(config) == [config]
    assert config.parallel_config.worker_cls == platform.STOCK_WORKER


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (engine(worker="vllm_ascend.xlite.xlite_worker.XliteWorker"), "worker_cls = vllm_ascend.xlite"),
        (engine(block_size=64), "set --block-size 128"),
        (engine(index_topk=1024), "selects 2048 positions whatever"),
        (engine(sleeps=True), "--enable-sleep-mode"),
        (engine(machines=2), "share one host pool"),
        (engine(additional={"enable_sparse_sfa_c8": True}), "enable_sparse_sfa_c8 changes how latents are kept"),
    ],
)
def test_what_offload_cannot_work_with_is_refused(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configure(config)


def test_the_configuration_of_a_draft_model_is_left_to_the_stock_rules() -> None:
    config = engine(worker=platform.WORKER)
    del config.model_config.hf_config.index_topk
    assert configure(config) == [config]


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer"])
def test_an_engine_keeps_the_id_that_peers_know_it_by(role: str) -> None:
    """What the stock rules do to it, done by their own lines."""
    source = inspect.getsource(STOCK["check_and_update_config"].__func__)
    marker = 'if not getattr(vllm_config.kv_transfer_config, "_engine_id_patched", False):'
    assert marker in source, "vllm-ascend renames engines in another way; see platform.configuring"

    def renaming(cls: type, vllm_config: Any) -> None:
        del cls
        if not getattr(vllm_config.kv_transfer_config, "_engine_id_patched", False):
            vllm_config.kv_transfer_config.engine_id += "-" + 32 * "0"

    run: Any = platform.configuring(renaming)
    config = engine(role)
    run(NPUPlatform, config)
    assert config.kv_transfer_config.engine_id == "e"


@pytest.mark.parametrize(("name", "version"), [("vllm-ascend", "0.26.0"), ("vllm", "0.24.0"), ("vllm", None)])
def test_another_version_is_refused_by_name(name: str, version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    known = host.installed
    monkeypatch.setattr(host, "installed", lambda asked="vllm-ascend": version if asked == name else known(asked))
    with pytest.raises(HostChanged, match=f"{name} is {version}, expected 0.23.0"):
        configure(engine())


def test_the_host_is_what_every_seam_was_written_for() -> None:
    patches.check()


def test_a_changed_signature_is_refused_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_worker.NPUWorker, "determine_available_memory", lambda self, more: more)
    with pytest.raises(HostChanged, match="patch worker-memory: determine_available_memory of NPUWorker takes"):
        patches.apply_in_worker()


def test_unusable_transfer_parameters_are_refused_at_the_door_of_engines_with_our_connector_alone() -> None:
    def ask() -> None:
        params = SimpleNamespace(
            extra_args={"kv_transfer_params": {"mode": "push", "role": "prefill", "transfer_id": 3}}
        )
        current_platform.validate_request({}, params)

    plugins.register()
    ask()
    configure(engine(None))
    ask()
    configure(engine("kv_producer"))
    with pytest.raises(VLLMValidationError, match="transfer_id"):
        ask()


def test_the_entry_applies_its_patch_once_and_the_methods_stay_class_methods() -> None:
    assert type(current_platform).__module__ == "vllm_ascend.platform"
    plugins.register()
    first = vars(NPUPlatform)["check_and_update_config"]
    assert isinstance(first, classmethod)
    assert first.__func__ is not STOCK["check_and_update_config"].__func__
    plugins.register()
    assert vars(NPUPlatform)["check_and_update_config"] is first
    assert vars(NPUPlatform)["get_attn_backend_cls"] is STOCK["get_attn_backend_cls"]
    assert list(inspect.signature(NPUPlatform.check_and_update_config).parameters) == ["vllm_config"]


def test_the_entry_leaves_a_host_alone_that_vllm_ascend_is_not_in_charge_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "in_charge", lambda: False)
    plugins.register()
    assert vars(NPUPlatform)["check_and_update_config"] is STOCK["check_and_update_config"]


def test_a_host_whose_own_rules_have_changed_is_left_alone_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(cls: type, vllm_config: Any, more: Any) -> None:
        del cls, vllm_config, more

    said: list[str] = []
    monkeypatch.setattr(NPUPlatform, "check_and_update_config", classmethod(other))
    monkeypatch.setattr(plugins._log, "error", lambda text, *args: said.append(text % args))
    plugins.register()
    assert vars(NPUPlatform)["check_and_update_config"].__func__ is other
    assert len(said) == 1
    assert "latents cannot be kept in host memory here: patch ascend-configuration" in said[0]


def test_in_a_worker_our_backend_takes_the_place_of_the_sparse_one_alone() -> None:
    def chosen(sparse: bool) -> str:
        asked = SimpleNamespace(use_mla=True, use_sparse=sparse, use_batch_invariant=False)
        return NPUPlatform.get_attn_backend_cls(None, asked)

    before = chosen(False), chosen(True)
    patches.apply_in_worker()
    patches.apply_in_worker()
    assert (chosen(False), chosen(True)) == (before[0], platform.BACKEND)
    assert before[1] == platform.STOCK_BACKEND
