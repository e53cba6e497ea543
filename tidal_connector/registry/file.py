# SPDX-License-Identifier: Apache-2.0
"""The store in a directory, for several processes of one machine: a lock file, and one file for each key.

* Every operation holds ``flock`` on ``lock``, for at most as long as it takes to read or rename a few small files. The
  kernel lets go of the lock when its holder dies, so nothing is ever left locked.
* A file is written beside its place and renamed over it. A write of several keys first puts all of them into
  ``journal``; whoever takes the lock next finishes a write whose process died half-way.
* A lease is an end time of ``CLOCK_BOOTTIME`` in the entry's file, with the boot's id: leases of an earlier boot have
  ended. Whoever reads drops entries that have ended.
* ``revision`` counts changes; a watch looks at that one file every 0.1 s, and at the entries where it was replaced or a
  lease ended. (inotify would save those looks, and the standard library does not have it.)
* A directory that was deleted under running processes is made again, as an etcd that lost its data would be.

The directory must be local: ``flock`` and rename are not dependable on network filesystems. Whoever may write into it
may write every entry, so it belongs to one user (mode 0700).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tidal_connector.errors import ConfigError, Conflict, RegistryLost
from tidal_connector.registry.base import ABSENT, Delete, Entry, Put, Snapshot
from tidal_connector.registry.common import CommonStore
from tidal_connector.registry.follower import Follower
from tidal_connector.registry.keeper import Lease, now
from tidal_connector.registry.keys import VALUE_LIMIT

_LOCK_S = 3.0  # longest wait for the lock; it is held for a millisecond unless its holder is stopped
_LOOK_S = 0.1
_BY_HAND = -1  # the version of an entry that no store wrote
_FILE_LIMIT = 2 * VALUE_LIMIT  # base64 and the fields around it
_ENDING = ",json"  # the comma occurs in no key, so that no entry and no folder have the same name


class _Stored(msgspec.Struct, frozen=True):
    """An entry's file.

    Attributes:
        value: the bytes.
        version: revision of the last write.
        owner: random name of the lease; empty where there is none.
        end: when the lease ends.
        boot: the boot whose clock ``end`` is of.
    """

    value: bytes
    version: int
    owner: str = ""
    end: float = 0.0
    boot: str = ""


class _Journal(msgspec.Struct, frozen=True):
    """A write of several keys that is under way: what each file shall hold, None where it shall go."""

    revision: int
    files: dict[str, _Stored | None]


class _Directory:
    """The files. Everything but the constructor is called within :meth:`locked`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self.revision_file = root / "revision"
        self._entries = root / "entries"
        self._journal = root / "journal"
        try:
            self._make()
            with (root / "lock").open("r+b"):  # may we write?
                pass
        except OSError as error:
            raise ConfigError(f'registry.url = "file://{root}": cannot be used ({error.strerror})') from None

    def _make(self) -> None:
        self._entries.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root.chmod(0o700)
        (self.root / "lock").touch(mode=0o600)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, and finish what a dead process left half done."""
        deadline = time.monotonic() + _LOCK_S
        try:
            if not self._entries.exists():
                self._make()
            with (self.root / "lock").open("rb") as file:
                while not _tried(file.fileno()):
                    if time.monotonic() > deadline:
                        raise RegistryLost(f"{self.root}/lock: held for over {_LOCK_S:g} s; is a process stopped?")
                    time.sleep(0.01)
                self._replay()
                yield
        except (OSError, msgspec.DecodeError) as error:
            raise RegistryLost(f"{self.root}: {error}") from None

    def revision(self) -> int:
        """The number of the last change."""
        try:
            return int(self.revision_file.read_bytes())
        except (FileNotFoundError, ValueError):
            return 0

    def get(self, key: str) -> _Stored | None:
        """An entry whose lease, if it has one, has not ended."""
        return self._load(self._path(key))

    def under(self, prefix: str) -> dict[str, _Stored]:
        """All entries under a prefix, by key."""
        found = {}
        top = self._entries / prefix.rpartition("/")[0] if "/" in prefix else self._entries
        for path in sorted(top.rglob(f"*{_ENDING}")):
            key = path.relative_to(self._entries).as_posix().removesuffix(_ENDING)
            if key.startswith(prefix) and (stored := self._load(path)) is not None:
                found[key] = stored
        return found

    def change(self, files: Mapping[str, _Stored | None]) -> None:
        """Make all changes or, after a crash, have the next one make them."""
        journal = _Journal(self.revision() + 1, dict(files))
        if len(files) > 1:
            self._replace(self._journal, msgspec.json.encode(journal), lasting=True)
        self._apply(journal)

    def _replay(self) -> None:
        try:
            content = self._journal.read_bytes()
        except FileNotFoundError:
            return
        self._apply(msgspec.json.decode(content, type=_Journal))

    def _apply(self, journal: _Journal) -> None:
        for key, stored in journal.files.items():
            path = self._path(key)
            if stored is None:
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._replace(path, msgspec.json.encode(stored), lasting=not stored.owner)
        self._replace(self.revision_file, str(journal.revision).encode())
        self._journal.unlink(missing_ok=True)

    def renew(self, key: str, stored: _Stored) -> None:
        """Write a new end of a lease: no change that a watch is told of."""
        self._replace(self._path(key), msgspec.json.encode(stored))

    def _path(self, key: str) -> Path:
        return self._entries / f"{key}{_ENDING}"

    def _load(self, path: Path) -> _Stored | None:
        try:
            with path.open("rb") as file:
                content = file.read(_FILE_LIMIT)
        except FileNotFoundError:
            return None
        try:
            stored = msgspec.json.decode(content, type=_Stored)
        except msgspec.DecodeError:
            return _Stored(content, _BY_HAND)  # there, held by nobody and, to whoever reads it, odd
        ended = stored.owner and (stored.boot != self.boot or stored.end <= now())
        return None if ended else stored

    @staticmethod
    def _replace(path: Path, content: bytes, lasting: bool = False) -> None:
        beside = path.with_name(f"{path.name}.new")  # one name: whoever has the lock writes over what a crash left
        with beside.open("wb") as file:
            file.write(content)
            if lasting:  # a lease ends with the machine, other entries shall outlive it
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)


def _tried(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _FileLease(Lease):
    def __init__(self, directory: _Directory, key: str, ttl_s: float) -> None:
        self._directory, self._key = directory, key
        self.ttl_s = ttl_s
        self._owner = secrets.token_hex(8)

    def _stored(self, value: bytes, version: int) -> _Stored:
        return _Stored(value, version, self._owner, now() + self.ttl_s, self._directory.boot)

    def put(self, value: bytes) -> bool:
        with self._directory.locked():
            found = self._directory.get(self._key)
            if found is not None and found.owner and found.owner != self._owner:
                return False
            if found is not None and found.owner and found.value == value:
                self._directory.renew(self._key, self._stored(value, found.version))
            else:
                self._directory.change({self._key: self._stored(value, self._directory.revision() + 1)})
            return True

    def renew(self) -> bool:
        with self._directory.locked():
            found = self._directory.get(self._key)
            if found is None or found.owner != self._owner:
                return False
            self._directory.renew(self._key, self._stored(found.value, found.version))
            return True

    def drop(self) -> None:
        with self._directory.locked():
            found = self._directory.get(self._key)
            if found is not None and found.owner == self._owner:
                self._directory.change({self._key: None})


class _FileFollower(Follower):
    def __init__(self, directory: _Directory, prefix: str, on_change: Callable[[Snapshot], None]) -> None:
        super().__init__(prefix, on_change)
        self._directory = directory

    def _follow(self) -> None:
        seen, ends = (0, 0), 0.0
        while True:
            mark = self._mark()
            if mark != seen or ends <= now():
                try:
                    ends = self._look()
                    seen = mark
                except RegistryLost as error:
                    self.tell_lost(str(error))
                    ends = 0.0
            if not self.rest(_LOOK_S):
                return

    def _mark(self) -> tuple[int, int]:
        """What tells one writing of the revision's file from another: each is a new file."""
        try:
            found = self._directory.revision_file.stat()
        except OSError:
            return (0, 0)
        return (found.st_ino, found.st_mtime_ns)

    def _look(self) -> float:
        """Tell of what is there; return when to look again even if nothing is written."""
        with self._directory.locked():
            found = self._directory.under(self.prefix)
        self.tell(_snapshot(found))
        return min((stored.end for stored in found.values() if stored.owner), default=now() + 60)


def _snapshot(found: Mapping[str, _Stored]) -> Snapshot:
    return Snapshot({key: Entry(each.value, each.version, bool(each.owner)) for key, each in found.items()})


class FileStore(CommonStore):
    """One process's view of a directory.

    Attributes:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        """Use a directory; it is made where it is missing.

        Raises:
            ConfigError: it cannot be made or written.
        """
        super().__init__()
        self.root = root
        self._directory = _Directory(root)

    def _read(self, prefix: str) -> Snapshot:
        with self._directory.locked():
            return _snapshot(self._directory.under(prefix))

    def _write(self, changes: Sequence[Put | Delete], expect: Mapping[str, int]) -> None:
        with self._directory.locked():
            for key, version in expect.items():
                stored = self._directory.get(key)
                found = ABSENT if stored is None else stored.version
                if found != version:
                    raise Conflict(f"{key}: has version {found}, expected {version}; somebody else changed it")
            files: dict[str, _Stored | None] = {}
            for change in changes:
                stored = self._directory.get(change.key)
                if isinstance(change, Delete):
                    if stored is not None:
                        files[change.key] = None
                elif stored is not None and stored.owner:
                    raise Conflict(f"{change.key}: is held by its owner's lease; only its owner replaces it")
                else:
                    files[change.key] = _Stored(change.value, self._directory.revision() + 1)
            if files:
                self._directory.change(files)

    def _lease(self, key: str, ttl_s: float) -> Lease:
        return _FileLease(self._directory, key, ttl_s)

    def _follower(self, prefix: str, on_change: Callable[[Snapshot], None]) -> Follower:
        return _FileFollower(self._directory, prefix, on_change)
