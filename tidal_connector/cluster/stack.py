# SPDX-License-Identifier: Apache-2.0
"""A whole deployment on one machine: a plain reference engine, a prefill engine, a decode engine and the proxy.

Used by the demo and by the end-to-end tests. Called from one thread.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from tidal_connector.cluster.launch import ServerProcess, free_ports, wait_ready
from tidal_connector.cluster.series import parse_series
from tidal_connector.cluster.serving import (
    ServeConfig,
    engine_command,
    engine_environment,
    kv_transfer_config,
)
from tidal_connector.config import child_environment
from tidal_connector.errors import TidalError
from tidal_connector.ids import Role

MODEL_NAME = "tidal"
PREFILL_ENGINE = "prefill-0"
DECODE_ENGINE = "decode-0"

_START_S = 240.0
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Variables of engines that look for nothing on the network."""


class StackSettings(msgspec.Struct, frozen=True):
    """What the engines of a stack have in common, and in what they differ.

    Attributes:
        model: folder of the checkpoint.
        decode_model: folder of the decode engine's, where that differs: a pair that must be refused.
        logs: folder for one log file per process.
        dtype: the checkpoint's dtype.
        block_size: tokens per KV block of every engine.
        max_num_batched_tokens: tokens of one step; a longer prompt is prefilled in chunks.
        max_model_len: longest context.
        max_num_seqs: requests of one step.
        prefix_caching: whether the engines keep the KV of earlier prompts.
        kv_bytes: bytes of KV cache on the device, per engine.
        pool_bytes: bytes of the decode engine's host pool.
        prefill_tidal, decode_tidal: further connector settings, merged table by table.
        vllm_args: further arguments of every engine.
        prefill_args, decode_args: further arguments of one engine.
        load_failure_policy: of the decode engine.
        environment: further variables of every engine.
        reference: whether there is a reference engine.
        both_roles: both engines take ``kv_both`` and so may do each other's work; only decode's latents are in a pool.
    """

    model: Path
    logs: Path
    dtype: str = "float32"
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    max_num_seqs: int = 8
    prefix_caching: bool = False
    kv_bytes: int = 256 << 20
    pool_bytes: int = 256 << 20
    prefill_tidal: Mapping[str, Any] = {}
    decode_tidal: Mapping[str, Any] = {}
    vllm_args: tuple[str, ...] = ()
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    load_failure_policy: str = "recompute"
    decode_model: Path | None = None
    environment: Mapping[str, str] = {}
    reference: bool = True
    both_roles: bool = False


class Stack:
    """The processes of one deployment, as a context manager that starts them and waits until all serve.

    Attributes:
        settings: what it was made of.
        prefill, decode, proxy: always there.
        reference: the engine without a connector, or None.
        prefill_control, decode_control: control addresses of the two engines.
    """

    def __init__(self, settings: StackSettings, progress: Callable[[list[str], float], None] | None = None) -> None:
        self.settings = settings
        self._progress = progress
        self._exit = contextlib.ExitStack()
        prefill, decode, proxy, *controls = free_ports(5)
        self.prefill_control, self.decode_control = (f"127.0.0.1:{port}" for port in controls)
        self.reference = plain_engine(settings) if settings.reference else None
        to_prefill = self._transfer(Role.PREFILL, self.prefill_control)
        self.prefill = _engine(settings, "prefill", prefill, to_prefill, settings.prefill_args)
        to_decode = self._transfer(Role.DECODE, self.decode_control)
        self.decode = _engine(settings, "decode", decode, to_decode, settings.decode_args, settings.decode_model)
        self.proxy = self._proxy(proxy)

    def __enter__(self) -> Self:
        servers = [self.prefill, self.decode, self.proxy]
        if self.reference is not None:
            servers.append(self.reference)
        with contextlib.ExitStack() as started:
            for server in servers:
                started.enter_context(server)
            started.callback(_begin_stop, servers)
            wait_ready(servers, _START_S, self._progress)
            self._exit = started.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def _transfer(self, role: Role, control: str) -> str:
        tidal: dict[str, Any] = {"control": {"bind": control}}
        if role is Role.DECODE:
            tidal |= {"pool": {"bytes": self.settings.pool_bytes}, "offload": "on"}
        extra = self.settings.prefill_tidal if role is Role.PREFILL else self.settings.decode_tidal
        config = ServeConfig(
            engine=PREFILL_ENGINE if role is Role.PREFILL else DECODE_ENGINE,
            load_failure_policy="fail" if self.settings.load_failure_policy == "fail" else "recompute",
            tidal=_merged(tidal, extra),
        )
        return kv_transfer_config(config, Role.BOTH if self.settings.both_roles else role)

    def _proxy(self, port: int) -> ServerProcess:
        command = [
            *(sys.executable, "-m", "tidal_connector.cli", "proxy", "--listen", f"127.0.0.1:{port}"),
            *("--prefill", f"{PREFILL_ENGINE}={self.prefill.url},{self.prefill_control}"),
            *("--decode", f"{DECODE_ENGINE}={self.decode.url},{self.decode_control}"),
        ]
        # Its own health also says whether the engines fit; a stack of engines that do not must come up, too.
        return _server(self.settings.logs, "proxy", command, child_environment(), port, "/metrics")


def plain_engine(settings: StackSettings) -> ServerProcess:
    """Return an engine without a connector, not started yet: the reference of one deployment or of several."""
    return _engine(settings, "reference", free_ports(1)[0], None)


def _engine(
    settings: StackSettings,
    name: str,
    port: int,
    transfer: str | None,
    args: tuple[str, ...] = (),
    model: Path | None = None,
) -> ServerProcess:
    command = engine_command(
        [
            *("--model", str(model or settings.model), "--served-model-name", MODEL_NAME),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", settings.dtype, "--enforce-eager"),
            *("--block-size", str(settings.block_size), "--max-model-len", str(settings.max_model_len)),
            *("--max-num-seqs", str(settings.max_num_seqs)),
            *("--max-num-batched-tokens", str(settings.max_num_batched_tokens)),
            *("--kv-cache-memory-bytes", str(settings.kv_bytes)),
            "--enable-prefix-caching" if settings.prefix_caching else "--no-enable-prefix-caching",
            *settings.vllm_args,
            *args,
        ],
        transfer,
    )
    environment = {**engine_environment(), **QUIET, **settings.environment}
    return _server(settings.logs, name, command, environment, port)


def _server(
    logs: Path, name: str, command: list[str], environment: dict[str, str], port: int, probe: str = "/health"
) -> ServerProcess:
    return ServerProcess(name, command, environment, f"http://127.0.0.1:{port}", logs / f"{name}.log", probe)


def read_metrics(server: ServerProcess, prefix: str = "tidal:") -> dict[str, float]:
    """Return a server's Prometheus series whose name starts with a prefix, summed over their labels.

    Raises:
        TidalError: the server does not answer.
    """
    try:
        text = httpx.get(server.url + "/metrics", timeout=10.0, trust_env=False).text
    except httpx.TransportError as error:
        raise TidalError(f"{server.name}: /metrics cannot be read: {error}") from None
    return parse_series(text, (prefix,))


def _begin_stop(servers: Sequence[ServerProcess]) -> None:
    """Ask all to end at once, so that they end side by side."""
    for server in servers:
        server.begin_stop()


def _merged(base: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in extra.items():
        inner = result.get(key)
        both = isinstance(inner, dict) and isinstance(value, Mapping)
        result[key] = _merged(inner, value) if both and isinstance(inner, dict) else value
    return result
