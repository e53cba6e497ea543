# SPDX-License-Identifier: Apache-2.0
"""``tidal serve`` with a registry: starts one engine, watches it, announces it, drains it, and ends with it.

The engine knows nothing of the registry, so no hiccup of it can touch a request. Main thread only; the prober and the
registry have threads of their own, whose findings are values that each turn of the loop reads.

An engine that dies is not started again: the process ends with status 1, and whoever started it (a node's agent,
systemd, Kubernetes) decides. Only where another process took one of its ports while it started, it starts once more,
elsewhere.
"""

from __future__ import annotations

import contextlib
import enum
import signal
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import msgspec

from tidal_connector.cluster.announcer import Announcer, judge, member_of
from tidal_connector.cluster.engine_plan import EnginePlan, Ports, plan_engine
from tidal_connector.cluster.launch import ServerProcess
from tidal_connector.cluster.listeners import inodes_of, listening_inodes
from tidal_connector.cluster.orders import AWAITS_ADMISSION, Order, Want, order_key, order_of
from tidal_connector.cluster.prober import Prober, Seen
from tidal_connector.cluster.serving import ServeConfig, engine_environment
from tidal_connector.errors import Conflict, RegistryLost
from tidal_connector.ids import EngineId, Role
from tidal_connector.log import get_logger
from tidal_connector.registry.base import Delete, Snapshot, Store
from tidal_connector.registry.members import State
from tidal_connector.registry.settings import open_store

_log = get_logger(__name__)

_TURN_S = 0.1
_STARTS = 3  # with other ports, where the chosen ones were taken by somebody meanwhile
_QUIET_S = 0.5  # for which an engine must be seen idle before it is taken for idle
_LOOK_S = 1.0  # between two looks at who listens on the ports of an engine that starts
_DRAIN_PATIENCE = 3  # times down_after_s that an engine may be silent while it drains
_SAY_S = 5.0  # between two lines about what a draining engine still does


class End(enum.Enum):
    """How one life of an engine ended."""

    STOPPED = enum.auto()
    """As it was told to."""
    DIED = enum.auto()
    """By itself, or it never served."""
    COLLIDED = enum.auto()
    """Another process has one of its ports."""


class Orders:
    """The newest order to one engine, as the registry tells it (from the store's thread)."""

    def __init__(self, store: Store, engine: EngineId) -> None:
        self._store = store
        self._key = order_key(engine)
        self._engine = engine
        self._found: tuple[Order, int] | None = None

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Listen as long as the context is open."""
        with self._store.watch(self._key, self._changed):
            yield

    @property
    def order(self) -> Order | None:
        """What is ordered now."""
        found = self._found
        return found[0] if found else None

    def done(self) -> None:
        """Take an obeyed order away, unless another one has replaced it; a registry that is gone keeps it."""
        found = self._found
        if found is not None:
            with contextlib.suppress(Conflict, RegistryLost):
                self._store.write([Delete(self._key)], {self._key: found[1]})

    def _changed(self, snapshot: Snapshot) -> None:
        order = order_of(snapshot.entries, self._engine)  # the watch's prefix also names engines called alike
        self._found = None if order is None else (order, snapshot.entries[self._key].version)


class Signals:
    """How often this process was asked to end; the handler only counts."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Count SIGTERM and SIGINT as long as the context is open."""
        before = {number: signal.signal(number, self._count) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.count += 1


class Drain(msgspec.Struct):
    """A drain under way.

    Attributes:
        began, settled, deadline: monotonic seconds: when it began, from when on idleness counts, when it ends at last.
        ordered: by the registry, not by a signal.
        idle_at: since when it was seen idle; None while it is busy.
        said_at: when its work was logged last.
    """

    began: float
    settled: float
    deadline: float
    ordered: bool
    idle_at: float | None = None
    said_at: float = 0.0

    def over(self, seen: Seen) -> bool:
        """Take the newest look at the engine's work; return whether it has been idle for a moment."""
        if seen.work_at >= self.settled:
            if seen.work:
                self.idle_at = None
            elif self.idle_at is None:
                self.idle_at = seen.work_at
            elif seen.work_at - self.idle_at >= _QUIET_S:
                return True
        return False


class Supervisor:
    """One engine under supervision.

    Args:
        config: the engine's settings; ``registry`` is set.
        role: what it does.
        vllm_args: vLLM's arguments.
    """

    def __init__(self, config: ServeConfig, role: Role, vllm_args: Sequence[str]) -> None:
        self._config = config
        self._role = role
        self._vllm_args = vllm_args
        self._signals = Signals()
        self._drain: Drain | None = None
        self._admitted = not config.admission

    def run(self) -> int:
        """Serve until told to stop or until the engine ends; return the exit status.

        Raises:
            ConfigError: a setting cannot be used; nothing was started.
        """
        registry = self._config.registry
        assert registry is not None  # the caller looks
        end = End.COLLIDED
        with open_store(registry) as store, self._signals.caught():
            orders = Orders(store, EngineId(self._config.engine))
            with orders.heard(), Announcer(store, registry.ttl_s) as announcer:
                for _ in range(_STARTS):
                    with Ports() as ports:
                        plan = plan_engine(self._config, self._role, self._vllm_args, ports)
                        end = self._live(plan, announcer, orders)
                    if end is not End.COLLIDED:
                        break
            if self._drain is not None and self._drain.ordered and not self._config.revision:
                orders.done()  # else an agent would start it again: there the order holds until it is withdrawn
        return 0 if end is End.STOPPED else 1

    def _live(self, plan: EnginePlan, announcer: Announcer, orders: Orders) -> End:
        server = ServerProcess(plan.engine, plan.command, engine_environment(), plan.http_here, None)
        announcer.tell(member_of(plan, Seen(), State.STARTING, ""))
        with server:
            with Prober(plan, self._config.supervise, server.pids) as prober:
                end, note = self._watch(plan, server, prober, announcer, orders)
            if end is not End.STOPPED:
                _log.error("engine %s: %s", plan.engine, note)
                announcer.last_word(member_of(plan, prober.seen, State.DOWN, note))
        return end

    def _watch(
        self, plan: EnginePlan, server: ServerProcess, prober: Prober, announcer: Announcer, orders: Orders
    ) -> tuple[End, str]:
        """Look after a running engine until it must end; say how, and why where that was not wanted."""
        settings = self._config.supervise
        started = time.monotonic()
        look_at, served = started + _LOOK_S, False
        while True:
            now, seen, order = time.monotonic(), prober.seen, orders.order
            if self._signals.count > 1:
                _log.warning("engine %s: told twice to end; stopping at once", plan.engine)
                return End.STOPPED, ""
            if not server.running():
                return self._died(plan, server, served)
            state, note = judge(seen, settings, now)
            served = served or state is State.READY
            if state is State.STARTING and now - started > settings.start_s:
                return End.DIED, f"did not serve within supervise.start_s = {settings.start_s:g} s"
            if not served and now >= look_at:  # a server may fail to listen, and live on
                look_at = now + _LOOK_S
                if self._foreign(plan, server):
                    return End.COLLIDED, "another process took one of its ports while it started"
            self._obey(plan, order, prober, now)
            if self._drain is not None:
                announcer.tell(member_of(plan, seen, State.DRAINING, ""))
                # It never served, or answers nobody any more; one that is only slow may still be at its last requests.
                silent = now - seen.healthy_at > settings.down_after_s * (_DRAIN_PATIENCE if served else 1)
                if silent or self._drained(plan, seen, now):
                    return End.STOPPED, ""
            elif state is State.READY and not self._admitted:
                announcer.tell(member_of(plan, seen, State.STARTING, AWAITS_ADMISSION))
            else:
                announcer.tell(member_of(plan, seen, state, note))
            time.sleep(_TURN_S)

    def _obey(self, plan: EnginePlan, order: Order | None, prober: Prober, now: float) -> None:
        settings = self._config.supervise
        if order is not None and order.want is Want.SERVE and order.revision == plan.revision:
            self._admitted = True
        ordered = order is not None and order.want is Want.DRAIN
        if self._drain is not None or not (ordered or self._signals.count):
            return
        deadline_s = order.deadline_s if order is not None and ordered else settings.drain_s
        why = f"ordered{f' by {order.by}' if order.by else ''}" if order is not None and ordered else "told to end"
        _log.info("engine %s: %s; draining for at most %g s", plan.engine, why, deadline_s)
        self._drain = Drain(now, now + settings.settle_s, now + deadline_s, ordered)
        prober.watch_work()

    def _drained(self, plan: EnginePlan, seen: Seen, now: float) -> bool:
        drain = self._drain
        assert drain is not None
        if drain.over(seen):
            _log.info("engine %s: idle after %.1f s; stopping", plan.engine, now - drain.began)
            return True
        work = ", ".join(f"{count} {kind}" for kind, count in (seen.work or {}).items())
        if now >= drain.deadline:
            _log.warning("engine %s: the deadline has passed; stopping%s", plan.engine, work and f" with {work}")
            return True
        if work and now - drain.said_at >= _SAY_S:
            drain.said_at = now
            _log.info("engine %s: still %s; %.0f s left", plan.engine, work, drain.deadline - now)
        return False

    def _died(self, plan: EnginePlan, server: ServerProcess, served: bool) -> tuple[End, str]:
        if self._drain is not None or self._signals.count:
            return End.STOPPED, ""
        if not served and self._foreign(plan, server):
            return End.COLLIDED, "another process took one of its ports while it started"
        return End.DIED, f"its process ended with status {server.status}"

    def _foreign(self, plan: EnginePlan, server: ServerProcess) -> bool:
        """Whether somebody else listens on one of the engine's ports."""
        sockets = listening_inodes(*plan.http_bind) | listening_inodes(*plan.control_bind)
        return not sockets <= inodes_of(server.pids())
