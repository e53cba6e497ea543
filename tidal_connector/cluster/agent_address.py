# SPDX-License-Identifier: Apache-2.0
"""Checks the addresses of an agent on its own machine, at its start: not when the first engine fails to be reached."""

from __future__ import annotations

import socket

from tidal_connector.cluster.agent_settings import AgentConfig
from tidal_connector.errors import ConfigError
from tidal_connector.registry.addresses import check_host, suggestion


def check_addresses(config: AgentConfig) -> None:
    """Check that others can be told of ``host``, and that engines can listen on ``bind``.

    Args:
        config: settings with what they leave open filled in.

    Raises:
        ConfigError: they cannot.
    """
    check_host("host", config.host)
    try:
        found = socket.getaddrinfo(config.bind, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if config.bind == config.host:
            raise ConfigError(
                f"host = {config.host!r}: is no address of this machine ({why}); expected one, such as {suggestion()}, "
                'or also bind = "0.0.0.0" where others reach this machine by another address'
            ) from None
        raise ConfigError(
            f"bind = {config.bind!r}: engines cannot listen on it ({why}); expected an address of this machine, such "
            f"as {suggestion()}, or 0.0.0.0 for all"
        ) from None
