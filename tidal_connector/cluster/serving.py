# SPDX-License-Identifier: Apache-2.0
"""From a few settings to the command line of a vLLM engine with the connector.

Owns the shape of ``configs/prefill.toml`` and ``configs/decode.toml``. Pure but for reading the file; used by
``tidal serve``, the demo and the end-to-end tests, so that all of them start engines the same way.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from tidal_connector.address import parse_host
from tidal_connector.config import Positive, child_environment, load_config
from tidal_connector.errors import ConfigError
from tidal_connector.ids import Role
from tidal_connector.registry.settings import RegistryConfig
from tidal_connector.tables import convert_strict, read_toml

_KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}
_CPU_DEFAULTS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class HttpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the engine's HTTP server is.

    Attributes:
        bind: ``host:port`` that vLLM listens on, in place of its ``--host`` and ``--port``; port 0 takes a free one.
            Empty: what these say, or 127.0.0.1 and a free port.
        advertise: host (or ``host:port``) that proxies connect to; None takes that of ``bind``.
    """

    bind: str = ""
    advertise: str | None = None


class SuperviseConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How ``tidal serve`` watches the engine that it announces (seconds).

    Attributes:
        probe_every_s: between two looks at ``/health``.
        probe_s: wait for one answer, of ``/health`` and of the control channel.
        down_after_s: an engine that has not answered for so long is announced as ``down`` until it answers again.
        start_s: an engine that does not serve within this time is ended.
        settle_s: between the announcement that the engine drains and the first look whether it is idle; proxies hear
            of it meanwhile.
        drain_s: how long running requests may go on after SIGTERM (an order to drain brings its own deadline).
    """

    probe_every_s: Positive = 1.0
    probe_s: Positive = 3.0
    down_after_s: Positive = 6.0
    start_s: Positive = 1800.0
    settle_s: Positive = 1.0
    drain_s: Positive = 60.0


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine.

    Attributes:
        engine: its engine id; the operator's name, the same after a restart.
        load_failure_policy: what vLLM does with a request whose KV did not arrive.
        tidal: the connector's own settings, the shape of ``kv_connector_extra_config``
            (``config.TidalConfig``).
        registry: where the engine is announced; None: nowhere, and nothing stays beside it.
        http: where its HTTP server listens, and what proxies are told.
        supervise: deadlines of the supervisor; only with ``registry``.
        node: name of this machine, as others call it; empty: its host name.
        revision: of the rollout that starts it; empty where there is none.
        admission: it is announced as ``starting`` until its rollout lets it in (``cluster.orders``).
        command: what runs in place of vLLM's server and takes its arguments, such as a stand-in; empty: vLLM.
    """

    engine: str
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    tidal: dict[str, Any] = {}
    registry: RegistryConfig | None = None
    http: HttpConfig = HttpConfig()
    supervise: SuperviseConfig = SuperviseConfig()
    node: str = ""
    revision: str = ""
    admission: bool = False
    command: tuple[str, ...] = ()


def read_serve_config(path: Path) -> ServeConfig:
    """Read and check the TOML file of one engine.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or holds an unknown key or a wrong value.
    """
    given = read_toml(path, "engine configuration")
    config = convert_strict(ServeConfig, given, f"engine configuration {path}")
    if not config.engine:
        raise ConfigError(f"engine configuration {path}: engine is empty; give the engine a name")
    load_config(config.tidal, f"engine configuration {path}: [tidal]")
    for field, address in (("http.bind", config.http.bind), ("http.advertise", config.http.advertise)):
        if address:
            parse_host(f"engine configuration {path}: {field}", address)
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


def engine_command(vllm_args: Sequence[str], transfer: str | None = None, instead: Sequence[str] = ()) -> list[str]:
    """Return the command line of a vLLM server.

    Args:
        vllm_args: vLLM's own arguments.
        transfer: from :func:`kv_transfer_config`; None starts an engine without the connector.
        instead: what runs in place of vLLM, with the same arguments.
    """
    server = list(instead) or [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command = [*server, *vllm_args]
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
