# SPDX-License-Identifier: Apache-2.0
"""An agent's place in the cluster, ``agents/NODE``: only whoever holds it may touch the node's engines.

Two agents of one node would start every engine twice. So an agent waits for the place before it starts or adopts
anything; where another agent keeps it for longer than a dead one's entry would last, it gives up. Used by the agent's
thread, told of the registry by the store's.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from tidal_connector import __version__
from tidal_connector.cluster.agent_settings import AgentConfig
from tidal_connector.cluster.rollout_records import AGENTS, AgentEntry, encode
from tidal_connector.errors import ConfigError
from tidal_connector.log import get_logger
from tidal_connector.registry.base import Hold, Snapshot, Store, Watch

_log = get_logger(__name__)

_LEASES = 2.0
"""Leases for which a dead agent's entry may last: a registry that has restarted counts them anew."""
_GRACE_S = 2.0


class AgentPlace:
    """The entry of one agent, as a context manager.

    Args:
        config: of the agent.
        store: of the cluster; stays open longer than this.
        clock: monotonic seconds.
    """

    def __init__(self, config: AgentConfig, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._store = store
        self._clock = clock
        self._key = AGENTS + config.node
        self._life = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._other: AgentEntry | None = None
        self._fresh = False
        self._since: float | None = None
        self._was_ours = False
        self._hold: Hold | None = None
        self._watch: Watch | None = None

    def __enter__(self) -> Self:
        entry = AgentEntry(
            host=self._config.host,
            pid=os.getpid(),
            version=__version__,
            machine=socket.gethostname(),
            life=self._life,
            ttl_s=self._config.registry.ttl_s,
        )
        self._watch = self._store.watch(self._key, self._hear)
        self._hold = self._store.hold(self._key, encode(entry), self._config.registry.ttl_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._hold is not None:
            self._hold.release()

    def ours(self) -> bool:
        """Whether this node's engines may be touched now.

        A place that was once taken stays so while the registry is away; not where another agent has it since.

        Raises:
            ConfigError: another agent has the place, and lives.
        """
        with self._lock:
            other, fresh = self._other, self._fresh
        if other is None:
            self._since = None
            held = self._hold is not None and self._hold.held
            self._was_ours = self._was_ours or held
            # Where the registry answers, and the entry is not there, somebody else may just be taking it.
            return held or (self._was_ours and not fresh)
        self._was_ours = False
        now = self._clock()
        bound = _LEASES * max(other.ttl_s, self._config.registry.ttl_s) + _GRACE_S
        if self._since is None:
            self._since = now
            _log.warning(
                "%s is held by %s; this agent starts and adopts nothing. It takes over if that one has ended, else it "
                "gives up in %g s",
                *(self._key, _words(other), bound),
            )
        elif now - self._since > bound:
            raise ConfigError(
                f"node = {self._config.node!r}: {_words(other)} is this node's agent already; give this one a node = "
                "of its own, or end that one first"
            )
        return False

    def _hear(self, snapshot: Snapshot) -> None:
        entry = snapshot.entries.get(self._key)
        try:
            found = msgspec.json.decode(entry.value, type=AgentEntry) if entry is not None else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            found = AgentEntry()  # held, by whomever
        with self._lock:
            self._other = found if found is not None and found.life != self._life else None
            self._fresh = snapshot.fresh


def _words(other: AgentEntry) -> str:
    return f"process {other.pid} on {other.machine or 'another machine'} (host {other.host or 'not known'})"
