# SPDX-License-Identifier: Apache-2.0
"""Which engines there are now: those of the file, and those that the registry tells of. Pure but for the clock.

Takes whole views of the registry (:meth:`Roster.take`, whatever thread they come from is the caller's matter) and tells
its listeners what changed. While the registry cannot be reached, the last view stands. Event loop's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from tidal_connector.ids import Role
from tidal_connector.log import get_logger
from tidal_connector.proxy.settings import Decode, Prefill, ProxyConfig
from tidal_connector.proxy.wire import target_of
from tidal_connector.registry.members import Member, Members, State

_log = get_logger(__name__)

Side: TypeAlias = Literal["prefill", "decode"]
SIDES: tuple[Side, Side] = ("prefill", "decode")


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine in one role; one of role ``both`` is there twice.

    Attributes:
        engine: its id.
        side: ``prefill`` or ``decode``.
        url: base URL of its HTTP server.
        control: address of its control channel; may be empty.
        state: only ``ready`` engines get requests.
        registered: whether the registry tells of it; otherwise the file does.
        layout: fingerprint of its KV; empty where it is not known.
        incarnation, revision, node, model, note: as it announced them; may be empty.
    """

    engine: str
    side: Side
    url: str
    control: str = ""
    state: State = State.READY
    registered: bool = False
    layout: str = ""
    incarnation: str = ""
    revision: str = ""
    node: str = ""
    model: str = ""
    note: str = ""

    @property
    def key(self) -> tuple[Side, str]:
        """What tells engines apart."""
        return self.side, self.engine


class Change(msgspec.Struct, frozen=True):
    """What one view changed.

    Attributes:
        before, after: the same engine in the same role; None where it was not, or is not any more.
    """

    before: Engine | None
    after: Engine | None


Listener = Callable[[list[Change]], None]


class Roster:
    """All engines, by role and id.

    Args:
        config: the engines of the file.
        clock: monotonic seconds.

    Attributes:
        fresh: whether the registry answers; True where there is none.
        odd: why an entry of the registry was left out, by its key.
    """

    def __init__(self, config: ProxyConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._named = {engine.key: engine for engine in _from_file(config)}
        self._hold(self._named)
        self._listeners: list[Listener] = []
        self._heard_at: float | None = None
        self._told = False
        self._told_twice: set[tuple[Side, str]] = set()
        self.fresh = config.registry is None
        self.odd: Mapping[str, str] = {}

    def _hold(self, engines: Mapping[tuple[Side, str], Engine]) -> None:
        self._engines = engines
        self._ready = {side: [item for item in self.side(side) if item.state is State.READY] for side in SIDES}

    @property
    def engines(self) -> list[Engine]:
        """All engines: of the file in its order, then by id."""
        return list(self._engines.values())

    def side(self, side: Side) -> list[Engine]:
        """Return the engines of one role."""
        return [engine for engine in self._engines.values() if engine.side == side]

    def ready(self, side: Side) -> Sequence[Engine]:
        """Return the ready engines of one role; every request asks, so each view is sorted once."""
        return self._ready[side]

    def find(self, side: Side, engine: str) -> Engine | None:
        """Return an engine, if it is there."""
        return self._engines.get((side, engine))

    @property
    def age_s(self) -> float | None:
        """Seconds since the registry was last known to answer; None before it ever did."""
        if self._heard_at is None:
            return None
        return 0.0 if self.fresh else self._clock() - self._heard_at

    def listen(self, listener: Listener) -> None:
        """Call with the changes of every later view."""
        self._listeners.append(listener)

    def take(self, members: Members) -> None:
        """Take a view of the registry.

        A view that is not fresh is what was last heard, and changes nothing: with the first one there may be nothing.
        """
        if members.fresh != self.fresh or not self._told:
            self._say(members)
        if members.fresh or self.fresh:
            self._heard_at = self._clock()
        self.fresh, self._told = members.fresh, True
        if not members.fresh and not members.engines:
            return  # nothing is known; that is no news of anybody
        usable, unusable = _usable(members)
        for engine, why in unusable.items():
            if self.odd.get(engine) != why:
                _log.warning("registry entry of %s is left out: %s", engine, why)
        self.odd = {**members.odd, **unusable}  # whoever reads the registry has told of its own already
        registered = {engine.key: engine for engine in _from_registry(usable)}
        self._warn_of_twins(registered)
        after = {**self._named, **registered}
        changes = [
            Change(self._engines.get(key), after.get(key))
            for key in dict.fromkeys((*self._engines, *after))
            if self._engines.get(key) != after.get(key)
        ]
        self._hold(after)
        for change in changes:
            _tell(change)
        if changes:
            for listener in self._listeners:
                listener(changes)

    def _say(self, members: Members) -> None:
        if members.fresh:
            _log.info("the registry answers; it tells of %d engines", len(members.engines))
        else:
            _log.warning("the registry cannot be reached; going on with the %d engines known", len(self._engines))

    def _warn_of_twins(self, registered: Mapping[tuple[Side, str], Engine]) -> None:
        twins = registered.keys() & self._named.keys() - self._told_twice
        for side, engine in sorted(twins):
            _log.warning(
                "%s engine %s is in the file and in the registry, whose entry counts; take it out of the file",
                side,
                engine,
            )
        self._told_twice |= twins


def _from_file(config: ProxyConfig) -> Iterable[Engine]:
    item: Prefill | Decode
    for item in config.prefill:
        yield Engine(engine=item.engine, side="prefill", url=item.url, control=item.control)
    for item in config.decode:
        yield Engine(engine=item.engine, side="decode", url=item.url, control=item.control)


def _usable(members: Members) -> tuple[list[Member], Mapping[str, str]]:
    """Part the engines that can be asked from those that cannot, with the reason."""
    odd: dict[str, str] = {}
    usable = []
    for member in members.engines.values():
        try:
            target_of(member.http)
        except ValueError as error:
            odd[member.engine] = f"http = {error}"
        else:
            usable.append(member)
    return usable, odd


def _from_registry(members: Iterable[Member]) -> Iterable[Engine]:
    ordered = sorted(members, key=lambda member: member.engine)
    for side in SIDES:
        for member in ordered:
            if member.role in (Role.BOTH, Role(side)):
                yield Engine(
                    engine=member.engine,
                    side=side,
                    url=member.http,
                    control=member.control,
                    state=member.state,
                    registered=True,
                    layout=member.layout,
                    incarnation=member.incarnation,
                    revision=member.revision,
                    node=member.node,
                    model=member.model,
                    note=member.note,
                )


def _tell(change: Change) -> None:
    before, after = change.before, change.after
    if after is None:
        assert before is not None
        _log.info("%s engine %s left", before.side, before.engine)
    elif before is None:
        _log.info("%s engine %s joined at %s: %s", after.side, after.engine, after.url, after.state)
    elif before.incarnation != after.incarnation or before.state != after.state or before.url != after.url:
        note = f" ({after.note})" if after.note else ""
        _log.info("%s engine %s at %s: %s%s", after.side, after.engine, after.url, after.state, note)
