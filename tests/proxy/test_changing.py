# SPDX-License-Identifier: Apache-2.0
"""Engines come, drain, die and come back while the proxy serves (FR-15, FR-16): no client may notice.

The registry is real (in memory, with its own threads and leases), engines and clients speak HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx

from tests.proxy.conftest import Behaviour, FakeEngine, Replies, nobody, served
from tidal_connector.ids import EngineId, Incarnation, Role
from tidal_connector.proxy.app import build_app
from tidal_connector.proxy.settings import PolicyKind, ProxyConfig, Timeouts
from tidal_connector.registry.members import Announcement, Member, State, announce
from tidal_connector.registry.memory import MemoryStore, Room
from tidal_connector.registry.settings import RegistryConfig

QUICK = Timeouts(queue_s=5, cooldown_s=0.2, health_s=0.5, inquiry_every_s=0.2)


class Cluster:
    """A registry, a proxy that watches it, and engines that announce themselves by hand."""

    def __init__(self, client: httpx.AsyncClient, room: Room, stack: contextlib.AsyncExitStack) -> None:
        self.client = client
        self.room = room
        self.store = MemoryStore(room)
        self.engines: dict[str, FakeEngine] = {}
        self.entries: dict[str, Announcement] = {}
        self._stack = stack
        self._said: dict[str, Member] = {}

    async def start(self, name: str, behaviour: Behaviour = Replies.ok_or_stream, **said: Any) -> FakeEngine:
        """Start an engine and announce it; its role is the first letter of its name."""
        engine = self.engines[name] = FakeEngine(behaviour)
        await self._stack.enter_async_context(engine.running())
        self.announce(name, http=engine.url, **said)
        await self.seen(name)
        return engine

    def announce(self, name: str, ttl_s: float = 30, **said: Any) -> None:
        role = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}[name[0]]
        fields = {"state": State.READY, "incarnation": Incarnation("1"), **said}
        self._said[name] = Member(engine=EngineId(name), role=role, **fields)
        self.entries[name] = announce(self.store, self._said[name], ttl_s)

    def say(self, name: str, **changed: Any) -> None:
        member = self._said[name] = Member(
            **{**{f: getattr(self._said[name], f) for f in Member.__struct_fields__}, **changed}
        )
        self.entries[name].update(member)

    def die(self, name: str) -> None:
        """End an engine's process, as far as others can see: its port is closed, and so are its connections."""
        server = self.engines[name].server
        assert server is not None
        server.close()
        for writer in self.engines[name].writers:
            writer.close()

    async def gone(self, name: str) -> None:
        await asyncio.to_thread(self.entries.pop(name).withdraw)
        await self.until(lambda text: f'tidal_proxy_engine_state{{engine="{name}"' not in text)

    async def seen(self, name: str, state: str = "ready") -> None:
        """Wait until the proxy knows an engine in a state."""
        line = f'engine="{name}",role="{"decode" if name[0] == "d" else "prefill"}",state="{state}"}} 1.0'
        await self.until(lambda text: line in text)

    async def until(self, good: Callable[[str], bool]) -> str:
        for _ in range(500):
            text = (await self.client.get("/metrics")).text
            if good(text):
                return text
            await asyncio.sleep(0.01)
        raise AssertionError(f"the awaited state did not come: {text}")

    async def post(self, **body: Any) -> httpx.Response:
        headers = body.pop("headers", {})
        return await self.client.post("/v1/completions", json={"prompt": "hi", **body}, headers=headers)

    def counts(self, *names: str) -> list[int]:
        return [len(self.engines[name].requests) for name in names]


def number(text: str, name: str) -> float:
    return float(next(line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(name)))


@contextlib.asynccontextmanager
async def cluster(config: ProxyConfig) -> AsyncIterator[Cluster]:
    async with contextlib.AsyncExitStack() as stack:
        room = Room()
        client = await stack.enter_async_context(served(build_app(config, nobody, MemoryStore(room))))
        made = Cluster(client, room, stack)
        try:
            yield made
            text = await made.until(lambda text: number(text, "tidal_proxy_in_flight ") == 0)
            assert number(text, "tidal_proxy_queued ") == 0
            open_claims = [line for line in text.splitlines() if line.startswith("tidal_proxy_outstanding")]
            assert [line for line in open_claims if not line.endswith(" 0.0")] == []
        finally:
            room.mend()
            await asyncio.to_thread(made.store.close)


def run(story: Callable[[Cluster], Awaitable[None]], timeouts: Timeouts = QUICK, **config: Any) -> None:
    async def whole() -> None:
        async with cluster(ProxyConfig(registry=RegistryConfig(url="memory:"), timeouts=timeouts, **config)) as made:
            await story(made)

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_engines_join_and_leave_without_a_restart() -> None:
    async def story(made: Cluster) -> None:
        ready = await made.client.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["why"].startswith("no prefill engine is ready and no decode engine is ready")
        await made.start("p0")
        await made.start("d0")
        assert (await made.client.get("/ready")).status_code == 200
        assert (await made.post()).status_code == 200
        await made.start("d1")
        for _ in range(4):
            assert (await made.post()).status_code == 200
        assert made.counts("d0", "d1")[1] >= 2
        await made.gone("d0")
        before = made.counts("d0")
        for _ in range(4):
            assert (await made.post()).status_code == 200
        assert made.counts("d0") == before

    run(story)


def test_only_ready_engines_get_requests_and_one_that_drains_finishes_what_it_has() -> None:
    async def story(made: Cluster) -> None:
        release = asyncio.Event()
        await made.start("p0")
        await made.start("d0", Replies.after(release, Replies.stream))
        for state in ("starting", "down"):
            name = f"d-{state}"
            made.engines[name] = FakeEngine(Replies.ok)
            made.announce(name, http="http://127.0.0.1:1", state=State(state))
            await made.seen(name, state)
        running = asyncio.create_task(made.post(stream=True))
        while not made.engines["d0"].requests:
            await asyncio.sleep(0.01)
        made.say("d0", state=State.DRAINING)
        await made.seen("d0", "draining")
        assert (await made.client.get("/ready")).json()["why"] == (
            "no decode engine is ready (d-down: down, d-starting: starting, d0: draining)"
        )
        await made.start("d1")
        assert (await made.post()).status_code == 200
        assert made.counts("d0", "d1") == [1, 1]
        release.set()
        assert (await running).text.endswith("data: [DONE]\n\n")

    run(story)


def test_layouts_in_the_registry_bar_pairs_and_a_request_waits_for_one_that_fits() -> None:
    async def story(made: Cluster) -> None:
        await made.start("p0", layout="new")
        await made.start("d0", layout="old")
        waiting = asyncio.create_task(made.post())
        await made.until(lambda text: number(text, "tidal_proxy_queued ") == 1)
        assert number((await made.client.get("/metrics")).text, "tidal_proxy_barred_pairs ") == 1
        why = (await made.client.get("/ready")).json()["why"]
        assert why.startswith("prefill engine 'p0' and decode engine 'd0' do not fit: layout fingerprint new at 'p0'")
        await made.start("d1", layout="new")
        assert (await waiting).status_code == 200
        assert made.counts("d0", "d1") == [0, 1]

    run(story)


def test_fr_16_a_dead_engine_is_not_chosen_again_although_the_registry_lists_it() -> None:
    async def story(made: Cluster) -> None:
        for name in ("p0", "p1", "d0", "d1"):
            await made.start(name, Replies.waiting_for("p0", Replies.ok) if name[0] == "d" else Replies.ok)
        made.die("p0")
        for _ in range(12):
            assert (await made.post()).status_code == 200
        text = (await made.client.get("/metrics")).text
        assert 'tidal_proxy_engine_reachable{engine="p0",role="prefill"} 0.0' in text
        assert number(text, 'tidal_proxy_leg_failures_total{engine="p0",role="prefill"}') == 1
        assert number(text, "tidal_proxy_retries_total") == 1
        await made.seen("p0")  # the registry says that it is ready, all the while

    run(story, timeouts=Timeouts(cooldown_s=30))


def test_an_engine_out_of_reach_is_back_when_it_answers_or_begins_a_new_life() -> None:
    async def story(made: Cluster) -> None:
        await made.start("p0")
        await made.start("d0", Replies.waiting_for("none", Replies.ok))
        engine = made.engines["p0"]
        made.die("p0")
        request = asyncio.create_task(made.post())
        await made.until(lambda text: 'tidal_proxy_engine_reachable{engine="p0",role="prefill"} 0.0' in text)
        why = (await made.client.get("/ready")).json()["why"]
        assert why == "no prefill engine is reachable (p0: out of reach)"
        engine.server = await asyncio.start_server(engine._connection, "127.0.0.1", engine.port)
        assert (await request).status_code == 200  # asked for its health, it answered, and the request went on

        made.die("p0")
        request = asyncio.create_task(made.post())
        await made.until(lambda text: 'tidal_proxy_engine_reachable{engine="p0",role="prefill"} 0.0' in text)
        other = made.engines["p0b"] = FakeEngine(Replies.ok)
        async with other.running():
            made.say("p0", http=other.url, incarnation=Incarnation("2"))
            assert (await request).status_code == 200
            assert len(other.requests) == 1

    run(story)


def test_requests_wait_while_all_engines_restart() -> None:
    async def story(made: Cluster) -> None:
        await made.start("p0")
        await made.start("d0")
        for name in ("p0", "d0"):
            await made.gone(name)
        requests = [asyncio.create_task(made.post(stream=index % 2 == 0)) for index in range(20)]
        await made.until(lambda text: number(text, "tidal_proxy_queued ") == 20)
        await made.start("d1")
        await made.start("p1")
        assert {(await request).status_code for request in requests} == {200}

    run(story)


def test_a_wait_in_vain_ends_in_503_that_says_for_what() -> None:
    async def story(made: Cluster) -> None:
        await made.start("p0")
        began = time.monotonic()
        answer = await made.post()
        assert 0.3 <= time.monotonic() - began < 3
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "no decode engine is ready"
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-request-id"]

    run(story, timeouts=Timeouts(queue_s=0.3))


def test_fr_15_while_the_registry_is_lost_the_last_view_serves_and_it_is_said() -> None:
    async def story(made: Cluster) -> None:
        await made.start("p0")
        await made.start("d0")
        made.room.cut()
        await made.until(lambda text: number(text, "tidal_proxy_registry_fresh") == 0)
        for _ in range(5):
            assert (await made.post()).status_code == 200
        ready = (await made.client.get("/ready")).json()
        assert ready["ready"]
        assert (ready["registry"]["fresh"], ready["registry"]["url"]) == (False, "memory:")
        await asyncio.sleep(0.05)
        health = (await made.client.get("/health")).json()
        assert health["status"] == "ok"
        assert health["registry"]["age_s"] > 0.04
        made.room.mend()
        await made.until(lambda text: number(text, "tidal_proxy_registry_fresh") == 1)
        await made.start("d1")

    run(story)


def test_fr_15_a_registry_that_lost_its_data_is_waited_for() -> None:
    async def story(made: Cluster) -> None:
        await made.start("p0", ttl_s=1)
        await made.start("d0", ttl_s=1)
        stop, failed, done = asyncio.Event(), [], 0

        async def ask() -> None:
            nonlocal done
            while not stop.is_set():
                answer = await made.post()
                done += 1
                if answer.status_code != 200:
                    failed.append(answer.text)

        askers = [asyncio.create_task(ask()) for _ in range(4)]
        made.room.wipe()
        for name in ("p0", "d0"):  # their holders put them back by themselves; the other side of the proxy sees both
            assert await asyncio.to_thread(made.entries[name].wait, 20)
        await made.seen("d0")
        stop.set()
        await asyncio.gather(*askers)
        assert failed == []
        assert done > 0

    run(story, timeouts=Timeouts(queue_s=20))


def test_an_attempt_on_an_engine_that_is_down_or_lives_anew_goes_elsewhere_at_once() -> None:
    async def story(made: Cluster) -> None:
        for change in ({"state": State.DOWN}, {"incarnation": Incarnation("2")}):
            await made.start("p0", Replies.hang)
            await made.start("d0", Replies.waiting_for("p0", Replies.ok))
            request = asyncio.create_task(made.post())
            while not made.engines["p0"].requests:
                await asyncio.sleep(0.01)
            await made.start("p1")
            began = time.monotonic()
            made.say("p0", **change)
            assert (await request).status_code == 200
            assert time.monotonic() - began < 3
            transfers = [seen.transfer for seen in made.engines["d0"].requests]
            assert len(set(transfers)) == len(transfers) == 2
            for name in ("p0", "p1", "d0"):
                await made.gone(name)

    run(story)


def test_an_engine_that_left_the_registry_is_given_up_only_if_it_does_not_answer() -> None:
    async def story(made: Cluster) -> None:
        release = asyncio.Event()
        await made.start("p0", Replies.after(release, Replies.ok))
        await made.start("d0", Replies.after(release, Replies.ok))
        request = asyncio.create_task(made.post())
        while not made.engines["p0"].requests or not made.engines["d0"].requests:
            await asyncio.sleep(0.01)
        await made.gone("p0")  # a lease may run out for no fault of the engine's
        await asyncio.sleep(0.3)
        release.set()
        assert (await request).status_code == 200
        assert made.counts("p0", "d0") == [1, 1]

        await made.start("p1", Replies.hang)
        made.engines["d0"].behaviour = Replies.waiting_for("p1", Replies.ok)
        request = asyncio.create_task(made.post())
        while not made.engines["p1"].requests:
            await asyncio.sleep(0.01)
        await made.start("p2")
        frozen = made.engines["p1"]
        assert frozen.server is not None
        frozen.server.close()  # open connections stay, new ones are refused: dead for all that a proxy can see
        await made.gone("p1")
        assert (await request).status_code == 200
        assert made.counts("p2") == [1]

    run(story)


def test_engines_of_both_roles_are_paired_with_each_other_and_never_with_themselves() -> None:
    async def story(made: Cluster) -> None:
        await made.start("b0")
        await made.until(lambda text: number(text, "tidal_proxy_barred_pairs ") == 1)
        assert "cannot push to itself" in (await made.client.get("/ready")).json()["why"]
        await made.start("b1")
        for _ in range(4):
            assert (await made.post()).status_code == 200
        pairs = {
            (seen.body["kv_transfer_params"].get("prefill_engine"), name)
            for name in ("b0", "b1")
            for seen in made.engines[name].requests
            if seen.body["kv_transfer_params"]["role"] == "decode"
        }
        assert pairs <= {("b0", "b1"), ("b1", "b0")}

    run(story)


def test_a_full_queue_answers_429_and_says_when_to_come_again() -> None:
    async def story(made: Cluster) -> None:
        release = asyncio.Event()
        await made.start("p0")
        await made.start("d0", Replies.after(release, Replies.ok))
        inside = [asyncio.create_task(made.post()) for _ in range(2)]
        await made.until(lambda text: number(text, "tidal_proxy_in_flight ") == 2)
        waiting = [asyncio.create_task(made.post()) for _ in range(3)]
        await made.until(lambda text: number(text, "tidal_proxy_queued ") == 3)
        refused = await made.post()
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert made.counts("d0") == [2]
        release.set()
        assert {(await request).status_code for request in (*inside, *waiting)} == {200}
        text = (await made.client.get("/metrics")).text
        assert number(text, 'tidal_proxy_requests_total{outcome="queue_full"}') == 1

    run(story, max_in_flight=2, max_queue=3)


def test_a_client_that_leaves_the_queue_frees_its_place() -> None:
    async def story(made: Cluster) -> None:
        request = asyncio.create_task(made.post())
        await made.until(lambda text: number(text, "tidal_proxy_queued ") == 1)
        request.cancel()
        await made.until(lambda text: number(text, "tidal_proxy_queued ") == 0)
        text = (await made.client.get("/metrics")).text
        assert number(text, 'tidal_proxy_requests_total{outcome="disconnected"}') == 1

    run(story)


def test_the_clients_own_deadline_covers_waiting_prefill_and_streams() -> None:
    async def story(made: Cluster) -> None:
        soon = {"x-request-timeout": "0.3"}
        answer = await made.post(headers=soon)
        assert answer.status_code == 504
        assert answer.json()["error"]["message"] == "the request was not answered within its 0.3 s"
        await made.start("p0")
        hanging = await made.start("d0", Replies.hang)
        answer = await made.post(headers=soon)
        assert answer.json()["error"]["message"] == "the request was not answered within its 0.3 s"
        while not hanging.requests[0].cut:
            await asyncio.sleep(0.01)
        hanging.behaviour = Replies.stream_then_hang
        text = (await made.post(stream=True, headers=soon)).text
        assert "the request took longer than its 0.3 s" in text
        assert text.endswith("data: [DONE]\n\n")
        for wrong in ("0", "-1", "soon", "nan", "inf"):
            answer = await made.post(headers={"x-request-timeout": wrong})
            assert answer.status_code == 400
            assert "expected seconds" in answer.json()["error"]["message"]
        found = (await made.client.get("/metrics")).text
        assert number(found, 'tidal_proxy_requests_total{outcome="timeout"}') == 3

    run(story)


def test_prefixes_stick_to_a_decode_engine_and_leave_it_when_it_dies() -> None:
    async def story(made: Cluster) -> None:
        await made.start("p0")
        for name in ("d0", "d1", "d2"):
            await made.start(name)
        for _ in range(6):
            assert (await made.post(prompt="You are a helpful assistant. " * 50)).status_code == 200
        counts = made.counts("d0", "d1", "d2")
        assert sorted(counts) == [0, 0, 6]
        pinned = f"d{counts.index(6)}"
        made.die(pinned)
        for _ in range(6):
            assert (await made.post(prompt="You are a helpful assistant. " * 50)).status_code == 200
        left = [count for name, count in zip(("d0", "d1", "d2"), made.counts("d0", "d1", "d2"), strict=True)
                if name != pinned]  # fmt: skip
        assert sorted(left) == [0, 6]

    run(story, policy=PolicyKind.PREFIX_AFFINITY)


def test_models_are_the_union_of_what_ready_decode_engines_serve() -> None:
    async def story(made: Cluster) -> None:
        assert (await made.client.get("/v1/models")).json() == {"object": "list", "data": []}
        for name in ("d0", "d1", "d2"):
            await made.start(name)
        made.engines["d1"].models = b'{"data": [{"id": "m"}, {"id": "other"}]}'
        made.engines["d2"].models = b"not json"
        made.say("d0", state=State.DRAINING)
        await made.seen("d0", "draining")
        found = (await made.client.get("/v1/models")).json()
        assert [model["id"] for model in found["data"]] == ["m", "other"]

    run(story)


def test_a_request_goes_to_engines_that_announce_its_model() -> None:
    async def story(made: Cluster) -> None:
        for name, model in (("p0", "big"), ("d0", "big"), ("p1", "small"), ("d1", "small")):
            await made.start(name, model=model)
        for _ in range(4):
            assert (await made.post(model="small")).status_code == 200
        assert made.counts("p0", "d0", "p1", "d1") == [0, 0, 4, 4]
        assert (await made.post(model="adapter-of-one-of-them")).status_code == 200

    run(story)


def test_several_proxies_serve_the_same_engines() -> None:
    async def story(made: Cluster) -> None:
        await made.start("p0")
        await made.start("d0")
        await made.start("d1")
        config = ProxyConfig(registry=RegistryConfig(url="memory:"), timeouts=QUICK)
        app = build_app(config, nobody, MemoryStore(made.room))
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://other", timeout=20) as second,
        ):
            for _ in range(200):
                if (await second.get("/ready")).status_code == 200:
                    break
                await asyncio.sleep(0.01)
            answers = await asyncio.gather(
                *(made.post() for _ in range(10)),
                *(second.post("/v1/completions", json={"prompt": "hi"}) for _ in range(10)),
            )
            assert {answer.status_code for answer in answers} == {200}
        assert made.counts("p0") == [20]
        assert sum(made.counts("d0", "d1")) == 20

    run(story)


def test_another_attempt_takes_another_engine_even_one_with_more_to_do() -> None:
    async def story(made: Cluster) -> None:
        release = asyncio.Event()
        await made.start("p0", Replies.after(release, Replies.ok))
        await made.start("d0", Replies.after(release, Replies.ok))
        busy = asyncio.create_task(made.post(prompt=[1] * 5000))
        while not made.engines["p0"].requests:
            await asyncio.sleep(0.01)
        made.engines["p0"].behaviour = made.engines["d0"].behaviour = Replies.ok
        await made.start("p1", Replies.status(500))
        made.engines["d0"].behaviour = Replies.waiting_for("p1", Replies.ok)
        assert (await made.post()).status_code == 200
        assert made.counts("p0", "p1") == [2, 1]
        release.set()
        assert (await busy).status_code == 200

    run(story)
