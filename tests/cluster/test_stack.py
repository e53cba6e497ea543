# SPDX-License-Identifier: Apache-2.0
"""A stack's processes get the command lines that its settings ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tidal_connector.cluster.launch import ServerProcess
from tidal_connector.cluster.stack import Stack, StackSettings, read_metrics
from tidal_connector.config import load_config


def transfer_of(server: ServerProcess) -> dict[str, Any]:
    command = server.command
    found: dict[str, Any] = json.loads(command[command.index("--kv-transfer-config") + 1])
    return found


def test_settings_reach_the_command_lines(tmp_path: Path) -> None:
    settings = StackSettings(
        model=tmp_path,
        logs=tmp_path,
        block_size=128,
        prefix_caching=True,
        pool_bytes=64 << 20,
        decode_tidal={"pool": {"pages": "2m"}, "control": {"lease_s": 3.0}},
        prefill_args=("--seed", "5"),
    )
    stack = Stack(settings)
    prefill, decode = transfer_of(stack.prefill), transfer_of(stack.decode)
    assert (prefill["kv_role"], decode["kv_role"]) == ("kv_producer", "kv_consumer")
    found = load_config(decode["kv_connector_extra_config"])
    assert (found.pool.bytes, found.pool.pages, found.control.lease_s) == (64 << 20, "2m", 3.0)
    assert load_config(prefill["kv_connector_extra_config"]).control.bind == stack.prefill_control
    assert stack.reference is not None
    assert "--kv-transfer-config" not in stack.reference.command
    assert stack.prefill.command[-4:-2] == ["--seed", "5"]
    for server in (stack.reference, stack.prefill, stack.decode):
        assert server.command[server.command.index("--block-size") + 1] == "128"
        assert "--enable-prefix-caching" in server.command
    assert f"prefill-0={stack.prefill.url},{stack.prefill_control}" in stack.proxy.command
    assert f"decode-0={stack.decode.url},{stack.decode_control}" in stack.proxy.command
    assert load_config(decode["kv_connector_extra_config"]).control.bind == stack.decode_control


def test_a_stack_without_a_reference_has_none(tmp_path: Path) -> None:
    assert Stack(StackSettings(model=tmp_path, logs=tmp_path, reference=False)).reference is None


def test_decode_may_serve_another_checkpoint(tmp_path: Path) -> None:
    stack = Stack(StackSettings(model=tmp_path, decode_model=tmp_path / "other", logs=tmp_path))
    models = [server.command[server.command.index("--model") + 1] for server in (stack.prefill, stack.decode)]
    assert models == [str(tmp_path), str(tmp_path / "other")]


def test_metrics_are_summed_over_their_labels(tmp_path: Path, monkeypatch: Any) -> None:
    text = '# HELP x\ntidal:bytes_pushed_total{engine="0"} 2.0\ntidal:bytes_pushed_total{engine="1"} 3.5\nvllm:y 1\n'

    class Answer:
        pass

    answer = Answer()
    answer.text = text  # type: ignore[attr-defined]
    monkeypatch.setattr("httpx.get", lambda *_, **__: answer)
    server = Stack(StackSettings(model=tmp_path, logs=tmp_path)).prefill
    assert read_metrics(server) == {"tidal:bytes_pushed_total": 5.5}
