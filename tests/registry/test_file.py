# SPDX-License-Identifier: Apache-2.0
"""The directory: several processes, and what dies half-way."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tests.arch.source import ROOT
from tests.registry.beds import GONE, TTL, Seen
from tidal_connector.errors import RegistryLost
from tidal_connector.registry import file as file_store
from tidal_connector.registry.base import ABSENT, Put
from tidal_connector.registry.file import FileStore

HOLDER = """
import sys, time
from pathlib import Path
from tidal_connector.registry.file import FileStore
store = FileStore(Path(sys.argv[1]))
store.hold("h", b"v", 1)
time.sleep(60)
"""

COUNTER = """
import sys
from pathlib import Path
from tidal_connector.errors import Conflict
from tidal_connector.registry.base import Put
from tidal_connector.registry.file import FileStore
store = FileStore(Path(sys.argv[1]))
for _ in range(30):
    while True:
        entry = store.read("n").entries["n"]
        try:
            store.write([Put("n", b"%d" % (int(entry.value) + 1)), Put("m", entry.value)], {"n": entry.version})
            break
        except Conflict:
            pass
"""


def python(code: str, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], cwd=ROOT)


def test_processes_count_together(tmp_path: Path) -> None:
    with FileStore(tmp_path) as store:
        store.write([Put("n", b"0")])
        processes = [python(COUNTER, tmp_path) for _ in range(2)]
        assert [process.wait(60) for process in processes] == [0, 0]
        assert {key: each.value for key, each in store.read("").entries.items()} == {"n": b"60", "m": b"59"}


def test_a_killed_process_is_gone_within_its_ttl(tmp_path: Path) -> None:
    with FileStore(tmp_path) as store:
        seen = Seen()
        store.watch("", seen)
        process = python(HOLDER, tmp_path)
        try:
            assert seen.values({"h": b"v"}, 10)
            process.send_signal(signal.SIGSTOP)
            assert seen.values({}, GONE)
            process.send_signal(signal.SIGCONT)
            assert seen.values({"h": b"v"}, TTL)
        finally:
            process.kill()
            process.wait(10)
        assert seen.values({}, GONE)


def test_a_write_whose_process_died_half_way_is_finished(tmp_path: Path) -> None:
    """A journal and one of its two files are there, as after a kill between two renames."""
    with FileStore(tmp_path) as store:
        store.write([Put("a", b"old"), Put("b", b"old"), Put("c", b"old")])
        entries = tmp_path / "entries"
        new = {"value": b"new", "version": 9}
        journal = {"revision": 9, "files": {"a": new, "b": new, "c": None}}
        (tmp_path / "journal").write_bytes(msgspec.json.encode(journal))
        (entries / "a,json").write_bytes(msgspec.json.encode(new))
        (entries / "b,json.new").write_bytes(b'{"val')
        assert {key: each.value for key, each in store.read("").entries.items()} == {"a": b"new", "b": b"new"}
        assert not (tmp_path / "journal").exists()
        store.write([Put("b", b"newer")])
        assert store.read("b").entries["b"].version > 9


def test_leases_of_an_earlier_boot_have_ended(tmp_path: Path) -> None:
    with FileStore(tmp_path) as store:
        assert store.hold("h", b"v", 60).wait(5)
        path = tmp_path / "entries" / "h,json"
        stored = msgspec.json.decode(path.read_bytes())
        store.die()
        assert FileStore(tmp_path).read("h").entries
        path.write_bytes(msgspec.json.encode({**stored, "boot": "another"}))
        assert FileStore(tmp_path).read("h").entries == {}
        FileStore(tmp_path).write([Put("h", b"2")], {"h": ABSENT})


def test_a_lock_that_is_not_let_go_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "_LOCK_S", 0.4)
    with FileStore(tmp_path) as store, (tmp_path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        began = time.monotonic()
        with pytest.raises(RegistryLost, match=r"lock: held for over 0\.4 s"):
            store.read("")
        assert time.monotonic() - began < 1.5


def test_files_of_strangers_are_entries_that_nobody_holds(tmp_path: Path) -> None:
    with FileStore(tmp_path) as store:
        (tmp_path / "entries" / "members").mkdir()
        (tmp_path / "entries" / "members" / "x,json").write_bytes(b"not ours")
        (tmp_path / "entries" / "members" / "y,json").write_bytes(bytes(10 << 20))
        (tmp_path / "entries" / "members" / "readme.txt").write_bytes(b"")
        found = store.read("members/").entries
        assert set(found) == {"members/x", "members/y"}
        assert not any(entry.leased for entry in found.values())
        assert store.hold("members/x", b"v", TTL).wait(5)
        assert store.read("members/x").entries["members/x"].value == b"v"


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    with FileStore(tmp_path / "r") as store:
        store.write([Put("a/b", b"")])
        assert store.root.stat().st_mode & 0o777 == 0o700
