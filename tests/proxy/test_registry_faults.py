# SPDX-License-Identifier: Apache-2.0
"""FR-15 and FR-16 with a real etcd, seen from the proxy's clients: hiccups cost nobody a request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from tests.etcd import EtcdServer, needs_etcd
from tests.proxy.conftest import FakeEngine, Replies, nobody, served
from tests.relay import Relay
from tidal_connector.ids import EngineId, Incarnation, Role
from tidal_connector.proxy.app import build_app
from tidal_connector.proxy.settings import ProxyConfig, Timeouts
from tidal_connector.registry.etcd_store import EtcdStore
from tidal_connector.registry.members import Member, State, announce, peers
from tidal_connector.registry.settings import RegistryConfig, open_store

pytestmark = needs_etcd

TTL_S = 2.0
NAMES = ("p0", "p1", "d0", "d1")


class World:
    """etcd, a relay between it and the proxy, the proxy, four engines, and clients that never stop asking."""

    def __init__(self, etcd: EtcdServer, relay: Relay, client: httpx.AsyncClient) -> None:
        self.etcd = etcd
        self.relay = relay
        self.client = client
        self.engines: dict[str, FakeEngine] = {}
        self.stores: dict[str, EtcdStore] = {}
        self.failed: list[str] = []
        self.done = 0

    async def known(self) -> set[str]:
        """The engines that the proxy takes for ready."""
        text = (await self.client.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("tidal_proxy_engine_state")]
        return {line.split('"')[1] for line in lines if 'state="ready"' in line and line.endswith(" 1.0")}

    async def fresh(self) -> bool:
        return bool((await self.client.get("/ready")).json()["registry"]["fresh"])

    async def until(self, condition: Callable[[], Awaitable[bool]], bound_s: float = 20) -> None:
        async with asyncio.timeout(bound_s):
            while not await condition():
                await asyncio.sleep(0.05)

    async def until_known(self, *names: str) -> None:
        async def same() -> bool:
            return await self.known() == set(names)

        await self.until(same)

    async def ask(self) -> None:
        """Ask for ever; half of the answers are streams."""
        while True:
            answer = await self.client.post("/v1/completions", json={"prompt": "hi", "stream": self.done % 2 == 0})
            whole = answer.text.endswith("data: [DONE]\n\n") or "hello" in answer.text
            if answer.status_code != 200 or not whole:
                self.failed.append(f"{answer.status_code}: {answer.text[:300]}")
            self.done += 1
            await asyncio.sleep(0.005)

    def kill(self, name: str) -> None:
        """End an engine and its supervisor with -9, as far as others can see: its entry is left to its TTL."""
        self.stores[name].die()
        engine = self.engines[name]
        assert engine.server is not None
        engine.server.close()
        for writer in engine.writers:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        etcd = stack.enter_context(EtcdServer(folder))
        relay = stack.enter_context(Relay(etcd.netloc))
        config = RegistryConfig(url=f"etcd://{relay.netloc}", ttl_s=TTL_S)
        app = build_app(
            ProxyConfig(registry=config, timeouts=Timeouts(cooldown_s=0.3, queue_s=20)), nobody, open_store(config)
        )
        client = await stack.enter_async_context(served(app, answer_s=30, end_s=20))
        made = World(etcd, relay, client)
        for name in NAMES:
            engine = made.engines[name] = FakeEngine(Replies.ok_or_stream)
            await stack.enter_async_context(engine.running())
            member = Member(
                engine=EngineId(name),
                role=Role.PREFILL if name[0] == "p" else Role.DECODE,
                state=State.READY,
                http=engine.url,
                incarnation=Incarnation("1"),
            )
            made.stores[name] = EtcdStore(RegistryConfig(url=etcd.url, ttl_s=TTL_S))
            announce(made.stores[name], member, TTL_S)
        await made.until_known(*NAMES)
        asking = [asyncio.create_task(made.ask()) for _ in range(4)]
        try:
            yield made
            before = made.done
            await asyncio.sleep(0.3)
            assert made.done > before, "nothing was served at the end"
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            relay.mend()
            if etcd.process is not None:
                etcd.thaw()
            for store in made.stores.values():
                await asyncio.to_thread(store.close)
        assert made.failed == []


def run(folder: Path, story: Callable[[World], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with world(folder) as made:
            await story(made)

    asyncio.run(asyncio.wait_for(whole(), 100))


@pytest.mark.parametrize("compacted", [False, True])
def test_fr_16_an_engine_dies_while_the_proxys_watch_is_cut(tmp_path: Path, compacted: bool) -> None:
    async def story(made: World) -> None:
        made.relay.cut()
        await made.until(lambda: _not(made.fresh()))
        made.kill("p1")
        with open_store(RegistryConfig(url=made.etcd.url, ttl_s=TTL_S)) as own:

            async def expired() -> bool:
                return "p1" not in (await asyncio.to_thread(peers, own)).engines

            await made.until(expired)
            if compacted:
                await asyncio.to_thread(made.etcd.compact)
            assert await made.known() == set(NAMES), "the last view stands"
            before = made.done
            await asyncio.sleep(0.5)
            assert made.done > before
            made.relay.mend()
            await made.until(made.fresh)

            async def same() -> bool:
                listed = (await asyncio.to_thread(peers, own)).engines
                return await made.known() == set(listed)

            await made.until(same)

    run(tmp_path, story)


@pytest.mark.parametrize("wiped", [False, True])
def test_fr_15_etcd_is_killed_and_comes_back_with_and_without_its_data(tmp_path: Path, wiped: bool) -> None:
    async def story(made: World) -> None:
        await asyncio.to_thread(made.etcd.kill)
        await made.until(lambda: _not(made.fresh()))
        before = made.done
        await asyncio.sleep(TTL_S * 1.2)
        assert made.done > before
        if wiped:
            made.etcd.wipe()
        await asyncio.to_thread(made.etcd.start)
        await made.until(made.fresh)
        await made.until_known(*NAMES)

    run(tmp_path, story)


def test_fr_15_a_frozen_etcd_holds_nobody_up(tmp_path: Path) -> None:
    async def story(made: World) -> None:
        for share in (0.5, 1.1, 2.0):
            made.etcd.freeze()
            before = made.done
            await asyncio.sleep(TTL_S * share)
            assert made.done > before
            made.etcd.thaw()
            await made.until(made.fresh)
            await made.until_known(*NAMES)

    run(tmp_path, story)


async def _not(what: Awaitable[bool]) -> bool:
    return not await what
