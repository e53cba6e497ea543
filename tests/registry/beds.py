# SPDX-License-Identifier: Apache-2.0
"""The three kinds of store behind one interface, so that one test body runs on each; and small helpers."""

from __future__ import annotations

import abc
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tests.etcd import EtcdServer
from tidal_connector.registry.base import Snapshot
from tidal_connector.registry.common import CommonStore
from tidal_connector.registry.file import FileStore
from tidal_connector.registry.memory import MemoryStore, Room
from tidal_connector.registry.settings import RegistryConfig, open_store

TTL = 1.0
GONE = TTL + 1.0  # etcd looks for expired leases twice a second
BUSY = 1.0  # on a machine with other work, whoever looks is late


def eventually(what: Callable[[], object], timeout_s: float = 5.0) -> bool:
    """Wait until a condition holds; return whether it does."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.01)
    return bool(what())


class Seen:
    """What a watch was told."""

    def __init__(self) -> None:
        self.all: list[Snapshot] = []
        self._told = threading.Condition()

    def __call__(self, snapshot: Snapshot) -> None:
        with self._told:
            self.all.append(snapshot)
            self._told.notify_all()

    @property
    def last(self) -> dict[str, bytes] | None:
        """Values of the last snapshot, by key; None before the first."""
        return {key: entry.value for key, entry in self.all[-1].entries.items()} if self.all else None

    def wait(self, wanted: Callable[[Snapshot], object], timeout_s: float = 5.0) -> bool:
        """Wait until the last snapshot is as wanted."""
        with self._told:
            return self._told.wait_for(lambda: self.all and wanted(self.all[-1]), timeout_s)

    def values(self, wanted: dict[str, bytes], timeout_s: float = 5.0) -> bool:
        """Wait until the last snapshot has just these values, and is fresh."""
        return self.wait(lambda each: each.fresh and self.last == wanted, timeout_s)


class Bed(abc.ABC):
    """A store that any number of clients open."""

    def __init__(self) -> None:
        self._opened: list[CommonStore] = []

    def open(self) -> CommonStore:
        """Return one more client, closed with the bed."""
        store = self._open()
        self._opened.append(store)
        return store

    @abc.abstractmethod
    def _open(self) -> CommonStore: ...

    @abc.abstractmethod
    def wipe(self) -> None:
        """Lose all data."""

    @abc.abstractmethod
    def overwrite(self, key: str, value: bytes) -> None:
        """Write a key past the product."""

    def close(self) -> None:
        """Close all clients."""
        for store in self._opened:
            store.close()


class MemoryBed(Bed):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.room = Room()

    def _open(self) -> CommonStore:
        return MemoryStore(self.room)

    def wipe(self) -> None:
        self.room.wipe()

    def overwrite(self, key: str, value: bytes) -> None:
        self.room.overwrite(key, value)


class FileBed(Bed):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder / "store"

    def _open(self) -> CommonStore:
        return FileStore(self.folder)

    def wipe(self) -> None:
        gone = self.folder.rename(self.folder.with_name("gone"))  # at once: others make it again meanwhile
        shutil.rmtree(gone)

    def overwrite(self, key: str, value: bytes) -> None:
        path = self.folder / "entries" / f"{key},json"
        path.with_suffix(".mine").write_bytes(msgspec.json.encode({"value": value, "version": 7}))
        path.with_suffix(".mine").replace(path)


class EtcdBed(Bed):
    def __init__(self, folder: Path, server: EtcdServer) -> None:
        super().__init__()
        self.server = server
        self.cluster = folder.name

    def _open(self) -> CommonStore:
        store = open_store(RegistryConfig(url=self.server.url, cluster=self.cluster, ttl_s=TTL))
        assert isinstance(store, CommonStore)
        return store

    def wipe(self) -> None:
        self.server.kill()
        self.server.wipe()
        self.server.start()

    def overwrite(self, key: str, value: bytes) -> None:
        self.server.put(f"/tidal/{self.cluster}/{key}", value)
