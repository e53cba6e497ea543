# SPDX-License-Identifier: Apache-2.0
"""An agent's state folder: what it must know after it was killed, so that it adopts the engines that live on.

::

    lock                      held by the agent that runs; two never share a folder
    cluster.json              the rollout as last heard, to be put back should the registry lose its data
    engines/ENGINE/record.json, serve-ATTEMPT.toml, engine.log

Files are replaced as a whole, so that an end at any moment leaves the old or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from tidal_connector.cluster.processes import ProcessId
from tidal_connector.errors import ConfigError
from tidal_connector.log import get_logger

_log = get_logger(__name__)

_LOG_BYTES = 64 << 20
_TAIL_BYTES = 8192


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that was started.

    Attributes:
        engine, revision, attempt: of the assignment that it was started for.
        file: its settings, named by no other process's command line.
        process: its supervisor; None where the agent may have been killed between the start and this record.
        ports: of its HTTP server and control channel.
        restarts: how often it has ended by itself.
        stopping: it was asked to end; a second time would cut its running requests off.
        drain_s: how long they may go on.
        why: what was last wrong.
    """

    engine: str
    revision: str
    attempt: int
    file: str
    process: ProcessId | None = None
    ports: tuple[int, int] = (0, 0)
    restarts: int = 0
    stopping: bool = False
    drain_s: float = 60.0
    why: str = ""


class Kept(msgspec.Struct, frozen=True):
    """The rollout as it was last heard: the values under ``rollout/`` that have no lease, by key."""

    entries: dict[str, bytes] = {}


Struct = TypeVar("Struct", bound=msgspec.Struct)


class AgentFolder:
    """The folder, locked while its context is open."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> AgentFolder:
        try:
            (self._path / "engines").mkdir(parents=True, exist_ok=True)
            self._lock = (self._path / "lock").open("ab")
        except OSError as error:
            raise ConfigError(
                f"state = {str(self._path)!r}: {error.strerror}; choose a folder that can be written"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConfigError(f"state = {str(self._path)!r}: another agent works in it; end that one first") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def engine(self, name: str) -> Path:
        """Return the folder of one engine; it is made where it is missing."""
        found = self._path / "engines" / name
        found.mkdir(exist_ok=True)
        return found

    def log(self, name: str) -> Path:
        """Return an engine's log file."""
        return self.engine(name) / "engine.log"

    def records(self) -> dict[str, Record]:
        """Return what is known of engines that were started."""
        found = {}
        for folder in sorted((self._path / "engines").iterdir()):
            record = self._read(folder / "record.json", Record)
            if record is not None and record.engine == folder.name:
                found[record.engine] = record
        return found

    def keep(self, record: Record) -> None:
        """Write down an engine's record."""
        _replace(self.engine(record.engine) / "record.json", msgspec.json.encode(record))

    def drop(self, engine: str) -> None:
        """Forget an engine; its log is kept."""
        folder = self.engine(engine)
        for path in (folder / "record.json", *folder.glob("serve-*.toml")):
            path.unlink(missing_ok=True)

    def keep_cluster(self, entries: Mapping[str, bytes]) -> None:
        """Write down the rollout as it was heard."""
        _replace(self._path / "cluster.json", msgspec.json.encode(Kept(dict(entries))))

    def cluster(self) -> dict[str, bytes]:
        """Return the rollout as it was last heard."""
        found = self._read(self._path / "cluster.json", Kept)
        return found.entries if found is not None else {}

    def _read(self, path: Path, kind: type[Struct]) -> Struct | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.error("%s cannot be read and is left out: %s", path, error)
            return None


def turn_over(log: Path) -> None:
    """Keep a log from growing without bound: what is large becomes the one old log."""
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > _LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))


def last_line(log: Path) -> str:
    """Return the last line of a log that says something; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "")


def _replace(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
