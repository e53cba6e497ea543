# SPDX-License-Identifier: Apache-2.0
"""``tidal proxy``: joins file and options, and runs the application."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvicorn

from tidal_connector.config import log_level
from tidal_connector.errors import ConfigError
from tidal_connector.log import configure, get_logger
from tidal_connector.proxy.app import build_app
from tidal_connector.proxy.settings import (
    ProxyConfig,
    check_config,
    parse_decode,
    parse_prefill,
    read_config,
)

_GRACEFUL_S = 10


def proxy_config(file: Path | None, prefill: Sequence[str], decode: Sequence[str], listen: str | None) -> ProxyConfig:
    """Join the file's settings with the options; options add engines and replace ``listen``.

    Raises:
        ConfigError: the result cannot be served.
    """
    config = read_config(file) if file else ProxyConfig()
    return check_config(
        msgspec.structs.replace(
            config,
            prefill=(*config.prefill, *map(parse_prefill, prefill)),
            decode=(*config.decode, *map(parse_decode, decode)),
            listen=listen or config.listen,
        )
    )


def run_proxy(file: Path | None, prefill: Sequence[str], decode: Sequence[str], listen: str | None) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError: the settings cannot be used, or the address cannot be listened on.
    """
    config = proxy_config(file, prefill, decode, listen)
    level = log_level() or "INFO"
    listener = listen_on(config)
    configure(level)
    engines = ", ".join([*(item.engine for item in config.prefill), *(item.engine for item in config.decode)])
    get_logger(__name__).info("proxy on %s for %s", config.listen, engines)
    settings = uvicorn.Config(build_app(config), log_level="warning", ws="none", timeout_graceful_shutdown=_GRACEFUL_S)
    with listener, contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(settings).run(sockets=[listener])


def listen_on(config: ProxyConfig) -> socket.socket:
    """Open the listening socket.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    host, port = config.address()
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"listen = {config.listen!r}: {error.strerror}; choose a free port on an address of this machine"
        ) from None
