# SPDX-License-Identifier: Apache-2.0
"""How a watch of etcd puts together what it reads and what it is told, with an etcd that says what the test wants."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from tests.registry.beds import Seen, eventually
from tidal_connector.errors import RegistryLost
from tidal_connector.registry.etcd import Change, Found
from tidal_connector.registry.etcd_store import _EtcdFollower, granted_ttl

ROOT = b"/tidal/c/"


class Stream:
    def __init__(self) -> None:
        self.tells: queue.SimpleQueue[list[Change] | None] = queue.SimpleQueue()

    def batches(self) -> Iterator[list[Change]]:
        while (batch := self.tells.get()) is not None:
            yield batch
        raise RegistryLost("cut")

    def cancel(self) -> None:
        self.tells.put(None)


class Etcd:
    """Answers each reading with ``now``, and counts the streams that were begun, with their first revisions."""

    def __init__(self, revision: int, **values: int) -> None:
        self.lost = False
        self.streams: list[Stream] = []
        self.begun: list[int] = []
        self.set(revision, **values)

    def set(self, revision: int, **values: int) -> None:
        self.now = revision, {ROOT + key.encode(): Found(b"%d" % each, each, 0) for key, each in values.items()}

    def range(self, prefix: bytes) -> tuple[int, dict[bytes, Found]]:
        assert prefix == ROOT
        if self.lost:
            raise RegistryLost("away")
        return self.now[0], dict(self.now[1])

    def watch(self, prefix: bytes, revision: int) -> Stream:
        self.begun.append(revision)
        self.streams.append(Stream())
        return self.streams[-1]

    def tell(self, key: str, revision: int, gone: bool = False) -> None:
        found = None if gone else Found(b"%d" % revision, revision, 0)
        self.streams[-1].tells.put([Change(ROOT + key.encode(), revision, found)])


def follow(etcd: Etcd, pulse_s: float) -> tuple[_EtcdFollower, Seen]:
    seen = Seen()
    follower = _EtcdFollower(etcd, ROOT, "", pulse_s, seen)  # type: ignore[arg-type]
    follower.begin()
    assert eventually(lambda: etcd.streams)
    return follower, seen


def test_the_stream_goes_on_where_the_reading_ended() -> None:
    etcd = Etcd(10, a=7)
    follower, seen = follow(etcd, 60)
    etcd.tell("b", 11)
    assert seen.values({"a": b"7", "b": b"11"})
    etcd.tell("a", 12, gone=True)
    assert seen.values({"b": b"11"})
    assert etcd.begun == [11]
    follower.close()


def test_a_stream_behind_a_reading_undoes_nothing() -> None:
    etcd = Etcd(10, a=7)
    follower, seen = follow(etcd, 60)
    etcd.tell("a", 6)  # older than what was read
    etcd.tell("a", 5, gone=True)
    etcd.tell("b", 11)
    assert seen.values({"a": b"7", "b": b"11"})
    assert {frozenset(each.entries) for each in seen.all} == {frozenset("a"), frozenset("ab")}
    follower.close()


def test_a_silent_stream_is_replaced_and_nothing_is_missed_meanwhile() -> None:
    etcd = Etcd(10, a=7)
    follower, seen = follow(etcd, 0.1)
    etcd.set(11, a=7, b=11)
    assert seen.values({"a": b"7", "b": b"11"})  # by reading: the stream says nothing
    etcd.set(12, b=11)
    assert seen.values({"b": b"11"})
    assert eventually(lambda: len(etcd.begun) == 2)
    assert etcd.begun[1] == 13
    assert all(each.fresh for each in seen.all)
    follower.close()


def test_an_etcd_with_other_data_is_read_anew() -> None:
    etcd = Etcd(100, a=7)
    follower, seen = follow(etcd, 0.1)
    etcd.set(3, z=2)
    assert seen.values({"z": b"2"})
    assert eventually(lambda: etcd.begun[1:] == [4])
    follower.close()


def test_a_cut_is_told_only_if_etcd_does_not_answer() -> None:
    etcd = Etcd(10, a=7)
    follower, seen = follow(etcd, 60)
    etcd.streams[-1].cancel()
    assert eventually(lambda: len(etcd.begun) == 2)
    assert [each.fresh for each in seen.all] == [True]
    etcd.lost = True
    etcd.streams[-1].cancel()
    assert seen.wait(lambda each: not each.fresh)
    etcd.set(20, a=7)
    etcd.lost = False
    assert seen.values({"a": b"7"})
    assert eventually(lambda: etcd.begun == [11, 11, 21])
    follower.close()


def test_a_stream_that_ends_at_once_is_begun_gently() -> None:
    etcd = Etcd(10)
    follower, _ = follow(etcd, 3.0)
    assert not eventually(lambda: etcd.streams[-1].cancel() or len(etcd.begun) > 6, 1.0)
    follower.close()


@pytest.mark.parametrize("ttl", [4, 5, 10, 60])
def test_what_etcd_is_asked_for_leaves_it_time_to_look(ttl: int) -> None:
    assert granted_ttl(ttl) == ttl - 1
    assert granted_ttl(ttl + 0.9) == ttl - 1
    assert granted_ttl(1) == 1
    assert granted_ttl(3.9) == 3
