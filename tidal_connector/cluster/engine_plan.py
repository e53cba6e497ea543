# SPDX-License-Identifier: Apache-2.0
"""Where one engine will listen, what others are told, and the command line that makes it so.

Takes an engine's settings and vLLM's arguments; hands on an :class:`EnginePlan` in which every port is a number that
nobody listens on, taken until the plan's :class:`Ports` are closed.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from tidal_connector.address import join_address, parse_address
from tidal_connector.cluster.listeners import PortTaken, local_host, take_port
from tidal_connector.cluster.serving import ServeConfig, engine_command, kv_transfer_config
from tidal_connector.cluster.vllm_args import find_option, has_flag, served_name, without_option
from tidal_connector.config import load_config
from tidal_connector.errors import ConfigError
from tidal_connector.ids import EngineId, Role
from tidal_connector.log import get_logger
from tidal_connector.registry import addresses
from tidal_connector.registry.settings import RegistryConfig, on_one_machine

_log = get_logger(__name__)

_LOOPBACK = "127.0.0.1"


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, every address settled.

    Attributes:
        engine, role, model, node, revision: as announced.
        command: starts it.
        http_bind: host and port of its HTTP server.
        http: base URL that proxies are told.
        http_here: base URL by which this machine reaches it.
        control_bind: host and port of its control channel.
        control: ``host:port`` of it that peers are told.
        control_here: by which this machine reaches it.
    """

    engine: EngineId
    role: Role
    model: str
    node: str
    revision: str
    command: tuple[str, ...]
    http_bind: tuple[str, int]
    http: str
    http_here: str
    control_bind: tuple[str, int]
    control: str
    control_here: str


class Ports:
    """The ports that a plan has taken; a context manager that gives them back."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def take(self, what: str, host: str, port: int, *, fixed: bool) -> int:
        """Take the wanted port, or another one where it is taken and nobody was promised it.

        Args:
            what: what the address is called in messages.
            host: address to bind.
            port: wanted; 0 for any.
            fixed: others are told this port by somebody else, so that no other one will do.

        Raises:
            ConfigError: the address cannot be bound, or a fixed port is taken.
        """
        try:
            lock = take_port(what, host, port)
        except PortTaken as error:
            if fixed:
                raise
            lock = take_port(what, host, 0)
            _log.warning("%s; %d is taken instead, and announced", str(error).partition(";")[0], lock.port)
        return self._stack.enter_context(lock).port

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def http_wanted(config: ServeConfig, vllm_args: Sequence[str]) -> tuple[str, int]:
    """Return the host and the port (0: any) that the HTTP server shall be bound to.

    Raises:
        ConfigError: both the file and vLLM's arguments say it, or one of them cannot be read.
    """
    if has_flag(vllm_args, "--uds"):
        raise ConfigError("--uds: an engine that is announced needs a port; take it out of vLLM's arguments")
    host, port = find_option(vllm_args, "--host"), find_option(vllm_args, "--port")
    if config.http.bind:
        if host is not None or port is not None:
            raise ConfigError(
                f"http.bind = {config.http.bind!r} and vLLM's --host or --port both say where the HTTP server is: "
                "give one of them"
            )
        return parse_address("http.bind", config.http.bind)
    if port is not None and not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"--port {port}: expected a number up to 65535")
    return host or _LOOPBACK, int(port or 0)


def plan_engine(config: ServeConfig, role: Role, vllm_args: Sequence[str], ports: Ports) -> EnginePlan:
    """Settle every address of an engine that is announced.

    Args:
        config: its settings.
        role: what it does.
        vllm_args: vLLM's arguments.
        ports: takes the ports.

    Raises:
        ConfigError: an address cannot be bound, read, or used by others.
    """
    registry = config.registry
    if registry is None:
        raise ConfigError("[registry] is missing; without it there is nothing to announce an engine in")
    tidal = load_config(config.tidal, "[tidal]")
    http, control = http_wanted(config, vllm_args), parse_address("control.bind", tidal.control.bind)
    http_port, http_shown = _settle("http", http, config.http.advertise, registry, ports)
    control_port, control_shown = _settle("control", control, tidal.control.advertise, registry, ports)
    if tidal.transfer.host is not None:
        addresses.check_host("transfer.host", tidal.transfer.host)
    scheme = "https" if has_flag(vllm_args, "--ssl-certfile") or has_flag(vllm_args, "--ssl-keyfile") else "http"
    rest = without_option(without_option(vllm_args, "--host"), "--port")
    bound_config = msgspec.structs.replace(
        config, tidal=_with_control_bind(config.tidal, join_address(control[0], control_port))
    )
    return EnginePlan(
        engine=EngineId(config.engine),
        role=role,
        model=served_name(vllm_args),
        node=config.node or socket.gethostname(),
        revision=config.revision,
        command=tuple(
            engine_command(
                [*rest, "--host", http[0], "--port", str(http_port)],
                kv_transfer_config(bound_config, role),
                config.command,
            )
        ),
        http_bind=(http[0], http_port),
        http=f"{scheme}://{http_shown}",
        http_here=f"{scheme}://{join_address(local_host(http[0]), http_port)}",
        control_bind=(control[0], control_port),
        control=control_shown,
        control_here=join_address(local_host(control[0]), control_port),
    )


def _settle(
    part: str, wanted: tuple[str, int], advertise: str | None, registry: RegistryConfig, ports: Ports
) -> tuple[int, str]:
    """Take a port and return it, and the ``host:port`` that others are told."""
    field, host = f"{part}.advertise", wanted[0]
    if advertise is None and addresses.is_loopback(host) and on_one_machine(registry):
        advertise = host  # whoever can ask the registry is on this machine, too
    shown_port = addresses.split(field, advertise)[1] if advertise else None
    port = ports.take(f"{part}.bind", *wanted, fixed=shown_port is not None)
    return port, addresses.advertised(field, advertise or "", (host, port))


def _with_control_bind(tidal: dict[str, Any], bind: str) -> dict[str, Any]:
    return {**tidal, "control": {**tidal.get("control", {}), "bind": bind}}
