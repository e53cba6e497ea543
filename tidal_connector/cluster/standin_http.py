# SPDX-License-Identifier: Apache-2.0
"""The half of an engine stand-in that clients see: vLLM's routes, its streams, and the metrics that others read.

Takes requests as vLLM's server does, hands their hand-overs to :class:`~.standin_rooms.Rooms`, and answers what
:mod:`.standin_answers` says. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tidal_connector.cluster.standin_answers import answer_length, answer_token, digest, prompt_tokens
from tidal_connector.cluster.standin_rooms import PAGE_TOKENS, PAGES, Rooms
from tidal_connector.config import TidalConfig
from tidal_connector.errors import ParamsError, TidalError
from tidal_connector.ids import EngineId, RequestId, Role
from tidal_connector.metrics import COUNTERS, Counters
from tidal_connector.vllm_plugin.params import DecodeLeg, Leg, PrefillLeg, parse_params, sequential_answer

Body = dict[str, Any]

_SLOTS = 4096  # rows of its selection cache that a request takes
_GONE = 499  # what nginx calls a client that left; nobody reads it


class Manner(msgspec.Struct, frozen=True):
    """How a stand-in behaves.

    Attributes:
        model: name under which it serves.
        only_model: a request that names another one gets 404, as from vLLM.
        token_ms: milliseconds per answered token.
        prefill_ms: milliseconds that a prompt takes.
        max_seqs: requests that run at once; further ones wait.
        ready: False answers everything with 503, for ever.
        recompute: serve a request whose KV did not arrive all the same, as vLLM's policy of that name does.
        fail_rate: share of the requests that get 500.
        wrong_rate: share of the answers with one wrong token: proves that whoever compares finds it.
        seed: of the two rates.
    """

    model: str = "tidal"
    only_model: bool = False
    token_ms: float = 0.0
    prefill_ms: float = 0.0
    max_seqs: int = 256
    ready: bool = True
    recompute: bool = False
    fail_rate: float = 0.0
    wrong_rate: float = 0.0
    seed: int = 0


class UnknownModel(TidalError):
    """A request that names a model that is not served: 404."""


class Failed(TidalError):
    """A request that ends with 500."""


class Job(msgspec.Struct, frozen=True):
    """One request, read.

    Attributes:
        name: request id.
        chat: it came to the chat route.
        tokens: of its prompt.
        prompt: their digest.
        length: tokens to answer.
        wrong: position of the token that is answered wrongly; -1 for none.
        leg: its part in a hand-over; None where it is served alone.
    """

    name: RequestId
    chat: bool
    tokens: tuple[int, ...]
    prompt: str
    length: int
    wrong: int
    leg: Leg | None


class Server:
    """The routes of one stand-in.

    Args:
        engine: the operator's name.
        role: decides which legs are refused.
        manner: how it behaves.
        rooms: the hand-overs.
        counters: shown under ``/metrics``.
    """

    def __init__(self, engine: EngineId, role: Role, manner: Manner, rooms: Rooms, counters: Counters) -> None:
        self._engine = engine
        self._role = role
        self._manner = manner
        self._rooms = rooms
        self._counters = counters
        self._chance = random.Random(manner.seed)
        self._seats = asyncio.Semaphore(manner.max_seqs)
        self._waiting = 0
        self._running = 0
        self._pages_used = 0
        self._totals = {"prompt_tokens": 0, "generation_tokens": 0, "request_success": 0}
        if role is not Role.PREFILL:
            counters.set("pool_pages", PAGES)
            counters.set("selection_slots", _SLOTS * manner.max_seqs)
        counters.set("kv_layers", 2)

    def app(self) -> Starlette:
        """Return the ASGI application."""
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/metrics", self._metrics),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._completions, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    # --- routes

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self._manner.ready else 503)

    async def _models(self, request: Request) -> Response:
        model = {"id": self._manner.model, "object": "model", "owned_by": "standin", "max_model_len": 131072}
        return JSONResponse({"object": "list", "data": [model]})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self._series(), media_type="text/plain; version=0.0.4")

    async def _completions(self, request: Request) -> Response:
        if not self._manner.ready:
            return _error(503, "this stand-in never becomes ready")
        try:
            body, job = self._read(request, await request.body())
        except ParamsError as error:
            return _error(400, str(error))
        except UnknownModel as error:
            return _error(404, str(error))
        if self._chance.random() < self._manner.fail_rate:
            return _error(500, "this stand-in fails a share of its requests (--fail-rate)")
        if body.get("stream") is True:
            usage = (body.get("stream_options") or {}).get("include_usage") is True
            return StreamingResponse(self._stream(job, usage), media_type="text/event-stream")
        try:
            answer = await _unless_left(request, self._whole(job))
        except Failed as error:
            return _error(500, str(error))
        return Response(status_code=_GONE) if answer is None else JSONResponse(answer)

    # --- a request

    def _read(self, request: Request, raw: bytes) -> tuple[Body, Job]:
        try:
            body = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise ParamsError(f"request body: {error}") from None
        if not isinstance(body, dict):
            raise ParamsError("request body: expected an object")
        model = body.get("model")
        if self._manner.only_model and model not in (None, "", self._manner.model):
            raise UnknownModel(f"The model `{model}` does not exist.")
        role, length = self._role, answer_length(body)
        leg = parse_params(
            body.get("kv_transfer_params"),
            TidalConfig(),
            producer=role is not Role.DECODE,
            consumer=role is not Role.PREFILL,
        )
        wrong = self._chance.randrange(length) if self._chance.random() < self._manner.wrong_rate else -1
        name = RequestId(f"{request.headers.get('x-request-id', 'req')}-{secrets.token_hex(4)}")
        tokens = prompt_tokens(body)
        if len(tokens) > PAGES * PAGE_TOKENS:
            raise ParamsError(f"prompt of {len(tokens)} tokens: expected at most {PAGES * PAGE_TOKENS}")
        return body, Job(name, "chat" in request.url.path, tokens, digest(tokens), length, wrong, leg)

    async def _whole(self, job: Job) -> Body:
        async with self._seat(job):
            extra = await self._kv(job)
            await asyncio.sleep(job.length * self._manner.token_ms / 1000)
            text = "".join(self._token(job, position) for position in range(job.length))
            self._count(job)
        content = {"message": {"role": "assistant", "content": text}} if job.chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
        return self._chunk(job, "", [choice]) | {"usage": _usage(job), "kv_transfer_params": extra}

    async def _stream(self, job: Job, usage: bool) -> AsyncIterator[bytes]:
        try:
            async with self._seat(job):
                await self._kv(job)
                for position in range(job.length):
                    if self._manner.token_ms:
                        await asyncio.sleep(self._manner.token_ms / 1000)
                    text = self._token(job, position)
                    content = {"delta": {"content": text}} if job.chat else {"text": text}
                    last = "length" if position == job.length - 1 else None
                    choice = {"index": 0, **content, "logprobs": None, "finish_reason": last}
                    yield _event(self._chunk(job, ".chunk", [choice]))
                if usage:
                    yield _event(self._chunk(job, ".chunk", []) | {"usage": _usage(job)})
                self._count(job)
        except Failed as error:
            yield _event(_error_body(500, str(error)))
        yield b"data: [DONE]\n\n"

    @contextlib.asynccontextmanager
    async def _seat(self, job: Job) -> AsyncIterator[None]:
        self._waiting += 1
        try:
            await self._seats.acquire()
        finally:
            self._waiting -= 1
        pages = -(-(len(job.tokens) + job.length) // PAGE_TOKENS)
        self._running += 1
        self._pages_used += pages
        try:
            yield
        finally:
            self._running -= 1
            self._pages_used -= pages
            self._seats.release()

    async def _kv(self, job: Job) -> Body | None:
        """Do a request's part of a hand-over; return what a sequential proxy hands on.

        Raises:
            Failed: its KV did not arrive.
        """
        leg = job.leg
        if isinstance(leg, DecodeLeg):
            reason = await self._rooms.receive(job.name, leg.transfer, leg.engine, leg.control, job.tokens)
            if not reason:
                return None
            if not self._manner.recompute:
                raise Failed(f"the KV of transfer {leg.transfer} did not arrive from engine {leg.engine!r}: {reason}")
        sent = self._rooms.begin(job.name, leg.transfer, job.tokens) if isinstance(leg, PrefillLeg) else None
        try:
            await asyncio.sleep(self._manner.prefill_ms / 1000)
        except asyncio.CancelledError:
            if sent is not None:
                self._rooms.abandon(sent, "the client left")
            raise
        if sent is None:
            return None
        self._rooms.complete(sent)
        assert isinstance(leg, PrefillLeg)
        if not leg.sequential:
            return None
        return sequential_answer(sent.transfer, self._engine, self._rooms.control, time.time() + self._rooms.hold_s)

    def _token(self, job: Job, position: int) -> str:
        return " wrong" if position == job.wrong else answer_token(job.prompt, position)

    def _chunk(self, job: Job, suffix: str, choices: list[Body]) -> Body:
        kind = "chat.completion" if job.chat else "text_completion"
        kind += suffix if job.chat else ""
        return {
            "id": f"cmpl-{job.name}",
            "object": kind,
            "created": int(time.time()),
            "model": self._manner.model,
            "choices": choices,
        }

    def _count(self, job: Job) -> None:
        self._totals["prompt_tokens"] += len(job.tokens)
        self._totals["generation_tokens"] += job.length
        self._totals["request_success"] += 1
        if self._role is not Role.PREFILL:  # what a warm selection cache shows: most of each step's rows are there
            self._counters.add("selection_hits", 90.0 * job.length)
            self._counters.add("selection_misses", 10.0 * job.length)

    # --- metrics

    def _series(self) -> str:
        if self._role is not Role.PREFILL:
            self._counters.set("pool_pages_used", self._pages_used)
            self._counters.set("selection_slots_used", _SLOTS * self._running)
        label = f'{{engine="0",model_name="{self._manner.model}"}}'
        return "\n".join(f"{name}{label} {value:.10g}" for name, value in self._values()) + "\n"

    def _values(self) -> Iterator[tuple[str, float]]:
        yield "vllm:num_requests_running", self._running
        yield "vllm:num_requests_waiting", self._waiting
        yield "vllm:kv_cache_usage_perc", self._pages_used / PAGES
        for name, value in self._totals.items():
            yield f"vllm:{name}_total", value
        for name, number in self._counters.snapshot().items():
            yield f"tidal:{name}_total" if name in COUNTERS else f"tidal:{name}", number


async def _unless_left(request: Request, work: Awaitable[Body]) -> Body | None:
    """Return what the work returns; None, and the work cancelled, where the client leaves first."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for item in (task, left):
            item.cancel()
        with contextlib.suppress(asyncio.CancelledError, Failed):
            await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _usage(job: Job) -> Body:
    prompt = len(job.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": job.length, "total_tokens": prompt + job.length}


def _event(value: Body) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _error_body(status: int, message: str) -> Body:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": status}}


def _error(status: int, message: str) -> Response:
    return JSONResponse(_error_body(status, message), status)
