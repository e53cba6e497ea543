# SPDX-License-Identifier: Apache-2.0
"""``tidal proxy``: joins file and options, and runs the application."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvicorn

from tidal_connector.address import join_address
from tidal_connector.config import log_level
from tidal_connector.errors import ConfigError
from tidal_connector.log import configure, get_logger
from tidal_connector.proxy.app import build_app
from tidal_connector.proxy.settings import (
    PolicyKind,
    ProxyConfig,
    check_config,
    parse_decode,
    parse_prefill,
    read_config,
)
from tidal_connector.registry.settings import RegistryConfig, open_store

_GRACEFUL_S = 10
_BACKLOG = 2048  # connections that the kernel accepts before the proxy does: bursts come at once


def proxy_config(
    file: Path | None,
    prefill: Sequence[str],
    decode: Sequence[str],
    listen: str | None,
    registry: str | None = None,
    policy: str | None = None,
) -> ProxyConfig:
    """Join the file's settings with the options; options add engines and replace the others.

    Raises:
        ConfigError: the result cannot be served.
    """
    config = read_config(file) if file else ProxyConfig()
    found = config.registry
    if registry is not None:
        found = msgspec.structs.replace(found, url=registry) if found else RegistryConfig(url=registry)
    return check_config(
        msgspec.structs.replace(
            config,
            prefill=(*config.prefill, *map(parse_prefill, prefill)),
            decode=(*config.decode, *map(parse_decode, decode)),
            listen=listen or config.listen,
            registry=found,
            policy=PolicyKind(policy) if policy else config.policy,
        )
    )


def run_proxy(config: ProxyConfig) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        config: from :func:`proxy_config`.

    Raises:
        ConfigError: the registry cannot be opened, or the address cannot be listened on.
    """
    listener = listen_on(config)
    raise_file_limit()
    with listener:
        store = open_store(config.registry) if config.registry else None
        configure(log_level() or "INFO")
        place = place_of(listener)
        named = [*(item.engine for item in config.prefill), *(item.engine for item in config.decode)]
        sources = [*named, *([config.registry.url] if config.registry else [])]
        get_logger(__name__).info("proxy on http://%s for %s, policy %s", place, ", ".join(sources), config.policy)
        app = build_app(config, store=store, listen=place)
        settings = uvicorn.Config(
            app, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=_GRACEFUL_S
        )
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(settings).run(sockets=[listener])


def raise_file_limit() -> int:
    """Let this process hold as many connections as the system allows it, and return how many files that are.

    Each client takes three: its own and one to each of its engines; a limit of 1024 would end at 340 clients.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def listen_on(config: ProxyConfig) -> socket.socket:
    """Open the listening socket; ``[::]`` takes IPv4, too, where the machine allows it.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    host, port = config.address()
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        return socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(
            f"listen = {config.listen!r}: {error.strerror}; choose a free port on an address of this machine"
        ) from None


def place_of(listener: socket.socket) -> str:
    """Return ``host:port`` of what was really bound, in brackets where it is IPv6."""
    host, port = listener.getsockname()[:2]
    return join_address(host, port)
