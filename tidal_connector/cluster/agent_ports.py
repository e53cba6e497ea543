# SPDX-License-Identifier: Apache-2.0
"""Free ports for engines, each given away once in a round, so that a late caller of one never reaches another."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable

from tidal_connector.errors import ConfigError


class Ports:
    """Ports of one address.

    Args:
        host: address that they are bound on.
        available: from which they are taken.
    """

    def __init__(self, host: str, available: range) -> None:
        self._host = host
        self._available = available
        self._next = random.randrange(len(available))  # two agents on one machine seldom meet
        self._taken: dict[str, set[int]] = {}

    def hold(self, owner: str, ports: Iterable[int]) -> None:
        """Note ports that an engine has already."""
        self._taken.setdefault(owner, set()).update(port for port in ports if port)

    def take(self, owner: str) -> int:
        """Return a port that nobody listens on.

        Raises:
            ConfigError: there is none.
        """
        taken = {port for ports in self._taken.values() for port in ports}
        for _ in range(len(self._available)):
            port = self._available[self._next]
            self._next = (self._next + 1) % len(self._available)
            if port not in taken and self._free(port):
                self.hold(owner, [port])
                return port
        raise ConfigError(f"no port from {self._available[0]} to {self._available[-1]} is free on {self._host}")

    def free(self, owner: str) -> None:
        """Give an engine's ports back."""
        self._taken.pop(owner, None)

    def _free(self, port: int) -> bool:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._host, port))
            except OSError:
                return False
        return True
