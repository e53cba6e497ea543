# SPDX-License-Identifier: Apache-2.0
"""Engines announce themselves and are seen; whatever else lies in the registry is named and left out."""

from __future__ import annotations

import logging

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.registry.beds import GONE, TTL, Bed, eventually
from tidal_connector.errors import ConfigError
from tidal_connector.ids import EngineId, Incarnation, Role
from tidal_connector.registry.base import Entry, Put, Snapshot
from tidal_connector.registry.members import (
    MEMBER_LIMIT,
    Member,
    Members,
    State,
    announce,
    members_of,
    peers,
    watch_members,
)


def member(engine: str = "decode-0", state: State = State.READY, **more: object) -> Member:
    return Member(engine=EngineId(engine), role=Role.DECODE, state=state, http="http://10.0.0.5:8000", **more)  # type: ignore[arg-type]


def snapshot(value: bytes, key: str = "members/decode-0", leased: bool = True) -> Snapshot:
    return Snapshot({key: Entry(value, 1, leased)})


GOOD = msgspec.json.encode(member())


def test_an_engine_is_announced_updated_and_withdrawn(bed: Bed) -> None:
    store, other = bed.open(), bed.open()
    told: list[Members] = []
    with watch_members(other, told.append), announce(store, member(state=State.STARTING), TTL) as announcement:
        assert announcement.wait(5)
        assert peers(other).engines == {"decode-0": member(state=State.STARTING)}
        ready = member(incarnation=Incarnation("ab" * 16), layout="f" * 64, requests=8, kv_tokens=1 << 40, note="ü")
        announcement.update(ready)
        assert announcement.wait(5)
        assert announcement.held
        assert eventually(lambda: told and told[-1].engines == {"decode-0": ready})
        announcement.withdraw()
        assert not announcement.held
        assert eventually(lambda: told[-1].engines == {})
    assert all(each.fresh and not each.odd for each in told)


@pytest.mark.parametrize("bed", ["memory"], indirect=True)  # test_store asks every store for it
def test_fr_43_two_engines_of_one_name_do_not_take_turns(bed: Bed) -> None:
    first, second = bed.open(), bed.open()
    owner = announce(first, member(), TTL)
    assert owner.wait(5)
    with announce(second, member(note="the other"), TTL) as other:
        assert not other.wait(TTL * 1.2)
        assert peers(second).engines["decode-0"].note == ""
        owner.withdraw()
        assert other.wait(GONE)
        assert peers(second).engines["decode-0"].note == "the other"


def test_another_engine_is_another_announcement(bed: Bed) -> None:
    with (
        announce(bed.open(), member(), TTL) as announcement,
        pytest.raises(ConfigError, match="this announcement is of 'decode-0'"),
    ):
        announcement.update(member("decode-1"))


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (member("a/b"), "engine = 'a/b'"),
        (member(""), "engine = ''"),
        (member("x" * 201), "expected 1 to 200"),
        (member(note="x" * 8193), "note"),
        (member(requests=-1), "requests"),
        (member(requests=1.5), "requests"),
        (member(model="\udcff"), "cannot be announced"),
    ],
)
@pytest.mark.parametrize("bed", ["memory"], indirect=True)
def test_nobody_announces_what_others_would_refuse(bed: Bed, odd: Member, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        announce(bed.open(), odd, TTL)


MEGABYTE = b"x" * (1 << 20)
ODD: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{", "unreadable"),
    "empty": (b"", "unreadable"),
    "not UTF-8": (b'"\xff"', "unreadable"),
    "a list": (b"[]", "unreadable: Expected `object`, got `array`"),
    "a wrong type": (GOOD.replace(b'"requests":0', b'"requests":"8"'), "requests"),
    "a wrong role": (GOOD.replace(b'"decode"', b'"judge"'), "role"),
    "an extra field": (GOOD.replace(b"{", b'{"x":1,', 1), "unknown field `x`"),
    "a missing field": (GOOD.replace(b'"http"', b'"htp"'), "htp"),
    "a negative count": (GOOD.replace(b'"requests":0', b'"requests":-1'), "requests"),
    "another engine": (GOOD.replace(b"decode-0", b"decode-1"), "expected the name that its key has"),
    "1 MB of text": (MEGABYTE, f"expected at most {MEMBER_LIMIT}"),
    "1 MB in a field": (GOOD.replace(b'"note":""', b'"note":"' + MEGABYTE + b'"'), f"expected at most {MEMBER_LIMIT}"),
    "deeply nested": (b"[" * 60000, "unreadable"),
}


@pytest.mark.parametrize("kind", ODD)
def test_fr_41_an_odd_entry_is_named_and_left_out(kind: str) -> None:
    value, why = ODD[kind]
    good = {"members/decode-9": Entry(msgspec.json.encode(member("decode-9")), 1, leased=True)}
    found = members_of(Snapshot({**good, **snapshot(value).entries}))
    assert set(found.engines) == {"decode-9"}
    assert set(found.odd) == {"members/decode-0"}
    assert why in found.odd["members/decode-0"]
    assert len(found.odd["members/decode-0"]) < 500
    assert "\n" not in found.odd["members/decode-0"]


def test_fr_43_an_entry_that_nobody_keeps_alive_is_left_out() -> None:
    found = members_of(snapshot(GOOD, leased=False))
    assert not found.engines
    assert "no lease" in found.odd["members/decode-0"]
    assert members_of(snapshot(GOOD)).engines


@pytest.mark.parametrize("key", ["members/", "members/decode-0/x", "members/" + "y" * 5000, "members/\\xff"])
def test_an_odd_key_is_named(key: str) -> None:
    found = members_of(snapshot(GOOD, key=key))
    assert not found.engines
    assert len(found.odd) == 1
    assert len(next(iter(found.odd))) < 300


def test_what_was_last_heard_stays_marked() -> None:
    assert not members_of(Snapshot(snapshot(GOOD).entries, fresh=False)).fresh


@given(st.binary(max_size=300) | st.binary(max_size=50).map(lambda noise: GOOD[:100] + noise + GOOD[100:]))
def test_fr_41_no_bytes_break_the_reader(value: bytes) -> None:
    found = members_of(snapshot(value))
    assert len(found.engines) + len(found.odd) == 1


@given(
    st.builds(
        Member,
        engine=st.from_regex(r"[A-Za-z0-9._:@+~=-]{1,200}", fullmatch=True).filter(
            lambda text: text not in (".", "..")
        ),
        role=st.sampled_from(Role),
        state=st.sampled_from(State),
        http=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=100),
        note=st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
        requests=st.integers(0, 2**62),
        kv_tokens=st.integers(0, 2**62),
    )
)
def test_what_is_announced_is_what_is_read(wanted: Member) -> None:
    found = members_of(snapshot(msgspec.json.encode(wanted), key=f"members/{wanted.engine}"))
    assert found.engines == {wanted.engine: wanted}


def test_fr_41_odd_entries_in_a_store_leave_the_watcher_alive(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    store, other = bed.open(), bed.open()
    told: list[Members] = []
    logging.getLogger("tidal").propagate = True
    with caplog.at_level("WARNING", "tidal.registry.members"), watch_members(other, told.append):
        for number in range(2):
            store.write([Put(f"members/big-{number}", MEGABYTE)])
        store.write([Put("members/small", b"{}")])
        bad = store.hold("members/typed", ODD["a wrong type"][0].replace(b"decode-0", b"typed"), TTL)
        assert bad.wait(5)
        with announce(store, member(), TTL) as announcement:
            assert announcement.wait(5)
            assert eventually(lambda: told and set(told[-1].engines) == {"decode-0"} and len(told[-1].odd) == 4)
        assert eventually(lambda: not told[-1].engines)
        assert set(told[-1].odd) == {"members/big-0", "members/big-1", "members/small", "members/typed"}
    for key in told[-1].odd:  # each is logged once, however often the watch was told
        assert len([each for each in caplog.records if key in each.getMessage()]) == 1


def test_a_failed_callback_of_a_member_watch_is_no_end(bed: Bed) -> None:
    told: list[Members] = []

    def fail_first(found: Members) -> None:
        told.append(found)
        assert len(told) > 1

    store = bed.open()
    with watch_members(store, fail_first):
        assert eventually(lambda: told)
        with announce(store, member(), TTL):
            assert eventually(lambda: set(told[-1].engines) == {"decode-0"})
