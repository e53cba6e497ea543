# SPDX-License-Identifier: Apache-2.0
"""The store inside one process: for tests, and the smallest thing that keeps the whole contract.

A :class:`Room` is what a server would be; each :class:`MemoryStore` is one client of it. Leases end by the clock as
elsewhere: :meth:`CommonStore.die` leaves the entries to their TTL, :meth:`Room.cut` makes the room unreachable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from tidal_connector.errors import Conflict, RegistryLost
from tidal_connector.registry.base import ABSENT, Delete, Entry, Put, Snapshot
from tidal_connector.registry.common import CommonStore
from tidal_connector.registry.follower import Follower
from tidal_connector.registry.keeper import Lease, now

_LONGEST_WAIT_S = 60.0  # without a lease that ends, a watch wakes up only so often


class Room:
    """Entries shared by the stores of one process. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._entries: dict[str, tuple[Entry, Lease | None, float]] = {}  # with the lease that holds it and its end
        self._revision = 0
        self._reachable = True

    def cut(self) -> None:
        """Become unreachable for all stores; leases go on running out."""
        with self.changed:
            self._reachable = False
            self.changed.notify_all()

    def mend(self) -> None:
        """Become reachable again."""
        with self.changed:
            self._reachable = True
            self.changed.notify_all()

    def wipe(self) -> None:
        """Forget every entry and lease, as a server does that comes back without its data."""
        with self.changed:
            self._entries.clear()
            self.changed.notify_all()

    def overwrite(self, key: str, value: bytes) -> None:
        """Replace whatever a key holds, lease or not, as a client that keeps no rules can."""
        with self.changed:
            self._set(key, value, None, 0.0)
            self.changed.notify_all()

    def read(self, prefix: str) -> dict[str, Entry]:
        """Return everything under a prefix.

        Raises:
            RegistryLost: the room is cut.
        """
        with self.changed:
            self._look()
            return {key: entry for key, (entry, _, _) in sorted(self._entries.items()) if key.startswith(prefix)}

    def next_end(self) -> float:
        """Return when the next lease ends, at most a minute from now."""
        with self.changed:
            ends = [end for _, lease, end in self._entries.values() if lease is not None]
            return min([*ends, now() + _LONGEST_WAIT_S])

    def write(self, changes: Sequence[Put | Delete], expect: Mapping[str, int]) -> None:
        """Make all changes or none.

        Raises:
            Conflict: a version differs, or a lease holds what was to be replaced.
            RegistryLost: the room is cut.
        """
        with self.changed:
            self._look()
            for key, version in expect.items():
                found = self._entries[key][0].version if key in self._entries else ABSENT
                if found != version:
                    raise Conflict(f"{key}: has version {found}, expected {version}; somebody else changed it")
            for change in changes:
                if isinstance(change, Put) and change.key in self._entries and self._entries[change.key][1]:
                    raise Conflict(f"{change.key}: is held by its owner's lease; only its owner replaces it")
            for change in changes:
                if isinstance(change, Put):
                    self._set(change.key, change.value, None, 0.0)
                else:
                    self._entries.pop(change.key, None)
            self.changed.notify_all()

    def put(self, key: str, value: bytes, lease: Lease, ttl_s: float) -> bool:
        """Write an entry under a lease, unless another one holds the key; return whether it stands.

        Raises:
            RegistryLost: the room is cut.
        """
        with self.changed:
            self._look()
            entry, holder, _ = self._entries.get(key, (None, None, 0.0))
            if holder is not None and holder is not lease:
                return False
            if entry is not None and holder is lease and entry.value == value:
                self._entries[key] = (entry, lease, now() + ttl_s)
            else:
                self._set(key, value, lease, now() + ttl_s)
                self.changed.notify_all()
            return True

    def renew(self, key: str, lease: Lease, ttl_s: float) -> bool:
        """Renew a lease; return whether its entry is still there.

        Raises:
            RegistryLost: the room is cut.
        """
        with self.changed:
            self._look()
            entry, holder, _ = self._entries.get(key, (None, None, 0.0))
            if entry is None or holder is not lease:
                return False
            self._entries[key] = (entry, lease, now() + ttl_s)
            return True

    def drop(self, key: str, lease: Lease) -> None:
        """Remove a lease's entry.

        Raises:
            RegistryLost: the room is cut.
        """
        with self.changed:
            self._look()
            if key in self._entries and self._entries[key][1] is lease:
                del self._entries[key]
                self.changed.notify_all()

    def _set(self, key: str, value: bytes, lease: Lease | None, end: float) -> None:
        self._revision += 1
        self._entries[key] = (Entry(value, self._revision, lease is not None), lease, end)

    def _look(self) -> None:
        """Drop what ran out; refuse where cut."""
        for key in [key for key, (_, lease, end) in self._entries.items() if lease is not None and end <= now()]:
            del self._entries[key]
        if not self._reachable:
            raise RegistryLost("the room is cut")


class _RoomLease(Lease):
    def __init__(self, room: Room, key: str, ttl_s: float) -> None:
        self._room, self._key, self.ttl_s = room, key, ttl_s

    def put(self, value: bytes) -> bool:
        return self._room.put(self._key, value, self, self.ttl_s)

    def renew(self) -> bool:
        return self._room.renew(self._key, self, self.ttl_s)

    def drop(self) -> None:
        self._room.drop(self._key, self)


class _RoomFollower(Follower):
    def __init__(self, room: Room, prefix: str, on_change: Callable[[Snapshot], None]) -> None:
        super().__init__(prefix, on_change)
        self._room = room

    def _follow(self) -> None:
        while not self.closed:
            with self._room.changed:
                try:
                    snapshot = Snapshot(self._room.read(self.prefix))
                except RegistryLost as error:
                    snapshot, why = None, str(error)
                if snapshot == self._last or (snapshot is None and self._lost):
                    self._room.changed.wait(max(0.0, self._room.next_end() - now()))
                    continue
            if snapshot is not None:
                self.tell(snapshot)
            else:
                self.tell_lost(why)

    def _wake(self) -> None:
        with self._room.changed:
            self._room.changed.notify_all()


class MemoryStore(CommonStore):
    """One client of a room.

    Attributes:
        room: what it is a client of.
    """

    def __init__(self, room: Room | None = None) -> None:
        """Join a room, or open one of its own."""
        super().__init__()
        self.room = room if room is not None else Room()

    def _read(self, prefix: str) -> Snapshot:
        return Snapshot(self.room.read(prefix))

    def _write(self, changes: Sequence[Put | Delete], expect: Mapping[str, int]) -> None:
        self.room.write(changes, expect)

    def _lease(self, key: str, ttl_s: float) -> Lease:
        return _RoomLease(self.room, key, ttl_s)

    def _follower(self, prefix: str, on_change: Callable[[Snapshot], None]) -> Follower:
        return _RoomFollower(self.room, prefix, on_change)
