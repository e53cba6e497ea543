# SPDX-License-Identifier: Apache-2.0
"""The engines of a cluster: what each says of itself, and how others find it.

An engine's entry lies under ``members/ENGINE``, leased. Whoever reads the registry gets :class:`Members`, in which an
entry that cannot be read is named and left out.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Annotated, Self

import msgspec

from tidal_connector.errors import ConfigError
from tidal_connector.ids import EngineId, Incarnation, Role
from tidal_connector.log import get_logger
from tidal_connector.registry.base import Entry, Hold, Snapshot, Store, Watch
from tidal_connector.registry.keys import is_name

_log = get_logger(__name__)

MEMBERS = "members/"
"""The prefix of all engines' entries."""

MEMBER_LIMIT = 64 << 10
"""Bytes of one entry; a larger one is refused before it is read."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Text = Annotated[str, msgspec.Meta(max_length=8192)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class State(enum.StrEnum):
    """Where an engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine, as it announces itself.

    Attributes:
        engine: the operator's name; unique in the cluster.
        role: what it does.
        state: only ``ready`` engines get requests.
        incarnation: this life of its worker; empty before it is known.
        revision: of the rollout that started it; empty where there is none.
        node: the machine's name.
        model: name under which it serves.
        layout: fingerprint of its KV; engines with different ones do not fit. Empty before it is known.
        http: base URL of its HTTP server.
        control: ``host:port`` of its control channel.
        transfer: ``host:port`` of its data port; empty before it is known.
        requests: most requests at once; 0: not known.
        kv_tokens: tokens of KV that it holds; 0: not known.
        note: one line for people, such as why it is down.
    """

    engine: EngineId
    role: Role
    state: State
    http: Name
    control: Text = ""
    transfer: Text = ""
    incarnation: Incarnation = Incarnation("")
    revision: Text = ""
    node: Text = ""
    model: Text = ""
    layout: Text = ""
    requests: Count = 0
    kv_tokens: Count = 0
    note: Text = ""


class Members(msgspec.Struct, frozen=True):
    """The registry at one moment.

    Attributes:
        engines: by id.
        fresh: False where the registry cannot be reached and this is what was last heard.
        odd: why an entry was left out, by its key.
    """

    engines: Mapping[EngineId, Member]
    fresh: bool = True
    odd: Mapping[str, str] = {}


class Announcement:
    """An engine's entry, kept alive until it is withdrawn; leaving its context withdraws it."""

    def __init__(self, hold: Hold, member: Member) -> None:
        """Take over the hold under which the entry stands."""
        self._hold = hold
        self._engine = member.engine

    @property
    def held(self) -> bool:
        """Whether the entry stands as far as this side knows."""
        return self._hold.held

    def update(self, member: Member) -> None:
        """Announce a new state; does not block.

        Raises:
            ConfigError: the member cannot be announced, or is another engine.
        """
        if member.engine != self._engine:
            raise ConfigError(f"engine = {member.engine!r}: this announcement is of {self._engine!r}; make another one")
        self._hold.update(_encoded(member))

    def wait(self, timeout_s: float) -> bool:
        """Wait until the newest state stands in the registry; return whether it does."""
        return self._hold.wait(timeout_s)

    def withdraw(self) -> None:
        """Remove the entry; bounded by seconds even where the store is gone. Again does nothing."""
        self._hold.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.withdraw()


def announce(store: Store, member: Member, ttl_s: float) -> Announcement:
    """Announce an engine until it is withdrawn; returns at once, the entry stands as soon as the store answers.

    While another process announces an engine of the same name, this one waits for its turn.

    Raises:
        ConfigError: the member cannot be announced.
    """
    return Announcement(store.hold(MEMBERS + member.engine, _encoded(member), ttl_s), member)


def peers(store: Store) -> Members:
    """Return the engines, read now.

    Raises:
        RegistryLost: the store does not answer.
    """
    return members_of(store.read(MEMBERS))


def watch_members(store: Store, on_change: Callable[[Members], None]) -> Watch:
    """Call with all engines, as soon as they are known and after every change; an odd entry is logged once."""
    said: dict[str, str] = {}

    def tell(snapshot: Snapshot) -> None:
        found = members_of(snapshot)
        for key, why in found.odd.items():
            if said.get(key) != why:
                _log.warning("%s: left out, %s", key, why)
        said.clear()
        said.update(found.odd)
        on_change(found)

    return store.watch(MEMBERS, tell)


def members_of(snapshot: Snapshot) -> Members:
    """Read the entries under ``members/``, whatever else there is; what is odd is named and left out. Pure."""
    engines: dict[EngineId, Member] = {}
    odd: dict[str, str] = {}
    for key, entry in snapshot.entries.items():
        if not key.startswith(MEMBERS):
            continue
        shown = key if len(key) <= 200 else f"{key[:200]}... ({len(key)} characters)"
        try:
            member = _decoded(key.removeprefix(MEMBERS), entry)
        except ConfigError as error:
            odd[shown] = str(error)
        else:
            engines[member.engine] = member
    return Members(engines, snapshot.fresh, odd)


def _decoded(name: str, entry: Entry) -> Member:
    if len(entry.value) > MEMBER_LIMIT:
        raise ConfigError(f"{len(entry.value)} bytes: expected at most {MEMBER_LIMIT}")
    if not entry.leased:
        raise ConfigError("it has no lease, so no engine keeps it alive: expected one that an engine holds")
    try:
        member = msgspec.json.decode(entry.value, type=Member)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        raise ConfigError(f"unreadable: {str(error)[:300]}") from None
    if member.engine != name or not is_name(name):
        raise ConfigError(f"engine = {member.engine[:200]!r}: expected the name that its key has")
    return member


def _encoded(member: Member) -> bytes:
    """Return what is stored, read back first: nobody announces what others would refuse."""
    if not is_name(member.engine):
        raise ConfigError(f"engine = {member.engine!r}: expected 1 to 200 letters, digits or . _ : @ + ~ = -")
    try:
        value = msgspec.json.encode(member)
        _decoded(member.engine, Entry(value, 0, leased=True))
    except (ConfigError, UnicodeEncodeError, TypeError) as error:
        raise ConfigError(f"engine {member.engine}: cannot be announced, {error}") from None
    return value
