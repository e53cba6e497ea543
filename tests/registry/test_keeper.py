# SPDX-License-Identifier: Apache-2.0
"""The timing of a hold, on a store that fails as told; and the rule of keys."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.registry.beds import Seen, eventually
from tidal_connector.errors import RegistryLost
from tidal_connector.registry import follower
from tidal_connector.registry.base import Delete, Put, Snapshot
from tidal_connector.registry.follower import Follower
from tidal_connector.registry.keeper import Keeper, Lease, now, retry_after
from tidal_connector.registry.keys import check_changes, check_key, check_prefix, is_name
from tidal_connector.registry.memory import MemoryStore, Room


@given(st.integers(1, 100), st.floats(0.001, 3600), st.floats(1, 3600))
def test_fr_15_a_retry_comes_before_the_lease_ends(failures: int, remaining: float, ttl: float) -> None:
    wait = retry_after(failures, min(remaining, ttl), ttl)
    assert 0.05 <= wait <= max(0.05, min(remaining, ttl) / 3)


@given(st.integers(1, 10**6), st.floats(-100, 0), st.floats(1, 3600))
def test_after_the_end_retries_go_on_at_least_once_a_second(failures: int, remaining: float, ttl: float) -> None:
    assert 0.1 <= retry_after(failures, remaining, ttl) <= 1.0


class Scripted(Lease):
    """A lease whose store fails while ``lost`` is set, and answers late by ``delay_s``."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.lost = threading.Event()
        self.taken = threading.Event()
        self.gone = threading.Event()
        self.faulty = threading.Event()
        self.delay_s = 0.0
        self.calls: list[tuple[str, float]] = []
        self.value = b""

    def _called(self, what: str) -> None:
        self.calls.append((what, now()))
        time.sleep(self.delay_s)
        if self.faulty.is_set():
            raise RuntimeError("on purpose")
        if self.lost.is_set():
            raise RegistryLost(f"as told, call {len(self.calls)}")

    def put(self, value: bytes) -> bool:
        self._called("put")
        if self.taken.is_set():
            return False
        self.gone.clear()
        self.value = value
        return True

    def renew(self) -> bool:
        self._called("renew")
        return not self.gone.is_set()

    def drop(self) -> None:
        self._called("drop")


@pytest.fixture
def lease() -> Scripted:
    return Scripted(1.0)


def test_a_lease_is_renewed_three_times_in_its_ttl(lease: Scripted) -> None:
    keeper = Keeper("k", b"v", lease)
    assert eventually(lambda: len(lease.calls) >= 4)
    keeper.release()
    gaps = [after - before for (_, before), (_, after) in zip(lease.calls[:4], lease.calls[1:4], strict=False)]
    assert all(0.3 <= gap <= 0.45 for gap in gaps), gaps


def test_fr_15_the_lease_runs_from_when_its_renewal_was_sent(lease: Scripted) -> None:
    lease.delay_s = 0.6
    keeper = Keeper("k", b"v", lease)
    assert keeper.wait(5)
    answered = now()
    lease.delay_s = 0.0
    lease.lost.set()
    assert eventually(lambda: not keeper.held)
    assert now() - answered <= 0.55  # not a whole TTL from the answer
    lease.lost.clear()
    keeper.release()


def test_fr_15_failed_renewals_are_repeated_before_the_lease_ends(lease: Scripted) -> None:
    keeper = Keeper("k", b"v", lease)
    assert keeper.wait(5)
    began = lease.calls[0][1]
    lease.lost.set()
    assert eventually(lambda: not keeper.held)
    in_time = [at for what, at in lease.calls if what == "renew" and at < began + 1.0]
    assert len(in_time) >= 3
    lease.lost.clear()
    assert keeper.wait(1.0)
    keeper.release()


def test_a_store_that_is_away_is_asked_gently(lease: Scripted) -> None:
    lease.lost.set()
    keeper = Keeper("k", b"v", lease)
    time.sleep(1.0)
    assert 2 <= len(lease.calls) <= 7
    lease.lost.clear()
    assert keeper.wait(1.0)
    keeper.release()


def test_a_lost_entry_is_put_back_at_once(lease: Scripted) -> None:
    keeper = Keeper("k", b"v", lease)
    assert keeper.wait(5)
    lease.gone.set()
    assert eventually(lambda: not lease.gone.is_set(), 0.6)
    renewed, put = lease.calls[-2:]
    assert (renewed[0], put[0]) == ("renew", "put")
    assert put[1] - renewed[1] < 0.1
    keeper.release()


def test_another_s_key_is_looked_at_gently(lease: Scripted) -> None:
    lease.taken.set()
    keeper = Keeper("k", b"v", lease)
    time.sleep(0.9)
    assert not keeper.held
    assert 2 <= len(lease.calls) <= 5
    lease.taken.clear()
    assert keeper.wait(1.0)
    keeper.release()


def test_an_update_while_a_call_is_under_way_is_not_lost(lease: Scripted) -> None:
    lease.delay_s = 0.2
    keeper = Keeper("k", b"1", lease)
    assert eventually(lambda: lease.calls)
    keeper.update(b"2")
    assert keeper.wait(5)
    assert lease.value == b"2"
    keeper.release()


def test_release_is_bounded_and_tries_once_where_the_store_is_gone(lease: Scripted) -> None:
    keeper = Keeper("k", b"v", lease)
    assert keeper.wait(5)
    lease.lost.set()
    began = time.monotonic()
    keeper.release()
    assert time.monotonic() - began < 1.0
    assert [what for what, _ in lease.calls].count("drop") == 1
    assert not keeper.held


def test_each_change_is_logged_once(lease: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "tidal.registry.keeper"):
        keeper = Keeper("k", b"v", lease)
        assert keeper.wait(5)
        lease.lost.set()
        assert eventually(lambda: len(lease.calls) > 6)
        lease.lost.clear()
        asked = len(lease.calls)
        assert eventually(lambda: len(lease.calls) > asked + 1)
        keeper.release()
    said = [each.getMessage() for each in caplog.records]
    assert [text.partition("(")[0].strip() for text in said] == [
        "k: stands in the registry",
        "k: the registry does not answer, trying on",
        "k: stands in the registry",
    ]


def test_a_lost_store_is_told_once_and_once_more_when_it_is_back() -> None:
    room = Room()
    seen = Seen()
    with MemoryStore(room) as store, store.watch("", seen):
        assert seen.values({})
        store.write([Put("k", b"1")])
        assert seen.values({"k": b"1"})
        room.cut()
        assert seen.wait(lambda each: not each.fresh)
        with pytest.raises(RegistryLost):
            store.read("")
        time.sleep(0.2)
        room.mend()
        assert seen.values({"k": b"1"})
    assert [each.fresh for each in seen.all] == [True, True, False, True]
    assert seen.last == {"k": b"1"}


def test_close_waits_for_a_call_that_runs() -> None:
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()

    def slow(_: Snapshot) -> None:
        entered.set()
        leave.wait(5)
        left.set()

    with MemoryStore() as store:
        watch = store.watch("", slow)
        assert entered.wait(5)
        threading.Timer(0.2, leave.set).start()
        watch.close()
        assert left.is_set()


def test_a_watch_with_a_fault_of_its_own_says_so_and_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "_AFTER_FAULT_S", 0.05)

    class Faulty(Follower):
        rounds = 0

        def _follow(self) -> None:
            self.rounds += 1
            self.tell(Snapshot({}))
            if self.rounds < 3:
                raise RuntimeError("on purpose")
            self.rest(60)

    seen = Seen()
    watch = Faulty("x", seen)
    watch.begin()
    assert eventually(lambda: len(seen.all) == 5)
    assert [each.fresh for each in seen.all] == [True, False, True, False, True]
    watch.close()


def test_a_hold_outlives_a_fault_of_its_own(lease: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    keeper = Keeper("k", b"v", lease)
    assert keeper.wait(5)
    lease.faulty.set()
    assert eventually(lambda: not keeper.held)
    lease.faulty.clear()
    assert keeper.wait(2)
    assert len([each for each in caplog.records if each.exc_info]) == 1
    keeper.release()


NAMES = st.text("abzAZ09._:@+~=-", min_size=1, max_size=200)


@given(st.lists(NAMES, min_size=1, max_size=4))
def test_paths_of_names_are_keys(parts: list[str]) -> None:
    key = "/".join(parts)
    if all(is_name(part) for part in parts):
        check_key(key)
        for cut in range(len(key) + 1):
            if not key[:cut].endswith(("/.", "/..")) and key[:cut] not in (".", ".."):
                check_prefix(key[:cut])
    else:
        with pytest.raises(ValueError, match="expected names"):
            check_key(key)


@given(st.text(max_size=30))
def test_no_key_leaves_its_folder(text: str) -> None:
    try:
        check_key(text)
    except ValueError:
        return
    assert not {"", ".", ".."} & set(text.split("/"))
    assert text.isascii()
    assert "," not in text


def test_conditions_are_counted_too() -> None:
    with pytest.raises(ValueError, match="conditions"):
        check_changes([Delete("k")], {f"k{number}": 1 for number in range(101)})
