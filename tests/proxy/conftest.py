# SPDX-License-Identifier: Apache-2.0
"""A bed for the proxy: fake engines that answer as told, byte by byte, and the real proxy under a real HTTP
server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from tidal_connector.errors import PeerLost
from tidal_connector.proxy.app import build_app
from tidal_connector.proxy.settings import Decode, Prefill, ProxyConfig, Timeouts
from tidal_connector.proxy.survey import Ask

OK_JSON = json.dumps({"id": "cmpl-1", "choices": [{"text": "hello"}], "kv_transfer_params": None}).encode()
EVENTS = [b'data: {"choices": [{"text": "%d"}]}\n\n' % i for i in range(3)] + [b"data: [DONE]\n\n"]


@dataclass
class Seen:
    """A request as the engine saw it."""

    path: str
    headers: dict[str, str]
    body: Any
    cut: bool = False
    """The proxy closed the connection before the answer was complete."""

    @property
    def transfer(self) -> str:
        return str(self.body["kv_transfer_params"]["transfer_id"])


Behaviour = Callable[["Wire"], Awaitable[None]]


@dataclass
class Wire:
    """What a behaviour writes to."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    seen: Seen

    async def reply(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\n{extra}content-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def start_stream(self) -> None:
        self.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await self.writer.drain()

    async def piece(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    async def end_stream(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def hang(self) -> None:
        """Wait until the proxy closes the connection."""
        if await self.reader.read(1) == b"":
            self.seen.cut = True
            raise ConnectionResetError


@dataclass
class FakeEngine:
    """An engine that does what its behaviour says; the health check is answered on its own."""

    behaviour: Behaviour
    healthy: bool = True
    requests: list[Seen] = field(default_factory=list)
    models: bytes = b'{"data": [{"id": "m"}]}'
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    port: int = 0
    server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            self.server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                path = head[0].split()[1]
                seen = Seen(path, headers, json.loads(raw) if raw else None)
                wire = Wire(reader, writer, seen)
                if path == "/health":
                    await wire.reply(200 if self.healthy else 503, b"")
                elif path == "/metrics":
                    await wire.reply(404, b"")
                elif path == "/v1/models":
                    await wire.reply(200, self.models)
                else:
                    self.requests.append(seen)
                    await self.behaviour(wire)
        writer.close()


class Replies:
    """Behaviours of engines."""

    @staticmethod
    async def ok(wire: Wire) -> None:
        await wire.reply(200, OK_JSON)

    @staticmethod
    async def stream(wire: Wire) -> None:
        await wire.start_stream()
        for event in EVENTS:
            await wire.piece(event)
        await wire.end_stream()

    @staticmethod
    async def ok_or_stream(wire: Wire) -> None:
        await (Replies.stream if wire.seen.body.get("stream") else Replies.ok)(wire)

    @staticmethod
    async def hang(wire: Wire) -> None:
        await wire.hang()

    @staticmethod
    async def close(wire: Wire) -> None:
        raise ConnectionResetError

    @staticmethod
    async def half_chunk(wire: Wire) -> None:
        await wire.start_stream()
        await wire.piece(EVENTS[0])
        wire.writer.write(b"50\r\ndata: {")
        await wire.writer.drain()
        raise ConnectionResetError

    @staticmethod
    async def invalid_sse(wire: Wire) -> None:
        await wire.start_stream()
        await wire.piece(b"\x00not an event\n")
        await wire.end_stream()

    @staticmethod
    async def stream_then_error(wire: Wire) -> None:
        await wire.start_stream()
        await wire.piece(EVENTS[0])
        await wire.piece(b'data: {"error": {"message": "engine died", "code": 500}}\n\n')
        await wire.piece(EVENTS[-1])
        await wire.end_stream()

    @staticmethod
    async def error_event(wire: Wire) -> None:
        await wire.start_stream()
        await wire.piece(b'data: {"error": {"message": "transfer failed", "code": 500}}\n\n')
        await wire.piece(EVENTS[-1])
        await wire.end_stream()

    @staticmethod
    async def stream_then_hang(wire: Wire) -> None:
        await wire.start_stream()
        await wire.piece(EVENTS[0])
        await wire.hang()

    @staticmethod
    def status(code: int, body: bytes = b'{"error": {"message": "no"}}', kind: str = "application/json") -> Behaviour:
        async def behaviour(wire: Wire) -> None:
            await wire.reply(code, body, kind)

        return behaviour

    @staticmethod
    def after(event: asyncio.Event, behaviour: Behaviour) -> Behaviour:
        async def waiting(wire: Wire) -> None:
            await event.wait()
            await behaviour(wire)

        return waiting

    @staticmethod
    def waiting_for(prefill: str, behaviour: Behaviour) -> Behaviour:
        """Hang while the named prefill engine was to send the KV."""

        async def either(wire: Wire) -> None:
            lost = wire.seen.body["kv_transfer_params"]["prefill_engine"] == prefill
            await (wire.hang() if lost else behaviour(wire))

        return either

    @staticmethod
    def in_turn(*behaviours: Behaviour) -> Behaviour:
        left = list(behaviours)

        async def behaviour(wire: Wire) -> None:
            await (left.pop(0) if len(left) > 1 else left[0])(wire)

        return behaviour


@dataclass
class Bed:
    """The running proxy with its engines."""

    client: httpx.AsyncClient
    prefill: list[FakeEngine]
    decode: list[FakeEngine]

    async def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        headers = body.pop("headers", {})
        return await self.client.post(path, json={"model": "m", "prompt": "hi", **body}, headers=headers)

    async def metrics(self) -> dict[str, float]:
        lines = (await self.client.get("/metrics")).text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    async def settled(self) -> dict[str, float]:
        """Wait until no request is in flight, check that every claim is closed, return the metrics."""
        for _ in range(500):
            found = await self.metrics()
            if found["tidal_proxy_in_flight"] == 0:
                break
            await asyncio.sleep(0.01)
        assert found["tidal_proxy_in_flight"] == 0
        open_claims = {k: v for k, v in found.items() if k.startswith("tidal_proxy_outstanding_tokens") and v}
        assert open_claims == {}
        return found

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait (bounded) until a condition holds."""
        for _ in range(500):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the awaited condition did not come")


def nobody(address: str, timeout_s: float) -> Any:
    """No engine says who it is."""
    raise PeerLost(f"nobody at {address}")


@contextlib.asynccontextmanager
async def served(app: FastAPI, answer_s: float = 20, end_s: float = 10) -> AsyncIterator[httpx.AsyncClient]:
    """Serve a proxy over HTTP; yield a client of it, which waits so long for an answer."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="on", ws="none"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=answer_s, trust_env=False) as client:
            yield client
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, end_s)


@contextlib.asynccontextmanager
async def open_bed(
    prefill: list[Behaviour],
    decode: list[Behaviour],
    timeouts: Timeouts,
    retries: int,
    ask: Ask,
    **more: Any,
) -> AsyncIterator[Bed]:
    sides = [[FakeEngine(item) for item in prefill], [FakeEngine(item) for item in decode]]
    async with contextlib.AsyncExitStack() as stack:
        for engine in (*sides[0], *sides[1]):
            await stack.enter_async_context(engine.running())
        config = ProxyConfig(
            prefill=tuple(Prefill(f"p{i}", item.url, f"127.0.0.1:{7000 + i}") for i, item in enumerate(sides[0])),
            decode=tuple(Decode(f"d{i}", item.url, f"127.0.0.1:{7100 + i}") for i, item in enumerate(sides[1])),
            timeouts=timeouts,
            retries=retries,
            **more,
        )
        yield Bed(await stack.enter_async_context(served(build_app(config, ask))), *sides)


Scenario = Callable[[Bed], Awaitable[None]]


@pytest.fixture
def replies() -> type[Replies]:
    return Replies


@pytest.fixture
def run_bed() -> Callable[..., None]:
    """Run a scenario against the proxy and fake engines; afterwards nothing may be in flight."""

    def run(
        scenario: Scenario,
        prefill: list[Behaviour] | None = None,
        decode: list[Behaviour] | None = None,
        timeouts: Timeouts | None = None,
        retries: int = 1,
        ask: Ask = nobody,
        **more: Any,
    ) -> None:
        async def whole() -> None:
            async with open_bed(
                prefill or [Replies.ok], decode or [Replies.ok_or_stream], timeouts or Timeouts(), retries, ask, **more
            ) as bed:
                await scenario(bed)
                await bed.settled()

        asyncio.run(asyncio.wait_for(whole(), 60))

    return run
