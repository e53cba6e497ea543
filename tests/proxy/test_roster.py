# SPDX-License-Identifier: Apache-2.0
"""The engines that the proxy knows are those of its file and of the registry's last view, and changes are told once."""

from __future__ import annotations

import msgspec

from tidal_connector.ids import EngineId, Incarnation, Role
from tidal_connector.proxy.roster import Change, Roster
from tidal_connector.proxy.settings import Decode, Prefill, ProxyConfig
from tidal_connector.registry.members import Member, Members, State
from tidal_connector.registry.settings import RegistryConfig

CONFIG = ProxyConfig(
    prefill=(Prefill("p0", "http://file:1"),),
    decode=(Decode("d0", "http://file:2"),),
    registry=RegistryConfig(url="memory:"),
)


def member(engine: str, role: Role = Role.DECODE, state: State = State.READY, **more: str) -> Member:
    fields = {"http": f"http://{engine}:1", **more}
    life = Incarnation(fields.pop("incarnation", ""))
    return Member(engine=EngineId(engine), role=role, state=state, incarnation=life, **fields)


def view(*members: Member, fresh: bool = True, odd: dict[str, str] | None = None) -> Members:
    return Members({item.engine: item for item in members}, fresh, odd or {})


class Told:
    """A roster, what it told its listener, and its clock."""

    def __init__(self, config: ProxyConfig = CONFIG) -> None:
        self.now = 100.0
        self.roster = Roster(config, lambda: self.now)
        self.changes: list[list[Change]] = []
        self.roster.listen(self.changes.append)

    def names(self) -> list[str]:
        return [f"{item.side[0]}:{item.engine}" for item in self.roster.engines]


def test_engines_of_the_file_are_there_from_the_start_and_mixed_with_the_registrys() -> None:
    told = Told()
    assert told.names() == ["p:p0", "d:d0"]
    told.roster.take(view(member("d1"), member("b0", Role.BOTH), member("p1", Role.PREFILL)))
    assert told.names() == ["p:p0", "d:d0", "p:b0", "p:p1", "d:b0", "d:d1"]
    assert [item.registered for item in told.roster.engines] == [False, False, True, True, True, True]


def test_joins_changes_and_leaves_are_told_once_with_both_sides() -> None:
    told = Told()
    told.roster.take(view(member("d1", incarnation="a")))
    told.roster.take(view(member("d1", incarnation="a")))
    told.roster.take(view(member("d1", state=State.DRAINING, incarnation="a")))
    told.roster.take(view())
    seen = [
        [(change.before and change.before.state, change.after and change.after.state) for change in changes]
        for changes in told.changes
    ]
    assert seen == [[(None, "ready")], [("ready", "draining")], [("draining", None)]]
    assert told.names() == ["p:p0", "d:d0"]


def test_an_entry_of_the_registry_counts_before_the_files_and_the_files_comes_back() -> None:
    told = Told()
    told.roster.take(view(member("d0", state=State.DRAINING)))
    found = told.roster.find("decode", "d0")
    assert found is not None
    assert (found.state, found.url) == (State.DRAINING, "http://d0:1")
    told.roster.take(view())
    found = told.roster.find("decode", "d0")
    assert found is not None
    assert (found.state, found.url) == (State.READY, "http://file:2")


def test_while_the_registry_is_lost_the_last_view_stands_and_its_age_is_told() -> None:
    told = Told()
    assert (told.roster.fresh, told.roster.age_s) == (False, None)
    told.roster.take(view(fresh=False))
    assert told.roster.age_s is None
    told.roster.take(view(member("d1")))
    assert (told.roster.fresh, told.roster.age_s) == (True, 0.0)
    told.now = 105.0
    told.roster.take(view(member("d1"), fresh=False))
    told.now = 108.5
    assert (told.roster.fresh, told.roster.age_s) == (False, 3.5)
    told.roster.take(view(fresh=False))  # knows nothing: no news of anybody
    assert told.names() == ["p:p0", "d:d0", "d:d1"]
    told.roster.take(view())
    assert (told.roster.fresh, told.names()) == (True, ["p:p0", "d:d0"])


def test_what_cannot_be_asked_is_left_out_and_named() -> None:
    told = Told()
    told.roster.take(view(member("d1", http="d1:80"), member("d2"), odd={"members/d3": "unreadable"}))
    assert told.names() == ["p:p0", "d:d0", "d:d2"]
    assert told.roster.odd == {"members/d3": "unreadable", "d1": "http = 'd1:80': expected http://host:port"}
    told.roster.take(view(member("d1"), member("d2")))
    assert told.roster.odd == {}


def test_without_a_registry_the_view_is_always_fresh() -> None:
    told = Told(msgspec.structs.replace(CONFIG, registry=None))
    assert told.roster.fresh
