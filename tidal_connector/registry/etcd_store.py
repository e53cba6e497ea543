# SPDX-License-Identifier: Apache-2.0
"""The store in etcd: leases that come back by themselves, and watches that read the whole prefix after every cut.

Keys lie below ``/tidal/CLUSTER/``. An entry is its holder's if it is under the holder's lease *and* has the holder's
value; nobody but the holder knows the lease's id before it is used, and no write of this package replaces a key that is
under another lease.

A watch never relies on its stream alone: it reads the prefix when the stream begins, after every cut (a compaction
counts as one), and every third of a TTL besides. That reading is also how a server is noticed that has stopped to
answer on an open connection.
"""

from __future__ import annotations

import math
import queue
import random
import threading
from collections.abc import Callable, Mapping, Sequence

from tidal_connector.errors import Conflict, RegistryLost
from tidal_connector.log import get_logger
from tidal_connector.registry.base import ABSENT, Delete, Entry, Put, Snapshot
from tidal_connector.registry.common import CommonStore
from tidal_connector.registry.etcd import Change, EtcdClient, Events, Found, Write
from tidal_connector.registry.follower import Follower
from tidal_connector.registry.keeper import Lease, now, retry_after
from tidal_connector.registry.settings import RegistryConfig

_log = get_logger(__name__)

_JOIN_S = 5.0  # a cancelled stream ends at once
_CONDITIONS_LIMIT = 128  # etcd's default for the operations of a transaction


def granted_ttl(ttl_s: float) -> int:
    """Return the whole seconds to ask etcd for, so that an entry is gone ``ttl_s`` after its holder's end.

    etcd looks for expired leases twice a second and removes them through its log: that takes up to a second more, which
    is taken off where there is room for it.
    """
    return max(1, math.floor(ttl_s) - 1) if ttl_s >= 4 else max(1, math.floor(ttl_s))


class _EtcdLease(Lease):
    def __init__(self, client: EtcdClient, key: bytes, ttl_s: float) -> None:
        self._client, self._key = client, key
        self._granted_s = granted_ttl(ttl_s)
        self.ttl_s = float(self._granted_s)
        self._id = 0
        self._value = b""

    def put(self, value: bytes) -> bool:
        if self._id and not self._client.keep_alive(self._id):
            self._id = 0
        if not self._id:
            self._id = self._client.grant(self._granted_s)
        found = self._client.get(self._key)
        if found is not None and found.lease not in (0, self._id):
            return False
        if found is not None and not found.lease:
            _log.warning("%s: replacing an entry that nobody holds", self._key.decode())
        if found is None or not self._mine(found, value):
            expect = {self._key: found.revision if found is not None else ABSENT}
            if self._client.transact(expect, (), [Write(self._key, value, self._id)]) is not None:
                return False
        self._value = value
        return True

    def renew(self) -> bool:
        if not self._client.keep_alive(self._id):
            self._id = 0
            return False
        found = self._client.get(self._key)
        return found is not None and self._mine(found, self._value)

    def drop(self) -> None:
        if self._id:
            self._client.revoke(self._id)
            self._id = 0

    def _mine(self, found: Found, value: bytes) -> bool:
        return found.lease == self._id and found.value == value


class _EtcdFollower(Follower):
    """Follows by a stream, which a thread of its own reads, and by reading the prefix now and then."""

    def __init__(
        self,
        client: EtcdClient,
        root: bytes,
        prefix: str,
        pulse_s: float,
        on_change: Callable[[Snapshot], None],
    ) -> None:
        super().__init__(prefix, on_change)
        self._client, self._root, self._pulse_s = client, root, pulse_s
        self._stream: _Stream | None = None
        self._streams = threading.Lock()  # over _stream, which close() cancels

    def _follow(self) -> None:
        failures = 0
        while not self._closed.is_set():
            began = now()
            try:
                revision, found = self._client.range(self._root + self.prefix.encode())
                self._tell(found)
                self._stream_from(revision, found)
            except _Cut as cut:
                failures = 1 if now() - began > self._pulse_s else failures + 1
                if failures == 1 and not self._closed.is_set():
                    _log.info("watch of %r: cut (%s), reading anew", self.prefix, cut)
            except RegistryLost as error:
                failures += 1
                self.tell_lost(str(error))
            self.rest(retry_after(max(1, failures), 0, self._pulse_s) * random.uniform(0.5, 1.0))

    def _stream_from(self, revision: int, found: dict[bytes, Found]) -> None:
        """Tell of changes until the stream is cut or the watch closed.

        Raises:
            _Cut: the stream has ended, or says less than it should.
            RegistryLost: etcd does not answer.
        """
        prefix = self._root + self.prefix.encode()
        with _Stream(self._client.watch(prefix, revision + 1), self.prefix) as stream:
            with self._streams:
                self._stream = stream
            silent = False  # whether the last reading knew more than the stream
            due = now() + self._pulse_s
            while not self._closed.is_set():
                changes = stream.take(due - now())
                for change in changes:
                    if change.revision <= revision:
                        continue  # a reading was ahead of the stream
                    if change.found is None:
                        found.pop(change.key, None)
                    else:
                        found[change.key] = change.found
                if changes:
                    silent = False
                elif now() >= due:
                    read_at, read = self._client.range(prefix)
                    if read_at < revision or (silent and read != found):
                        raise _Cut("it has gone silent")
                    silent = read != found
                    revision, found = read_at, read
                    due = now() + self._pulse_s
                self._tell(found)

    def _tell(self, found: Mapping[bytes, Found]) -> None:
        self.tell(_snapshot(self._root, found))

    def _wake(self) -> None:
        with self._streams:  # ends a stream that began before; a later one sees that the watch is closed
            if self._stream is not None:
                self._stream.cancel()


class _Cut(Exception):
    """A stream has ended; whether etcd answers is not said."""


class _Stream:
    """The thread that reads one stream, and the queue into which it puts what it reads."""

    def __init__(self, events: Events, name: str) -> None:
        self._events = events
        self._queue: queue.SimpleQueue[list[Change] | RegistryLost] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, name=f"tidal-stream-{name}", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for batch in self._events.batches():
                self._queue.put(batch)
        except RegistryLost as error:
            self._queue.put(error)

    def take(self, timeout_s: float) -> list[Change]:
        """Return the next changes, all that are there; none after the timeout.

        Raises:
            _Cut: the stream has ended.
        """
        changes: list[Change] = []
        try:
            item = self._queue.get(timeout=max(0.0, timeout_s))
            while True:
                if isinstance(item, RegistryLost):
                    raise _Cut(str(item))
                changes += item
                item = self._queue.get_nowait()
        except queue.Empty:
            return changes

    def cancel(self) -> None:
        """End the stream."""
        self._events.cancel()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
        self._thread.join(_JOIN_S)


def _snapshot(root: bytes, found: Mapping[bytes, Found]) -> Snapshot:
    return Snapshot(
        {
            key[len(root) :].decode(errors="backslashreplace"): Entry(each.value, each.revision, each.lease != 0)
            for key, each in sorted(found.items())
        }
    )


class EtcdStore(CommonStore):
    """One client of an etcd cluster."""

    def __init__(self, config: RegistryConfig) -> None:
        """Prepare; nothing is connected yet.

        Args:
            config: checked settings with an ``etcd://`` URL.
        """
        super().__init__()
        self._root = f"/tidal/{config.cluster}/".encode()
        # A third of a TTL, so that a call that fails leaves time for another; at most 3 s, at least half a second.
        self._pulse_s = min(3.0, max(0.5, config.ttl_s / 3))
        self._client = EtcdClient(config, timeout_s=self._pulse_s)

    def _read(self, prefix: str) -> Snapshot:
        _, found = self._client.anywhere(lambda: self._client.range(self._root + prefix.encode()))
        return _snapshot(self._root, found)

    def _write(self, changes: Sequence[Put | Delete], expect: Mapping[str, int]) -> None:
        named = {self._root + key.encode(): version for key, version in expect.items()}
        writes = [
            Write(self._root + change.key.encode(), change.value if isinstance(change, Put) else None)
            for change in changes
        ]
        # Whatever shall be absent has no lease either.
        unleased = [each.key for each in writes if each.value is not None and named.get(each.key) != ABSENT]
        if len(named) + len(unleased) > _CONDITIONS_LIMIT:
            raise ValueError(f"a write with {len(named) + len(unleased)} conditions: etcd takes {_CONDITIONS_LIMIT}")
        self._client.settle(self._root)
        found = self._client.transact(named, unleased, writes)
        if found is None:
            return
        for key, version in named.items():
            stands = found[key].revision if key in found else ABSENT
            if stands != version:
                raise Conflict(
                    f"{self._shown(key)}: has version {stands}, expected {version}; somebody else changed it"
                )
        held = next((key for key in unleased if key in found and found[key].lease), unleased[0] if unleased else b"")
        raise Conflict(f"{self._shown(held)}: is held by its owner's lease; only its owner replaces it")

    def _shown(self, key: bytes) -> str:
        return key[len(self._root) :].decode(errors="backslashreplace")

    def _lease(self, key: str, ttl_s: float) -> Lease:
        return _EtcdLease(self._client, self._root + key.encode(), ttl_s)

    def _follower(self, prefix: str, on_change: Callable[[Snapshot], None]) -> Follower:
        return _EtcdFollower(self._client, self._root, prefix, self._pulse_s, on_change)

    def _end(self) -> None:
        self._client.close()
