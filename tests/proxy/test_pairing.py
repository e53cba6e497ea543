# SPDX-License-Identifier: Apache-2.0
"""Engines that do not fit are barred from each other, each pair with one line that says why."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from tests.proxy.answers import Engines, about, layout, other_release
from tidal_connector.control.messages import About
from tidal_connector.errors import PeerLost, ProtocolError
from tidal_connector.ids import EngineId, Incarnation, Role
from tidal_connector.proxy.pairing import barred_pairs
from tidal_connector.proxy.policy import Pair
from tidal_connector.proxy.roster import Engine, Roster
from tidal_connector.proxy.settings import Decode, Prefill, ProxyConfig, Timeouts
from tidal_connector.proxy.survey import Survey
from tidal_connector.registry.members import Member, Members, State
from tidal_connector.registry.settings import RegistryConfig

CONFIG = ProxyConfig(
    prefill=(Prefill("p0", "http://h:1", "p0:1"), Prefill("p1", "http://h:2", "p1:1")),
    decode=(Decode("d0", "http://h:3", "d0:1"), Decode("d1", "http://h:4", "d1:1")),
)
P0, P1, D0, D1 = Roster(CONFIG).engines
ONE = ProxyConfig(prefill=CONFIG.prefill[:1], decode=CONFIG.decode[:1])


def judge(known: dict[Engine, About]) -> dict[Pair, str]:
    return barred_pairs((P0, P1), (D0, D1), known)


def test_equal_layouts_fit_and_the_unknown_are_barred_from_nothing() -> None:
    assert judge({}) == {}
    assert judge({P0: about("p0", layout(layers=4))}) == {}
    everybody = {item: about(item.engine) for item in (P0, P1, D0, D1)}
    assert judge(everybody) == {}


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (about("d0", layout(layers=4)), "regions: 6 of 6 layers at 'p0', 4 of 4 layers at 'd0'; serve the same"),
        (
            about("d0", layout(size=2)),
            "regions, first in the latent rows of layer 0: row_bytes 2304 at 'p0', 1152 at 'd0', "
            "latent_dtype 'float32' at 'p0', 'bfloat16' at 'd0', ",
        ),
        (about("d0", layout(weights="w1")), "weights: 'w0' at 'p0', 'w1' at 'd0'; serve the same checkpoint"),
        (other_release("d0"), f"at 'p0', {'f' * 32} at 'd0'; run the same release on both"),
    ],
)
def test_a_pair_that_differs_is_barred_with_both_names_and_values(decode: About, words: str) -> None:
    known = {P0: about("p0"), D0: decode, P1: about("p1", decode.layout), D1: about("d1")}
    barred = judge(known)
    line = barred["p0", "d0"]
    assert line.startswith("prefill engine 'p0' and decode engine 'd0' do not fit: ")
    assert words in line
    assert "\n" not in line
    assert ("p0", "d1") not in barred


def test_another_engine_at_an_address_bars_every_pair_of_the_one_that_was_named() -> None:
    barred = judge({P0: about("p7")})
    assert set(barred) == {("p0", "d0"), ("p0", "d1")}
    assert set(barred.values()) == {
        "prefill engine 'p0' was looked for at p0:1, engine 'p7' is there: correct the address or the id"
    }


def test_an_engine_of_the_other_role_is_named() -> None:
    wrong = Engine(engine="d0", side="prefill", url="http://h:1", control="d0:1")
    (line,) = barred_pairs([wrong], [D1], {wrong: about("d0")}).values()
    assert "'d0' at d0:1 is configured as a prefill engine and serves as a decode engine (kv_role kv_consumer)" in line
    wrong = Engine(engine="p0", side="decode", url="http://h:1", control="p0:1")
    (line,) = barred_pairs([P1], [wrong], {wrong: about("p0")}).values()
    assert "'p0' at p0:1 is configured as a decode engine and serves as a prefill engine (kv_role kv_producer)" in line


def test_fingerprints_of_the_registry_count_until_an_engine_has_spoken() -> None:
    one, other = about("p0").fingerprint, "0" * 32
    prefill = msgspec.structs.replace(P0, layout=one)
    decode = msgspec.structs.replace(D0, layout=other)
    assert barred_pairs([prefill], [D0], {}) == {}
    (line,) = barred_pairs([prefill], [decode], {}).values()
    assert f"do not fit: layout fingerprint {one} at 'p0', {other} at 'd0'; serve the same checkpoint" in line
    (line,) = barred_pairs([P0], [decode], {P0: about("p0")}).values()
    assert f"{one} at 'p0', {other} at 'd0'" in line
    assert barred_pairs([prefill], [decode], {decode: about("d0")}) == {}


def test_an_engine_of_both_roles_never_pushes_to_itself() -> None:
    twice = [Engine(engine="b0", side=side, url="http://h:1") for side in ("prefill", "decode")]
    (line,) = barred_pairs(twice[:1], twice[1:], {}).values()
    assert line.startswith("engine 'b0' cannot push to itself")


def survey_of(config: ProxyConfig, engines: Engines, rounds: int = 1, survey: Survey | None = None) -> Survey:
    found = survey or Survey(Roster(config), config.timeouts, engines.ask)

    async def run() -> None:
        for _ in range(rounds):
            await found.round()

    asyncio.run(run())
    return found


def test_only_engines_with_an_address_are_asked() -> None:
    engines = Engines(p0=about("p0"), d0=about("d0"))
    config = ProxyConfig(prefill=ONE.prefill, decode=(*ONE.decode, Decode("d1", "http://h:4")))
    survey = survey_of(config, engines)
    assert sorted(engines.asked) == ["d0", "p0"]
    assert survey.unknown == []


def test_what_changes_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("tidal"), "propagate", True)
    caplog.set_level(logging.INFO)
    engines = Engines(p0=about("p0"), d0=about("d0", layout(layers=4)))
    survey = survey_of(ONE, engines, rounds=3)
    (record,) = caplog.records
    assert record.getMessage() == survey.nothing_fits != ""
    engines.said["p0"] = about("p0", life="2")  # started anew, and the same
    survey_of(ONE, engines, survey=survey)
    assert len(caplog.records) == 1
    engines.said["d0"] = about("d0", life="2")
    survey_of(ONE, engines, rounds=2, survey=survey)
    assert [item.getMessage() for item in caplog.records[1:]] == [f"mended: {record.getMessage()}"]
    assert survey.nothing_fits == ""


def test_something_odd_at_an_address_is_logged_once_and_bars_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("tidal"), "propagate", True)
    survey = survey_of(ONE, Engines(p0=ProtocolError("protocol version 9 there, 1 here"), d0=about("d0")), rounds=3)
    assert [item.getMessage() for item in caplog.records] == ["engine p0: protocol version 9 there, 1 here"]
    assert (survey.barred, survey.unknown) == ({}, ["p0"])


def test_an_engine_that_falls_silent_is_still_what_it_was() -> None:
    engines = Engines(p0=about("p0"), d0=about("d0", layout(layers=4)))
    survey = survey_of(ONE, engines)
    engines.said["d0"] = PeerLost("busy")
    survey_of(ONE, engines, survey=survey)
    assert set(survey.barred) == {("p0", "d0")}


def test_engines_are_asked_again_and_again_and_no_more_afterwards() -> None:
    engines = Engines()
    survey = Survey(Roster(ONE), Timeouts(inquiry_every_s=0.01), engines.ask)

    async def run() -> int:
        async with survey.running():
            while len(engines.asked) < 6:
                await asyncio.sleep(0.005)
        count = len(engines.asked)
        await asyncio.sleep(0.1)
        return len(engines.asked) - count

    assert asyncio.run(asyncio.wait_for(run(), 20)) == 0


def test_many_reasons_are_one_line() -> None:
    engines = Engines(p0=about("p0"), p1=about("p1"), d0=about("d0", layout(layers=4)), d1=about("d1", layout(size=2)))
    survey = survey_of(CONFIG, engines)
    assert survey.nothing_fits == f"{survey.reasons[0]} (and 3 more: see /health)"
    engines.said["d1"] = about("d1")
    assert survey_of(CONFIG, engines, survey=survey).nothing_fits == ""
    assert len(survey.barred) == 2


def test_an_engine_of_the_registry_is_asked_once_in_each_life_and_what_it_said_ends_with_it() -> None:
    engines = Engines(p0=about("p0"), d0=about("d0", layout(layers=4)))
    roster = Roster(ProxyConfig(prefill=ONE.prefill, registry=RegistryConfig(url="memory:")))
    survey = Survey(roster, Timeouts(), engines.ask)

    def tell(life: str, state: State = State.READY) -> None:
        fields = {"http": "http://h:3", "control": "d0:1", "incarnation": Incarnation(life)}
        member = Member(engine=EngineId("d0"), role=Role.DECODE, state=state, **fields)
        roster.take(Members({member.engine: member}))

    tell("1")
    survey_of(ONE, engines, rounds=3, survey=survey)
    assert engines.asked.count("d0") == 1
    assert set(survey.barred) == {("p0", "d0")}
    tell("2", State.STARTING)
    assert survey.barred == {}
    engines.said["d0"] = about("d0", life="2")
    tell("2")
    survey_of(ONE, engines, rounds=3, survey=survey)
    assert engines.asked.count("d0") == 2
    assert survey.barred == {}
