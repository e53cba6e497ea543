# SPDX-License-Identifier: Apache-2.0
"""An operator's side of draining an engine: the order, and waiting until it is obeyed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tidal_connector.cluster.orders import Order, Want, encode_order, kept_down, order_key, order_of
from tidal_connector.cluster.rollout_records import ENGINES
from tidal_connector.errors import ConfigError
from tidal_connector.ids import EngineId
from tidal_connector.registry.base import Delete, Put, Store
from tidal_connector.registry.members import Member, Members, peers, watch_members


def order_drain(store: Store, engine: EngineId, deadline_s: float, by: str) -> Member:
    """Order an engine to drain and stop; return what it is announced as now.

    Args:
        store: the registry.
        engine: which.
        deadline_s: seconds that its running requests have.
        by: who orders it, for its log.

    Raises:
        ConfigError: no such engine is announced; where an order keeps it down, that is said.
        RegistryLost: the registry does not answer.
    """
    member = _member(store, engine)
    store.write([Put(order_key(engine), encode_order(Order(Want.DRAIN, deadline_s, by=by)))])
    return member


def withdraw_drain(store: Store, engine: EngineId) -> bool:
    """Take the order to an engine away; return whether there was one.

    An engine that is draining already does not come back by it; one that an agent keeps down is started again.

    Raises:
        ConfigError: there is neither an order to such an engine nor the engine itself.
        RegistryLost: the registry does not answer.
    """
    key = order_key(engine)
    if key not in store.read(key).entries:
        if ENGINES + engine not in store.read(ENGINES + engine).entries:
            _member(store, engine)
        return False
    store.write([Delete(key)])
    return True


def await_end(
    store: Store, member: Member, timeout_s: float, progress: Callable[[Member], None] = lambda member: None
) -> bool:
    """Wait until an engine's present life has ended; return whether it has.

    Args:
        store: the registry.
        member: what it was announced as when it was told.
        timeout_s: longest wait.
        progress: called with every change of its entry (on the store's thread).
    """
    over = threading.Event()

    def changed(members: Members) -> None:
        found = members.engines.get(member.engine)
        if not members.fresh:
            return
        if found is None or (member.incarnation and found.incarnation != member.incarnation):
            over.set()
        else:
            progress(found)

    with watch_members(store, changed):
        return over.wait(timeout_s)


def _member(store: Store, engine: EngineId) -> Member:
    engines = peers(store).engines
    if engine not in engines:
        order = order_of(store.read(order_key(engine)).entries, engine)
        if order is not None and order.want is Want.DRAIN:
            raise ConfigError(f"engine {engine!r} is not in the registry; {kept_down(engine, order)}")
        known = ", ".join(sorted(engines)) or "none"
        raise ConfigError(f"engine {engine!r} is not in the registry; there are: {known}")
    return engines[engine]
