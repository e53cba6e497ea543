# SPDX-License-Identifier: Apache-2.0
"""What the cluster agrees on: entries under keys, held by leases, watched as whole snapshots.

Two levels. A :class:`Store` keeps small byte values under keys (``memory``, ``file``, ``etcd``): it knows transactions,
leases and watches, and nothing of engines. ``members`` builds the registry of engines on it; ``cluster`` keeps rollouts
in it. Everything that a store hands out was written by somebody else: whoever reads it checks it.

A lease, here: an entry that its holder must renew. Its holder's end removes the entry within one TTL; a hiccup of the
store does not, because the holder puts it back by itself as soon as the store answers again. An entry that somebody
else holds is never replaced.

Thread-safe: a store may be used from several threads; callbacks run on a thread of the store's own and must not block.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import msgspec

ABSENT = 0
"""The version of a key that does not exist."""


class Entry(msgspec.Struct, frozen=True):
    """A value and when it was last written.

    Attributes:
        value: the bytes.
        version: rises with every write to this key; compare it for equality only.
        leased: whether it goes away with its holder.
    """

    value: bytes
    version: int
    leased: bool


class Snapshot(msgspec.Struct, frozen=True):
    """Everything under a prefix at one moment.

    Attributes:
        entries: by whole key.
        fresh: False where the store cannot be reached and this is what was last heard.
    """

    entries: Mapping[str, Entry]
    fresh: bool = True


class Put(msgspec.Struct, frozen=True):
    """Write a value that stays until it is deleted."""

    key: str
    value: bytes


class Delete(msgspec.Struct, frozen=True):
    """Remove a key, if it is there."""

    key: str


class Hold(abc.ABC):
    """An entry kept alive by a thread of its own, until it is released.

    While the store cannot be reached it goes on trying; an entry that was lost (expired, revoked, deleted, or gone with
    the store's data) is put back. While somebody else holds the key it waits for its turn.
    """

    @property
    @abc.abstractmethod
    def held(self) -> bool:
        """Whether the entry stands as far as this side knows, its lease not yet run out by this side's own clock."""

    @abc.abstractmethod
    def update(self, value: bytes) -> None:
        """Replace the value: at once where the store answers, otherwise as soon as it does. Does not block."""

    @abc.abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait until the entry stands with its newest value; return whether it does."""

    @abc.abstractmethod
    def release(self) -> None:
        """Remove the entry and end the thread; bounded by seconds even where the store is gone. Again does nothing."""


class Watch(abc.ABC):
    """A running watch; leaving its context, or ``close``, ends it."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the watch; no call comes after it. Again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Store(abc.ABC):
    """Small values under keys. Keys are paths such as ``members/decode-0``, relative to the cluster's own root."""

    @abc.abstractmethod
    def read(self, prefix: str) -> Snapshot:
        """Return everything under a prefix, read now.

        Raises:
            RegistryLost: the store does not answer within its bound.
        """

    @abc.abstractmethod
    def write(self, changes: Sequence[Put | Delete], expect: Mapping[str, int] | None = None) -> None:
        """Make all changes, or none.

        Args:
            changes: at most 100.
            expect: the version that each of these keys must have (:data:`ABSENT`: must not exist).

        Raises:
            Conflict: a key has another version than expected; nothing was written.
            RegistryLost: the store does not answer; whether anything was written is not known.
        """

    @abc.abstractmethod
    def hold(self, key: str, value: bytes, ttl_s: float) -> Hold:
        """Keep an entry alive; returns at once, the entry stands as soon as the store answers and nobody holds it.

        Args:
            key: where.
            value: what.
            ttl_s: seconds after the holder's end until the entry is gone, at most (at least 1).
        """

    @abc.abstractmethod
    def watch(self, prefix: str, on_change: Callable[[Snapshot], None]) -> Watch:
        """Call with the whole snapshot: first as soon as it is known, then after every change.

        A cut connection is mended by reading the whole prefix anew, so no change is lost for good; meanwhile the last
        snapshot is told once more, as not fresh.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release every hold, end every watch, close connections; bounded. Again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
