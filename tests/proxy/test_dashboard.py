# SPDX-License-Identifier: Apache-2.0
"""What the dashboard's data route says, and that it stays bounded, whatever proxy and engines do."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from tests.proxy.dashboard_world import Clock, Scene
from tidal_connector.proxy.dashboard import page as page_module
from tidal_connector.proxy.dashboard import sampler as sampler_module
from tidal_connector.proxy.dashboard.answer import Answer
from tidal_connector.proxy.dashboard.history import KEEP_S, MOST_LOOKS, STRETCHES
from tidal_connector.proxy.dashboard.routes import add_dashboard
from tidal_connector.proxy.dashboard.sampler import ALONE_S, MOST_ENGINES, MOST_PAIRS, Sampler
from tidal_connector.proxy.view import PairView, ProxyState, RegistryView


class World:
    """A scene, a clock, and a sampler that looks when it is told to."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.scene = Scene()
        self.sampler = Sampler(self.scene, self.clock)

    async def look(self, seconds: float = 2.0, times: int = 1) -> Answer:
        for _ in range(times):
            self.clock.now += seconds
            await self.sampler.look()
        self.sampler._watched = self.clock()  # as if a page were open; a first question waits for a fresh look
        answer = await self.sampler.answer()
        assert answer is not None
        return msgspec.convert(msgspec.to_builtins(answer), Answer)

    def engine(self, answer: Answer, name: str) -> Any:
        (row,) = [row for row in answer.engines if row.engine == name]
        return row


Story = Callable[[World], Awaitable[None]]


def tell(story: Story, pairs: int = 1) -> None:
    """Run a story in a world with so many prefill and decode engines."""

    async def whole() -> None:
        world = World()
        for number in range(pairs):
            world.scene.add(f"prefill-{number}", "prefill")
            world.scene.add(f"decode-{number}", "decode")
        await story(world)

    asyncio.run(whole())


def last(answer: Answer, column: str) -> Any:
    return answer.rows[-1][list(answer.columns).index(column)]


def what(answer: Answer, level: str) -> list[str]:
    return [finding.what for finding in answer.findings if finding.level == level]


def test_rates_bytes_hits_and_quantiles_add_up() -> None:
    async def story(world: World) -> None:
        scene = world.scene
        scene.count("prefill-0", bytes_pushed_total=1e6, transfers_in_flight=3)
        scene.count("decode-0", selection_hits_total=100, selection_misses_total=100, transfers_in_flight=2)
        await world.look()
        scene.count("prefill-0", bytes_pushed_total=5e6)
        scene.count("decode-0", selection_hits_total=190, selection_misses_total=110)
        for _ in range(6):
            scene.finish(first_byte_s=0.25, event_s=0.04)
        scene.finish("engine_error")
        scene.in_flight, scene.queued = 5, 2
        answer = await world.look(times=1)
        assert last(answer, "bytes_s") == pytest.approx(4e6 / 4)  # over the two looks that there were
        assert answer.totals.bytes == 4e6
        assert last(answer, "hit_rate") == pytest.approx(0.9)
        assert last(answer, "requests_s") == pytest.approx(7 / 4)
        assert last(answer, "failed_s") == pytest.approx(1 / 4)
        assert last(answer, "first_p50") == pytest.approx(0.25, rel=0.03)
        assert last(answer, "token_p99") == pytest.approx(0.04, rel=0.03)
        assert (last(answer, "in_flight"), last(answer, "queued")) == (5, 2)
        assert last(answer, "transfers") == 3, "both sides count a transfer; they are not added up"
        assert world.engine(answer, "prefill-0").bytes_s == pytest.approx(4e6 / 2)
        assert world.engine(answer, "decode-0").hit_rate == pytest.approx(0.9)

    tell(story)


def test_only_streams_tell_of_the_first_token() -> None:
    async def story(world: World) -> None:
        await world.look()
        world.scene.finish(first_byte_s=9.0, event_s=None, events=0)  # a whole answer: its first byte came at its end
        answer = await world.look()
        assert last(answer, "requests_s") > 0
        assert last(answer, "first_p50") is None

    tell(story)


def test_each_finished_request_counts_once_even_beyond_what_the_view_keeps() -> None:
    async def story(world: World) -> None:
        world.scene.finish(first_byte_s=5.0)
        await world.look()
        for _ in range(3000):
            world.scene.finish(first_byte_s=0.1)
        await world.look()
        for _ in range(20):
            world.scene.finish(first_byte_s=0.1)
        await world.look()
        seen = [sum(look.first_byte.values()) for look in world.sampler._history.recent(KEEP_S)]
        assert seen == [20, 1000, 1]

    tell(story)


def test_engines_appear_die_and_come_back() -> None:
    async def story(world: World) -> None:
        scene = world.scene
        await world.look()
        scene.add("decode-7", node="node-b", revision="r2")
        answer = await world.look()
        assert world.engine(answer, "decode-7").state == "ready"
        assert answer.level == "ok"
        scene.silent.add("decode-7")
        answer = await world.look()
        assert world.engine(answer, "decode-7").state == "ready", "one lost answer is not yet a dead engine"
        answer = await world.look()
        assert world.engine(answer, "decode-7").state == "unreachable"
        assert answer.level == "warning"
        assert "decode-7 cannot be reached" in what(answer, "warning")[0]
        scene.drop("decode-7")
        answer = await world.look(30.0)
        assert world.engine(answer, "decode-7").state == "gone"
        assert "left the registry without draining" in what(answer, "warning")[0]
        scene.silent.clear()
        scene.add("decode-7")
        answer = await world.look()
        assert (world.engine(answer, "decode-7").state, answer.level) == ("ready", "ok")
        assert set(world.engine(answer, "decode-7").states) <= set("ru.")
        assert "u" in world.engine(answer, "decode-7").states

    tell(story)


def test_a_refused_connection_needs_no_second_look() -> None:
    async def story(world: World) -> None:
        await world.look()
        world.scene.silent.add("decode-0")
        world.scene.add("decode-0", reachable=False)
        assert world.engine(await world.look(), "decode-0").state == "unreachable"

    tell(story)


def test_what_a_dead_engine_said_last_is_not_shown_as_now() -> None:
    async def story(world: World) -> None:
        world.scene.count("decode-0", num_requests_running=4, pool_pages=10, pool_pages_used=5)
        row = world.engine(await world.look(), "decode-0")
        assert (row.running, row.kv) == (4, 0.5)
        world.scene.silent.add("decode-0")
        row = world.engine(await world.look(times=2), "decode-0")
        assert (row.running, row.kv, row.bytes_s) == (None, None, None)

    tell(story)


def test_an_engine_that_left_after_draining_is_no_trouble_and_is_forgotten_in_time() -> None:
    async def story(world: World) -> None:
        world.scene.add("decode-0", state="draining")
        await world.look()
        world.scene.drop("decode-0")
        answer = await world.look()
        assert world.engine(answer, "decode-0").state == "left"
        assert answer.level == "ok"
        answer = await world.look(KEEP_S)
        assert [row.engine for row in answer.engines] == ["prefill-0"]

    tell(story)


def test_a_rollout_is_over_once_the_last_engine_of_the_old_revision_has_left() -> None:
    async def story(world: World) -> None:
        world.scene.add("decode-0", state="draining", revision="r1")
        world.scene.add("decode-1", revision="r2")
        answer = await world.look()
        assert answer.rollout is not None
        assert "A rollout is in progress: 1 of r1, 1 of r2." in what(answer, "note")
        world.scene.drop("decode-0")
        answer = await world.look()
        assert (answer.rollout, answer.findings) == (None, [])

    tell(story)


def test_an_unhealthy_engine_is_down_although_it_answers() -> None:
    async def story(world: World) -> None:
        world.scene.sick.add("decode-0")
        answer = await world.look()
        assert world.engine(answer, "decode-0").state == "down"
        assert "/health does not answer 200" in what(answer, "warning")[0]

    tell(story)


def test_a_starting_engine_may_be_silent() -> None:
    async def story(world: World) -> None:
        world.scene.add("decode-0", state="starting")
        world.scene.silent.add("decode-0")
        answer = await world.look(times=5)
        assert world.engine(answer, "decode-0").state == "starting"
        assert answer.level == "ok"
        assert what(answer, "note") == ["Decode engine decode-0 is starting."]

    tell(story)


def test_an_engine_of_both_roles_is_asked_once_and_counted_once() -> None:
    async def story(world: World) -> None:
        world.scene.engines.clear()
        world.scene.add("both-0", "prefill")
        world.scene.add("both-0", "decode")
        world.scene.count("both-0", bytes_pushed_total=0)
        await world.look()
        world.scene.count("both-0", bytes_pushed_total=1000)
        answer = await world.look()
        assert answer.totals.bytes == 1000
        assert sorted(world.scene.reads[:2]) == [("both-0", "/health"), ("both-0", "/metrics")]
        assert len(world.scene.reads) == 4

    tell(story)


def test_an_engine_that_begins_anew_loses_no_bytes_and_makes_no_negative_rate() -> None:
    async def story(world: World) -> None:
        world.scene.count("prefill-0", bytes_pushed_total=9e9)
        await world.look()
        world.scene.count("prefill-0", bytes_pushed_total=500.0)
        answer = await world.look()
        assert answer.totals.bytes == 500
        assert last(answer, "bytes_s") == pytest.approx(500 / 4)

    tell(story)


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        (lambda s: setattr(s, "ready", False) or setattr(s, "why_not", "all pairs are barred"), "critical", "barred"),
        (lambda s: s.finish("timeout"), "critical", "1 request failed in the last minute: timeout 1"),
        (lambda s: setattr(s, "queued", 95), "warning", "queue is nearly full: 95 of 100"),
        (lambda s: setattr(s, "silent_s", 75.0), "warning", "waited 75 s for its first byte"),
        (lambda s: setattr(s, "registry", RegistryView("etcd://e", False, 42.0)), "warning", "last reached 42 s ago"),
        (lambda s: setattr(s, "registry", RegistryView("etcd://e", True, 0.0, {"k": "no JSON"})), "warning", "no JSON"),
        (lambda s: setattr(s, "barred", ("layouts differ",)), "warning", "Barred: layouts differ"),
        (lambda s: s.add("decode-0", state="down", note="out of memory"), "warning", "It says: out of memory"),
        (
            lambda s: s.count("prefill-0", transfers_failed_total=3),
            "warning",
            "2 transfers failed in the last minute: prefill-0 (2)",
        ),
        (
            lambda s: s.count("decode-0", handshakes_refused_total=1),
            "warning",
            "1 handshake refused in the last minute: decode-0 (1)",
        ),
        (lambda s: setattr(s, "retries", 2), "note", "2 requests were tried again"),
        (lambda s: s.add("decode-0", state="draining"), "note", "decode-0 is draining"),
        (lambda s: s.add("decode-0", revision="r2"), "note", "A rollout is in progress: 1 of r1, 1 of r2"),
        (lambda s: s.count("decode-0", pages_quarantined=6), "note", "6 pages are out of use"),
        (
            lambda s: s.count("decode-0", selection_slots=10, selection_slots_used=10),
            "note",
            "100% of the",
        ),
    ],
)
def test_what_is_wrong_is_said(change: Callable[[Scene], object], level: str, words: str) -> None:
    async def story(world: World) -> None:
        world.scene.add("prefill-0", "prefill", revision="r1")
        world.scene.count("prefill-0", transfers_failed_total=1)
        world.scene.count("decode-0", handshakes_refused_total=0)
        before = await world.look()
        assert (before.level, list(before.findings)) == ("ok", [])
        change(world.scene)
        after = await world.look(times=1)
        assert any(words in line for line in what(after, level)), after.findings
        assert after.level == ("ok" if level == "note" else level)

    tell(story)


def test_what_lasts_keeps_its_beginning_while_its_words_change() -> None:
    async def story(world: World) -> None:
        await world.look()
        world.scene.finish("timeout")
        (first,) = (await world.look()).findings
        world.scene.finish("timeout")
        (second,) = (await world.look(7.0)).findings
        assert (first.since_s, second.since_s) == (0, 7)
        assert first.what != second.what

    tell(story)


def test_the_worst_comes_first() -> None:
    async def story(world: World) -> None:
        await world.look()
        world.scene.add("decode-0", state="draining")
        world.scene.barred = ("layouts differ",)
        world.scene.finish("engine_error")
        answer = await world.look()
        assert [finding.level for finding in answer.findings] == ["critical", "warning", "note"]
        assert answer.headline == "Requests are failing."

    tell(story)


def test_clients_own_errors_are_not_failures() -> None:
    async def story(world: World) -> None:
        await world.look()
        world.scene.finish("refused")
        world.scene.finish("disconnected")
        answer = await world.look()
        assert (answer.level, last(answer, "failed_s")) == ("ok", 0)

    tell(story)


def test_everything_stays_bounded() -> None:
    async def story(world: World) -> None:
        scene = world.scene
        for number in range(MOST_ENGINES + 40):
            scene.add(f"crowd-{number}", note="n" * 5000)
        scene.traffic = [PairView("prefill-0", f"crowd-{number}", 1) for number in range(3 * MOST_PAIRS)]
        scene.traffic += [PairView("prefill-1", f"crowd-{number}", 0, "x" * 5000) for number in range(3 * MOST_PAIRS)]
        scene.silent.update(view.engine for view in scene.engines)
        await world.look()
        assert len({engine for engine, _ in scene.reads}) == MOST_ENGINES
        answer = await world.look()
        assert len(answer.engines) <= MOST_ENGINES
        assert (len(answer.pairs), len(answer.barred)) == (MOST_PAIRS, MOST_PAIRS)
        assert len(answer.findings) <= 60
        assert len(msgspec.json.encode(answer)) < 1_500_000
        scene.engines = scene.engines[-3:]
        scene.silent.clear()
        scene.traffic = scene.traffic[:3]
        await world.look(KEEP_S + 1)
        for _ in range(MOST_LOOKS + 50):
            world.clock.now += 1.0
            await world.sampler.look()
        answer = await world.look()
        assert len(answer.rows) <= MOST_LOOKS
        assert len(answer.engines) <= 4
        assert max(len(row.states) for row in answer.engines) <= STRETCHES
        assert len(world.sampler._records) <= 4
        assert len(world.sampler._since) <= 60

    tell(story)


def test_rows_older_than_what_is_kept_go() -> None:
    async def story(world: World) -> None:
        await world.look()
        answer = await world.look(KEEP_S + 5)
        assert len(answer.rows) == 1

    tell(story)


def test_only_newer_rows_are_sent_unless_the_proxy_is_another() -> None:
    async def story(world: World) -> None:
        answer = await world.look(times=4)
        again = await world.sampler.answer(answer.sequence - 1, answer.boot)
        assert again is not None
        assert len(again.rows) == 1
        other = await world.sampler.answer(answer.sequence - 1, "another life")
        assert other is not None
        assert len(other.rows) == 4

    tell(story)


def test_the_pace_follows_whoever_watches() -> None:
    async def story(world: World) -> None:
        assert world.sampler.every_s == ALONE_S
        await world.look()
        assert world.sampler.every_s == sampler_module.WATCHED_S
        world.clock.now += sampler_module.WATCHER_S + 1
        assert world.sampler.every_s == ALONE_S
        for number in range(200):
            world.scene.add(f"crowd-{number}")
        await world.look()
        assert world.sampler.every_s == pytest.approx(202 * sampler_module.PER_ENGINE_S)

    tell(story)


def test_an_engine_that_hangs_holds_a_look_up_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "READ_S", 0.05)

    async def story(world: World) -> None:
        async def read(engine: str, path: str) -> bytes | None:
            if engine == "decode-0":
                await asyncio.sleep(3600)
            return b"vllm:num_requests_running 3"

        monkeypatch.setattr(world.scene, "read", read)
        async with asyncio.timeout(5):
            answer = await world.look(times=2)
        assert world.engine(answer, "decode-0").state == "unreachable"
        assert world.engine(answer, "prefill-0").running == 3

    tell(story)


def test_a_look_that_fails_is_logged_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sampler_module, "WATCHED_S", 0.01)
    monkeypatch.setattr(sampler_module, "ALONE_S", 0.01)

    async def story(world: World) -> None:
        real, failures = world.scene.state, 5

        def state() -> ProxyState:
            nonlocal failures
            if failures:
                failures -= 1
                raise ValueError("a view that is broken")
            return real()

        monkeypatch.setattr(world.scene, "state", state)
        async with asyncio.timeout(5), world.sampler.running():
            while await world.sampler.answer() is None:
                pass
        assert failures == 0

    tell(story)
    assert sum("the dashboard could not look" in record.message for record in caplog.records) == 1


def test_a_page_that_is_just_opened_gets_what_is_so_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "ALONE_S", 3600.0)
    monkeypatch.setattr(sampler_module, "WATCHED_S", 3600.0)

    async def story(world: World) -> None:
        async with asyncio.timeout(20), world.sampler.running():
            await asyncio.sleep(0)  # it waits, and would for an hour
            assert await world.sampler.answer() is not None
            world.clock.now += 100  # nobody watches any more
            world.scene.add("decode-9")
            answer = await world.sampler.answer()
            assert answer is not None
            assert "decode-9" in [row.engine for row in answer.engines]

    tell(story)


def served(scene: Scene, *requests: str, headers: dict[str, str] | None = None) -> list[httpx.Response]:
    """Return what the routes answer, with a sampler that runs."""

    async def ask() -> list[httpx.Response]:
        app = FastAPI()
        sampler = add_dashboard(app, scene)
        transport = httpx.ASGITransport(app=app)
        async with sampler.running(), httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            return [await client.get(path, headers=headers) for path in requests]

    return asyncio.run(ask())


def test_the_page_fetches_nothing_and_allows_only_its_own_script() -> None:
    (page,) = served(Scene(), "/dashboard")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert "unsafe" not in page.headers["content-security-policy"]
    for name in ("script", "style"):
        (text,) = re.findall(rf"<{name}>(.*?)</{name}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{name}-src"] == f"'sha256-{digest}'"
        assert len(text) > 5000
    assert policy["frame-ancestors"] == "'none'"
    addresses = set(re.findall(r"(?:https?:)?//[a-z][\w.-]+\.[a-z]+[\w/.]*", page.text))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "a namespace is a name, not an address that is asked"
    assert not re.search(r"\b(?:src|srcset|@import|url\()\s*[=(]?\s*[\"']?(?!#tide)\w", page.text)
    assert not re.search(r"\son[a-z]+=|style=", page.text), "the policy forbids both"


def test_the_script_never_makes_markup_of_text() -> None:
    (page,) = served(Scene(), "/dashboard")
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "DOMParser"):
        assert way not in page.text


def test_every_file_of_the_page_is_in_it_and_goes_with_the_package() -> None:
    folder = Path(page_module.__file__).with_name("static")
    there = {path.name for path in folder.iterdir()}
    assert there == {"index.html", *page_module.SCRIPTS, *page_module.STYLES}
    tracked = subprocess.run(["git", "ls-files", folder], cwd=folder, capture_output=True, text=True, check=True)
    assert {Path(line).name for line in tracked.stdout.splitlines()} == there, "what git ignores is not in a wheel"


def test_names_of_others_stay_within_their_json_strings() -> None:
    scene = Scene()
    evil = '</script><img src=x onerror="alert(1)">\u2028'
    scene.add(evil, note=evil, node=evil, revision=evil)
    (data,) = served(scene, "/dashboard/data")
    assert data.headers["content-type"] == "application/json"
    assert data.headers["x-content-type-options"] == "nosniff"
    (row,) = json.loads(data.content)["engines"]
    assert row["engine"] == evil


@pytest.mark.parametrize("since", ["", "-1", "x", "1e9", "9" * 400, "٣", "1;2", "%00"])
def test_odd_questions_get_all_rows(since: str) -> None:
    (data,) = served(Scene(), f"/dashboard/data?since={since}&boot=")
    assert data.status_code == 200
    assert len(data.json()["rows"]) == 1


def test_data_is_neither_kept_nor_read_by_other_sites() -> None:
    (data,) = served(Scene(), "/dashboard/data", headers={"origin": "http://evil.example"})
    assert data.headers["cache-control"] == "no-store"
    assert data.headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in data.headers
    assert json.loads(data.content)["headline"] == "No engine is known yet."
