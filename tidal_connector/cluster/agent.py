# SPDX-License-Identifier: Apache-2.0
"""One node's agent: keeps the engines that are assigned to the node as their assignments want them, and says so.

It watches ``rollout/`` and ``orders/``; engines are processes of their own that live on when it ends, however it ends,
and that it adopts when it comes back. What it cannot hear it does not act on: while the registry is away, engines that
crash are started again, and nothing else changes. An engine whose assignment is gone is drained only where the registry
has a rollout's state; a registry that has lost its data gets the rollout back from the agents instead. It touches no
engine before it has its node's place in the registry (``agent_place``): another agent of that name may run them.

``Agent`` is a context manager; ``run`` blocks its caller, the only thread that touches engines.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import msgspec

from tidal_connector.cluster.agent_engine import EngineKeeper
from tidal_connector.cluster.agent_folder import AgentFolder
from tidal_connector.cluster.agent_place import AgentPlace
from tidal_connector.cluster.agent_ports import Ports
from tidal_connector.cluster.agent_settings import AgentConfig
from tidal_connector.cluster.orders import ORDERS, Order, Want, encode_order, order_key
from tidal_connector.cluster.rollout_records import (
    CONDUCTOR,
    REPORTS,
    ROLLOUT,
    STATE,
    Report,
    View,
    view_of,
)
from tidal_connector.errors import Conflict, RegistryLost, TidalError
from tidal_connector.log import get_logger
from tidal_connector.registry.base import ABSENT, Entry, Put, Snapshot, Store

_log = get_logger(__name__)

_TICK_S = 0.25
_ORPHAN_S = 10.0
_REFRESH_S = 30.0
_WRITES_AT_ONCE = 90


class Agent:
    """The agent of one node.

    Args:
        config: checked settings.
        store: of the cluster; stays open longer than this.
        folder: locked state folder.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: AgentConfig,
        store: Store,
        folder: AgentFolder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._store = store
        self._folder = folder
        self._clock = clock
        self._ports = Ports(config.bind, config.port_range())
        self._engines: dict[str, EngineKeeper] = {}
        self._heard: dict[str, Snapshot] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._orphan_since: dict[str, float] = {}
        self._told: tuple[dict[str, Report], float] | None = None
        self._kept: dict[str, bytes] = {}
        self._adopted = False
        self._place = AgentPlace(config, store, clock)
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._exit.enter_context(self._place)
        for prefix in (ROLLOUT, ORDERS):
            self._exit.enter_context(self._store.watch(prefix, self._listener(prefix)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def await_place(self, until: threading.Event) -> None:
        """Wait until this is the node's agent, or the event is set.

        Raises:
            ConfigError: another agent is this node's already.
        """
        while not until.is_set() and not self._place.ours():
            until.wait(_TICK_S)

    def run(self, until: threading.Event) -> None:
        """Work until the event is set; the engines live on.

        Raises:
            ConfigError: another agent is this node's already.
        """
        while not until.is_set():
            self.tick()
            self._wake.wait(_TICK_S)
            self._wake.clear()

    def tick(self) -> None:
        """Do what is due now.

        Raises:
            ConfigError: another agent is this node's already.
        """
        if not self._place.ours():
            return
        if not self._adopted:
            self._adopt()
        with self._lock:
            heard = dict(self._heard)
        rollout, orders = heard.get(ROLLOUT), heard.get(ORDERS)
        if rollout is None or orders is None:
            return  # nothing was ever heard, so nothing is known of what engines shall do
        try:
            view = view_of(Snapshot({**rollout.entries, **orders.entries}, rollout.fresh and orders.fresh))
        except TidalError as error:
            _log.error("%s", error)
            return
        if rollout.fresh and view.rollout is None and STATE in self._kept:
            if any(engine.running for engine in self._engines.values()):  # else there is nothing to protect
                self._put_back(rollout.entries)
            return
        self._note(view, rollout)
        reports = self._step(view, fresh=rollout.fresh)
        self._tell(reports)

    # --- inside ---

    def _adopt(self) -> None:
        """Take up the engines that live on from an earlier agent of this folder."""
        self._adopted = True
        for name, record in self._folder.records().items():
            self._ports.hold(name, record.ports)
            self._engines[name] = EngineKeeper(self._config, self._folder, self._ports, name, record, self._clock)
        self._kept = self._folder.cluster()

    def _listener(self, prefix: str) -> Callable[[Snapshot], None]:
        def hear(snapshot: Snapshot) -> None:
            with self._lock:
                self._heard[prefix] = snapshot
            self._wake.set()

        return hear

    def _step(self, view: View, fresh: bool) -> dict[str, Report]:
        mine = {name: item for name, item in view.assignments.items() if item.node == self._config.node}
        reports = {}
        for name, assignment in mine.items():
            keeper = self._engines.get(name)
            if keeper is None:
                keeper = EngineKeeper(self._config, self._folder, self._ports, name, None, self._clock)
                self._engines[name] = keeper
            order = view.orders.get(name)
            drained = order is not None and order.want is Want.DRAIN
            reports[name] = keeper.step(assignment, view.specs.get(assignment.revision), drained)
        for name in [name for name in self._engines if name not in mine]:
            self._leave(name, known=fresh and view.rollout is not None)
        return reports

    def _leave(self, name: str, known: bool) -> None:
        """Drain an engine without an assignment once that is sure; another node's agent may run it now."""
        now = self._clock()
        if self._engines[name].idle:
            del self._engines[name]
            self._orphan_since.pop(name, None)
            return
        since = self._orphan_since.setdefault(name, now) if known else None
        if since is None:
            self._orphan_since.pop(name, None)
        elif now - since > _ORPHAN_S:
            self._engines[name].abandon()

    def _tell(self, reports: dict[str, Report]) -> None:
        now = self._clock()
        if self._told is not None and self._told[0] == reports and now - self._told[1] < _REFRESH_S:
            return
        try:
            self._store.write([Put(REPORTS + self._config.node, msgspec.json.encode(reports))])
        except RegistryLost as error:
            _log.warning("%s", error)
            return  # the next tick tries again
        self._told = (reports, now)

    def _note(self, view: View, heard: Snapshot) -> None:
        """Keep what was heard, so that it can be put back."""
        if not heard.fresh or view.rollout is None:
            return
        kept = {
            key: entry.value
            for key, entry in heard.entries.items()
            if not entry.leased and not key.startswith(REPORTS) and key != CONDUCTOR
        }
        if kept != self._kept:
            self._folder.keep_cluster(kept)
            self._kept = kept

    def _put_back(self, there: Mapping[str, Entry]) -> None:
        """Give the rollout back to a registry that has lost it; the first agent's copy counts."""
        lost = {key: value for key, value in self._kept.items() if key not in there}
        rest = [Put(key, value) for key, value in lost.items() if key != STATE]
        _log.error("the registry has lost the rollout; its %d entries are put back as last heard", len(lost))
        entries = {key: Entry(value, 1, leased=False) for key, value in self._kept.items()}
        assigned = view_of(Snapshot(entries)).assignments
        rest += [
            Put(order_key(item.engine), encode_order(Order(Want.SERVE, revision=item.revision, by="agent")))
            for item in assigned.values()
            if item.admitted
        ]
        try:
            for first in range(0, len(rest), _WRITES_AT_ONCE):
                self._store.write(rest[first : first + _WRITES_AT_ONCE], {STATE: ABSENT})
            self._store.write([Put(STATE, self._kept[STATE])], {STATE: ABSENT})  # last: it makes the others count
        except Conflict:
            _log.info("another agent has put the rollout back")
        except RegistryLost as error:
            _log.warning("%s", error)
        self._told = None
