# SPDX-License-Identifier: Apache-2.0
"""What all stores share: checks of what is written, and the holds and watches that end with the store."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Mapping, Sequence

from tidal_connector.errors import RegistryLost
from tidal_connector.registry.base import Delete, Hold, Put, Snapshot, Store, Watch
from tidal_connector.registry.follower import Follower
from tidal_connector.registry.keeper import Keeper, Lease
from tidal_connector.registry.keys import check_changes, check_key, check_prefix, check_value


class CommonStore(Store):
    """A store that says only how it reads, writes, leases and follows."""

    def __init__(self) -> None:
        self._mine = threading.Lock()
        self._holds: list[Keeper] = []
        self._watches: list[Follower] = []
        self._over = False

    @abc.abstractmethod
    def _read(self, prefix: str) -> Snapshot:
        """Read, bounded."""

    @abc.abstractmethod
    def _write(self, changes: Sequence[Put | Delete], expect: Mapping[str, int]) -> None:
        """Write what was checked."""

    @abc.abstractmethod
    def _lease(self, key: str, ttl_s: float) -> Lease:
        """Return how one key is held."""

    @abc.abstractmethod
    def _follower(self, prefix: str, on_change: Callable[[Snapshot], None]) -> Follower:
        """Return a watch that has not begun."""

    def _end(self) -> None:
        """Close what the store itself has open."""

    def read(self, prefix: str) -> Snapshot:
        """Return everything under a prefix, read now."""
        self._check_open()
        check_prefix(prefix)
        return self._read(prefix)

    def write(self, changes: Sequence[Put | Delete], expect: Mapping[str, int] | None = None) -> None:
        """Make all changes, or none."""
        self._check_open()
        check_changes(changes, expect or {})
        self._write(changes, expect or {})

    def hold(self, key: str, value: bytes, ttl_s: float) -> Hold:
        """Keep an entry alive."""
        check_key(key)
        check_value(key, value)
        if ttl_s < 1:
            raise ValueError(f"ttl_s = {ttl_s:g} for {key!r}: expected at least 1 second")
        with self._mine:
            self._check_open()
            keeper = Keeper(key, value, self._lease(key, ttl_s))
            self._holds = [*(each for each in self._holds if not each.released), keeper]
        return keeper

    def watch(self, prefix: str, on_change: Callable[[Snapshot], None]) -> Watch:
        """Call with the whole snapshot, as soon as it is known and after every change."""
        check_prefix(prefix)
        with self._mine:
            self._check_open()
            follower = self._follower(prefix, on_change)
            self._watches = [*(each for each in self._watches if not each.closed), follower]
            follower.begin()
        return follower

    def die(self) -> None:
        """End as a killed process does: the entries stay until their leases run out (tests)."""
        for keeper in self._holds:
            keeper.abandon()
        self.close()

    def close(self) -> None:
        """Release every hold, end every watch, close connections."""
        with self._mine:
            if self._over:
                return
            self._over = True
            holds, watches = self._holds, self._watches
        for keeper in holds:
            keeper.let_go()  # all at once, so that a store that is gone costs one wait and not one for each
        for follower in watches:
            follower.close()
        for keeper in holds:
            keeper.release()
        self._end()

    def _check_open(self) -> None:
        if self._over:
            raise RegistryLost("the store was closed")
