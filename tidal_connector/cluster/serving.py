# SPDX-License-Identifier: Apache-2.0
"""From a few settings to the command line of a vLLM engine with the connector.

Owns the shape of ``configs/prefill.toml`` and ``configs/decode.toml``. Pure but for reading the file; used by
``tidal serve``, the demo and the end-to-end tests, so that all of them start engines the same way.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from tidal_connector.config import child_environment, convert_strict, load_config
from tidal_connector.errors import ConfigError
from tidal_connector.ids import Role

_KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}
_CPU_DEFAULTS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine.

    Attributes:
        engine: its engine id; the operator's name, the same after a restart.
        load_failure_policy: what vLLM does with a request whose KV did not arrive.
        tidal: the connector's own settings, the shape of ``kv_connector_extra_config``
            (``config.TidalConfig``).
    """

    engine: str
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    tidal: dict[str, Any] = {}


def read_serve_config(path: Path) -> ServeConfig:
    """Read and check the TOML file of one engine.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or holds an unknown key or a wrong value.
    """
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"engine configuration {path}: {error}") from None
    config = convert_strict(ServeConfig, given, f"engine configuration {path}")
    if not config.engine:
        raise ConfigError(f"engine configuration {path}: engine is empty; give the engine a name")
    load_config(config.tidal, f"engine configuration {path}: [tidal]")
    return config


def kv_transfer_config(config: ServeConfig, role: Role) -> str:
    """Return the value of vLLM's ``--kv-transfer-config`` as JSON."""
    return json.dumps(
        {
            "kv_connector": "TidalConnector",
            "kv_connector_module_path": "tidal_connector.vllm_plugin.connector",
            "kv_role": _KV_ROLES[role],
            "engine_id": config.engine,
            "kv_load_failure_policy": config.load_failure_policy,
            "kv_connector_extra_config": config.tidal,
        }
    )


def engine_command(vllm_args: Sequence[str], transfer: str | None = None) -> list[str]:
    """Return the command line of a vLLM server.

    Args:
        vllm_args: vLLM's own arguments.
        transfer: from :func:`kv_transfer_config`; None starts an engine without the connector.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *vllm_args]
    return command if transfer is None else [*command, "--kv-transfer-config", transfer]


def engine_environment() -> dict[str, str]:
    """Return the environment of an engine: this process's, and on a CPU build of vLLM threads that share the
    cores.

    Variables that are set already are left alone.
    """
    return {**(_CPU_DEFAULTS if on_cpu_build() else {}), **child_environment()}


def on_cpu_build() -> bool:
    """Whether the vLLM that is installed is a CPU build; looks at package metadata only."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "+cpu" in version
    return False
