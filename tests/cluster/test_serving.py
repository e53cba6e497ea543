# SPDX-License-Identifier: Apache-2.0
"""An engine's command line says what its file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidal_connector.cluster.serving import (
    engine_command,
    kv_transfer_config,
    read_serve_config,
)
from tidal_connector.config import load_config
from tidal_connector.errors import ConfigError
from tidal_connector.ids import Role

ROOT = Path(__file__).resolve().parents[2]


def read(folder: Path, text: str) -> None:
    file = folder / "engine.toml"
    file.write_text(text)
    read_serve_config(file)


@pytest.mark.parametrize(
    ("role", "kv_role"),
    [(Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer"), (Role.BOTH, "kv_both")],
)
def test_the_files_of_the_project_become_a_transfer_configuration(role: Role, kv_role: str) -> None:
    name = "prefill" if role is Role.PREFILL else "decode"
    config = read_serve_config(ROOT / "configs" / f"{name}.toml")
    found = json.loads(kv_transfer_config(config, role))
    extra = found.pop("kv_connector_extra_config")
    assert found == {
        "kv_connector": "TidalConnector",
        "kv_connector_module_path": "tidal_connector.vllm_plugin.connector",
        "kv_role": kv_role,
        "engine_id": f"{name}-0",
        "kv_load_failure_policy": "recompute",
    }
    assert load_config(extra).control.bind.startswith("127.0.0.1:7")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('engin = "a"', "did you mean 'engine'?"),
        ('engine = ""', "engine is empty"),
        (
            'engine = "a"\nload_failure_policy = "retry"',
            "= 'retry': expected 'recompute' or 'fail'",
        ),
        ('engine = "a"\n[tidal]\nofload = "on"', "did you mean 'offload'?"),
        ('engine = "a"\n[tidal.pool]\nbytes = "much"', "engine.toml: [tidal]: pool.bytes = 'much'"),
        ("engine", "engine.toml"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as found:
        read(tmp_path, text)
    assert words in str(found.value)


def test_an_engine_without_the_connector_has_no_transfer_configuration() -> None:
    command = engine_command(["--model", "m"])
    assert command[1:] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "m"]
