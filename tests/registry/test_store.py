# SPDX-License-Identifier: Apache-2.0
"""What every store keeps, asked of each: reads, transactions, leases, watches."""

from __future__ import annotations

import threading
import time

import pytest

from tests.registry.beds import BUSY, GONE, TTL, Bed, Seen, eventually
from tidal_connector.errors import Conflict, RegistryLost
from tidal_connector.registry.base import ABSENT, Delete, Entry, Put
from tidal_connector.registry.keys import CHANGES_LIMIT, VALUE_LIMIT


def test_a_value_is_read_back_by_another_client(bed: Bed) -> None:
    value = bytes(range(256))
    bed.open().write([Put("a/b", value)])
    entry = bed.open().read("a/").entries["a/b"]
    assert entry.value == value
    assert not entry.leased
    assert entry.version != ABSENT


def test_reading_an_empty_store_gives_nothing(bed: Bed) -> None:
    assert bed.open().read("a/").entries == {}
    assert bed.open().read("").entries == {}


def test_a_prefix_is_a_prefix_of_text(bed: Bed) -> None:
    store = bed.open()
    store.write([Put("a/x1", b""), Put("a/x2", b""), Put("a/y", b""), Put("ab", b""), Put("a/x/deep", b"")])
    assert set(store.read("a/").entries) == {"a/x1", "a/x2", "a/y", "a/x/deep"}
    assert set(store.read("a/x").entries) == {"a/x1", "a/x2", "a/x/deep"}
    assert set(store.read("a").entries) == {"a/x1", "a/x2", "a/y", "ab", "a/x/deep"}
    assert set(store.read("").entries) == {"a/x1", "a/x2", "a/y", "ab", "a/x/deep"}


def test_a_key_and_a_folder_of_one_name(bed: Bed) -> None:
    store = bed.open()
    store.write([Put("a", b"1"), Put("a/b", b"2"), Put("a/b/c", b"3")])
    assert {key: each.value for key, each in store.read("a").entries.items()} == {"a": b"1", "a/b": b"2", "a/b/c": b"3"}


def test_more_entries_than_one_answer_takes(bed: Bed) -> None:
    store = bed.open()
    wanted = {f"many/{number:03}": str(number).encode() for number in range(100)}
    store.write([Put(key, value) for key, value in wanted.items()])
    assert {key: each.value for key, each in store.read("many/").entries.items()} == wanted


def test_versions_rise_with_each_write(bed: Bed) -> None:
    store = bed.open()
    versions = []
    for value in (b"1", b"2", b"2"):
        store.write([Put("k", value)])
        versions.append(store.read("k").entries["k"].version)
    assert versions == sorted(set(versions))


def test_delete(bed: Bed) -> None:
    store = bed.open()
    store.write([Put("k", b"")])
    store.write([Delete("k"), Delete("never/was")])
    assert store.read("").entries == {}


def test_a_write_is_whole_or_not_at_all(bed: Bed) -> None:
    store = bed.open()
    store.write([Put("a", b"1"), Put("b", b"1")])
    version = store.read("a").entries["a"].version
    with pytest.raises(Conflict, match="a: has version"):
        store.write([Put("b", b"2"), Delete("a"), Put("c", b"2")], {"b": store.read("b").entries["b"].version, "a": -5})
    assert {key: each.value for key, each in store.read("").entries.items()} == {"a": b"1", "b": b"1"}
    store.write([Put("b", b"2"), Delete("a"), Put("c", b"2")], {"a": version, "c": ABSENT})
    assert {key: each.value for key, each in store.read("").entries.items()} == {"b": b"2", "c": b"2"}


def test_what_must_be_absent(bed: Bed) -> None:
    store = bed.open()
    store.write([Put("k", b"1")], {"k": ABSENT})
    with pytest.raises(Conflict, match="expected 0"):
        store.write([Put("k", b"2")], {"k": ABSENT})
    store.write([Delete("k")])
    store.write([Put("k", b"3")], {"k": ABSENT})
    with pytest.raises(Conflict, match="gone: has version 0"):
        store.write([Put("k", b"4")], {"gone": 3})


def test_of_many_that_write_at_once_one_wins(bed: Bed) -> None:
    won: list[int] = []

    def race(number: int) -> None:
        try:
            bed.open().write([Put("k", str(number).encode())], {"k": ABSENT})
            won.append(number)
        except Conflict:
            pass

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(won) == 1
    assert bed.open().read("k").entries["k"].value == str(won[0]).encode()


def test_a_counter_loses_no_step(bed: Bed) -> None:
    def count() -> None:
        store = bed.open()
        for _ in range(10):
            while True:
                entry = store.read("n").entries["n"]
                try:
                    store.write([Put("n", b"%d" % (int(entry.value) + 1))], {"n": entry.version})
                    break
                except Conflict:
                    continue

    bed.open().write([Put("n", b"0")])
    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert bed.open().read("n").entries["n"].value == b"40"


@pytest.mark.parametrize("key", ["", "/a", "a//b", "a/", "a/../b", ".", "a b", "ü", "a\n", "x" * 2000])
def test_odd_keys_are_refused(bed: Bed, key: str) -> None:
    store = bed.open()
    with pytest.raises(ValueError, match="expected names of letters"):
        store.write([Put(key, b"")])
    with pytest.raises(ValueError, match="expected names of letters"):
        store.hold(key, b"", TTL)


def test_limits_are_the_same_everywhere(bed: Bed) -> None:
    store = bed.open()
    with pytest.raises(ValueError, match="at most 100"):
        store.write([Put(f"k{number}", b"") for number in range(CHANGES_LIMIT + 1)])
    with pytest.raises(ValueError, match="bytes: expected at most"):
        store.write([Put("k", bytes(VALUE_LIMIT + 1))])
    with pytest.raises(ValueError, match="twice"):
        store.write([Put("k", b""), Delete("k")])
    with pytest.raises(ValueError, match="at least 1 second"):
        store.hold("k", b"", 0.5)
    with pytest.raises(ValueError, match="prefix"):
        store.read("../")
    with pytest.raises(ValueError, match="prefix"):
        store.watch("a//", lambda _: None)
    assert store.read("").entries == {}
    store.write([Put("k", bytes(VALUE_LIMIT))])
    assert len(store.read("k").entries["k"].value) == VALUE_LIMIT


# --- holds ---


def test_a_hold_stands_longer_than_its_ttl_and_costs_no_time(bed: Bed) -> None:
    store = bed.open()
    hold = store.hold("w/h", b"v", TTL)
    assert hold.wait(5)
    version = store.read("w/h").entries["w/h"].version
    seen = Seen()
    with store.watch("w/", seen):
        assert seen.values({"w/h": b"v"})
        store.write([Put("elsewhere", b"")])
        before = time.process_time()
        time.sleep(TTL * 1.5)
        assert time.process_time() - before < 0.3
    assert hold.held
    assert store.read("w/h").entries["w/h"] == Entry(b"v", version, leased=True)
    assert len(seen.all) == 1  # renewing is no change, and other keys are not told


def test_release_removes_the_entry_at_once(bed: Bed) -> None:
    store = bed.open()
    hold = store.hold("h", b"v", TTL)
    assert hold.wait(5)
    hold.release()
    assert not hold.held
    assert bed.open().read("h").entries == {}
    hold.release()
    assert not hold.wait(0)


def test_a_dead_holder_s_entry_goes_within_its_ttl_and_its_successor_follows(bed: Bed) -> None:
    holder, other = bed.open(), bed.open()
    seen = Seen()
    other.watch("h", seen)
    assert holder.hold("h", b"old", TTL).wait(5)
    assert other.hold("also", b"", TTL).wait(5)
    assert seen.values({"h": b"old"})
    holder.die()
    assert other.read("h").entries  # it was not withdrawn
    successor = bed.open().hold("h", b"new", TTL)
    # Who looks ten times a second may see the successor at once.
    assert seen.wait(lambda _: seen.last in ({}, {"h": b"new"}), GONE + BUSY)
    assert successor.wait(TTL)
    assert seen.values({"h": b"new"})


def test_update_replaces_the_value(bed: Bed) -> None:
    store = bed.open()
    hold = store.hold("h", b"1", TTL)
    assert hold.wait(5)
    for value in (b"2", b"3"):
        hold.update(value)
        assert hold.wait(5)
        assert bed.open().read("h").entries["h"].value == value


def test_the_last_of_many_updates_stands(bed: Bed) -> None:
    hold = bed.open().hold("h", b"start", TTL)
    for number in range(50):
        hold.update(b"%d" % number)
    assert hold.wait(5)
    assert bed.open().read("h").entries["h"].value == b"49"


def test_fr_43_a_second_hold_waits_for_its_turn(bed: Bed) -> None:
    first, second = bed.open(), bed.open()
    owner = first.hold("h", b"owner", TTL)
    assert owner.wait(5)
    thief = second.hold("h", b"thief", TTL)
    assert not thief.wait(TTL * 0.8)
    assert not thief.held
    assert owner.held
    assert first.read("h").entries["h"].value == b"owner"
    owner.release()
    assert thief.wait(5)
    assert first.read("h").entries["h"].value == b"thief"


def test_fr_43_a_write_does_not_replace_a_held_entry(bed: Bed) -> None:
    first, second = bed.open(), bed.open()
    assert first.hold("h", b"owner", TTL).wait(5)
    with pytest.raises(Conflict, match="h: is held by its owner"):
        second.write([Put("other", b""), Put("h", b"thief")])
    version = second.read("h").entries["h"].version
    with pytest.raises(Conflict, match="h: is held by its owner"):
        second.write([Put("h", b"thief")], {"h": version})
    assert {key: each.value for key, each in second.read("").entries.items()} == {"h": b"owner"}


def test_a_deleted_entry_is_put_back(bed: Bed) -> None:
    first, second = bed.open(), bed.open()
    hold = first.hold("h", b"v", TTL)
    assert hold.wait(5)
    second.write([Delete("h")])
    assert second.read("h").entries == {}
    assert eventually(lambda: second.read("h").entries, TTL)
    assert hold.held


def test_fr_43_an_overwritten_entry_is_put_right(bed: Bed) -> None:
    store = bed.open()
    hold = store.hold("h", b"owner", TTL)
    assert hold.wait(5)
    bed.overwrite("h", b"thief")
    assert store.read("h").entries["h"].value == b"thief"
    assert not store.read("h").entries["h"].leased
    assert eventually(lambda: store.read("h").entries["h"].value == b"owner", TTL * 1.5)
    assert store.read("h").entries["h"].leased
    assert hold.wait(TTL)


def test_a_hold_outlives_the_loss_of_all_data(bed: Bed) -> None:
    store = bed.open()
    hold = store.hold("h", b"v", TTL)
    assert hold.wait(5)
    seen = Seen()
    store.watch("", seen)
    bed.wipe()

    def back() -> bool:
        try:
            return {key: each.value for key, each in store.read("").entries.items()} == {"h": b"v"}
        except RegistryLost:
            return False

    assert eventually(back, 5)
    assert hold.wait(5)
    assert seen.values({"h": b"v"})


def test_close_releases_what_is_held(bed: Bed) -> None:
    store = bed.open()
    for number in range(5):
        assert store.hold(f"h{number}", b"", TTL).wait(5)
    store.close()
    assert bed.open().read("").entries == {}
    store.close()
    with pytest.raises(RegistryLost, match="closed"):
        store.read("")
    with pytest.raises(RegistryLost, match="closed"):
        store.hold("h", b"", TTL)


# --- watches ---


def test_a_watch_tells_what_is_there_and_what_changes(bed: Bed) -> None:
    store, other = bed.open(), bed.open()
    other.write([Put("w/1", b"1"), Put("elsewhere", b"")])
    seen = Seen()
    with store.watch("w/", seen):
        assert seen.values({"w/1": b"1"})
        other.write([Put("w/2", b"2")])
        assert seen.values({"w/1": b"1", "w/2": b"2"})
        other.write([Delete("w/1"), Put("w/2", b"3")])
        assert seen.values({"w/2": b"3"})
    assert all(each.fresh for each in seen.all)


def test_a_watch_of_nothing_says_so(bed: Bed) -> None:
    seen = Seen()
    with bed.open().watch("w/", seen):
        assert seen.values({})
    assert len(seen.all) == 1


def test_changes_of_one_write_are_seen_together(bed: Bed) -> None:
    store = bed.open()
    seen = Seen()
    with store.watch("w/", seen):
        for number in range(20):
            store.write([Put("w/a", b"%d" % number), Put("w/b", b"%d" % number)])
        assert seen.values({"w/a": b"19", "w/b": b"19"})
    for snapshot in seen.all:
        assert len({entry.value for entry in snapshot.entries.values()}) <= 1


def test_nothing_is_told_after_close(bed: Bed) -> None:
    store = bed.open()
    seen = Seen()
    watch = store.watch("w/", seen)
    assert seen.values({})
    watch.close()
    store.write([Put("w/1", b"")])
    time.sleep(0.3)
    assert len(seen.all) == 1
    watch.close()


def test_a_watch_may_close_itself(bed: Bed) -> None:
    store = bed.open()
    told = threading.Event()
    calls: list[int] = []
    started = threading.Event()

    def once(_: object) -> None:
        started.wait(5)
        calls.append(1)
        watch.close()
        told.set()

    watch = store.watch("w/", once)
    started.set()
    assert told.wait(5)
    store.write([Put("w/1", b"")])
    time.sleep(0.3)
    assert calls == [1]


def test_a_failing_callback_does_not_end_the_watch(bed: Bed) -> None:
    store = bed.open()
    seen = Seen()

    def tell(snapshot: object) -> None:
        seen(snapshot)  # type: ignore[arg-type]
        raise RuntimeError("on purpose")

    with store.watch("w/", tell):
        assert seen.values({})
        store.write([Put("w/1", b"1")])
        assert seen.values({"w/1": b"1"})


def test_two_watches_of_one_store(bed: Bed) -> None:
    store = bed.open()
    one, two = Seen(), Seen()
    with store.watch("a/", one), store.watch("b/", two):
        store.write([Put("a/1", b""), Put("b/1", b"")])
        assert one.values({"a/1": b""})
        assert two.values({"b/1": b""})
