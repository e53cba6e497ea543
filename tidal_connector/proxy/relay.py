# SPDX-License-Identifier: Apache-2.0
"""One client request, from dispatch to its last byte: both legs at once, one verdict, nothing left behind.

Rules:

* Only engines that fit are paired; where none do, the client gets 503 and the reason.
* Each attempt has a fresh transfer id. A 4xx is never tried again; a lost connection or a 5xx is, as long as
  the client has not got a byte.
* The decode engine's answer is the client's answer, status, content type and bytes. Before it has begun, the
  first failure of either leg ends both.
* Whatever ends a request (answer, error, bound, client gone) cancels what still runs and closes every claim.

Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import httpx
import msgspec

from tidal_connector.ids import new_transfer_id
from tidal_connector.log import get_logger
from tidal_connector.proxy.engines import (
    Answer,
    Failure,
    error_body,
    failure,
    holds_error_event,
    run_leg,
)
from tidal_connector.proxy.legs import Body, ClientRequest, decode_body, engine_request_id, prefill_body
from tidal_connector.proxy.meters import Meters, Outcome
from tidal_connector.proxy.policy import Ledger, Pair, choose_pair
from tidal_connector.proxy.settings import Decode, Prefill, ProxyConfig
from tidal_connector.proxy.survey import Survey

_log = get_logger(__name__)

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]


class _Failed(msgspec.Struct, frozen=True):
    """A failed attempt, and which engine it failed on."""

    role: str
    engine: str
    how: Failure


class _Stuck(Exception):
    """The client is there and takes nothing."""


class Relay:
    """Runs client requests against the configured engines."""

    def __init__(self, config: ProxyConfig, client: httpx.AsyncClient, survey: Survey) -> None:
        self._config = config
        self._client = client
        self._survey = survey
        self._prefill = {item.engine: item for item in config.prefill}
        self._decode = {item.engine: item for item in config.decode}
        self.prefill = Ledger(list(self._prefill))
        self.decode = Ledger(list(self._decode))
        self.meters = Meters(self.prefill, self.decode)

    async def serve(self, request: ClientRequest, receive: Receive, send: Send) -> None:
        """Answer one client; return when it has the last byte or is gone, with nothing of the request left
        behind.

        Args:
            request: the checked request.
            receive, send: the ASGI channel, its request body already read.
        """
        started = time.monotonic()
        self.meters.in_flight.inc()
        complete = False

        async def watched_send(message: Message) -> None:
            nonlocal complete
            complete = message["type"] == "http.response.body" and not message["more_body"]
            try:
                async with asyncio.timeout(self._config.timeouts.stall_s):
                    await send(message)
            except TimeoutError:  # not to be taken for the engine's
                raise _Stuck from None

        work = asyncio.create_task(self._answer(request, watched_send, started))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if complete:  # the server reports the end of the response as a disconnect, too
                await asyncio.wait((work,))
            try:
                outcome = work.result() if work.done() else Outcome.DISCONNECTED
            except _Stuck:
                outcome = Outcome.DISCONNECTED
            self.meters.requests.labels(outcome).inc()
        finally:
            await _end(work, gone)
            self.meters.in_flight.dec()
            self.meters.request_seconds.observe(time.monotonic() - started)

    async def _answer(self, request: ClientRequest, send: Send, started: float) -> Outcome:
        request_id = engine_request_id(request.request_id)
        avoid: dict[str, list[str]] = {"prefill": [], "decode": []}
        for attempts_left in range(self._config.retries, -1, -1):
            failed_on = (avoid["prefill"], avoid["decode"])
            pair = choose_pair(self.prefill, self.decode, time.monotonic(), failed_on, self._survey.barred)
            if pair is None:
                how = refusal(503, self._survey.nothing_fits)
                await send_whole(send, how.status, how.headers | {"x-request-id": request_id}, how.body)
                return Outcome.UNPAIRED
            async with self._attempt(request, request_id, pair) as result:
                if isinstance(result, Answer):
                    self.meters.first_byte_seconds.observe(time.monotonic() - started)
                    return await self._deliver(result, send, request_id, started)
                failed = result
            how = failed.how
            _log.warning("request %s: %s engine %s: %d", request_id, failed.role, failed.engine, how.status)
            if not (attempts_left and how.retryable):
                break
            avoid[failed.role].append(failed.engine)
            request_id = engine_request_id(request.request_id)
            self.meters.retries.inc()
        await send_whole(send, how.status, how.headers | {"x-request-id": request_id}, how.body)
        return _outcome_of(how)

    @contextlib.asynccontextmanager
    async def _attempt(self, request: ClientRequest, request_id: str, pair: Pair) -> AsyncIterator[Answer | _Failed]:
        """Dispatch both legs; yield the first verdict; end both legs on the way out."""
        now = time.monotonic()
        prefill, decode = self._prefill[pair[0]], self._decode[pair[1]]
        transfer = new_transfer_id()
        headers = request.headers | {"x-request-id": request_id}
        prefill_claim = self.prefill.claim(prefill.engine, request.prompt_tokens)
        decode_claim = self.decode.claim(decode.engine, request.prompt_tokens + request.answer_tokens)
        self.meters.attempts.inc()
        bounds = self._config.timeouts
        prefill_leg = self._dispatch(
            prefill, request.path, prefill_body(request, transfer, decode.engine), headers, bounds.prefill_s
        )
        prefill_leg.add_done_callback(lambda _: prefill_claim.close())
        decode_leg = self._dispatch(
            decode, request.path, decode_body(request, transfer, prefill), headers, bounds.decode_s
        )
        try:
            yield await self._verdict(prefill_leg, decode_leg, prefill.engine, decode.engine, now)
        finally:
            decode_claim.close()
            await _end(prefill_leg, decode_leg)

    def _dispatch(
        self, engine: Prefill | Decode, path: str, body: Body, headers: dict[str, str], bound_s: float
    ) -> asyncio.Task[Answer | Failure]:
        url = engine.url.rstrip("/") + path
        leg = run_leg(self._client, url, body, headers, bound_s=bound_s, engine=engine.engine)
        return asyncio.create_task(leg)

    async def _verdict(
        self,
        prefill_leg: asyncio.Task[Answer | Failure],
        decode_leg: asyncio.Task[Answer | Failure],
        prefill: str,
        decode: str,
        started: float,
    ) -> Answer | _Failed:
        waiting: set[asyncio.Task[Answer | Failure]] = {prefill_leg, decode_leg}
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if decode_leg in done and isinstance(answer := decode_leg.result(), Answer):
                self.decode.reached(decode)
                return answer
            failed = []
            for role, engine, leg in (("prefill", prefill, prefill_leg), ("decode", decode, decode_leg)):
                if leg in done and isinstance(how := leg.result(), Failure):
                    failed.append(self._note_failure(role, engine, how))
            if failed:
                return min(failed, key=lambda item: item.how.retryable)
            self.prefill.reached(prefill)
            self.meters.prefill_seconds.observe(time.monotonic() - started)

    def _note_failure(self, role: str, engine: str, how: Failure) -> _Failed:
        self.meters.leg_failures.labels(role, engine).inc()
        if how.unreachable:
            ledger = self.prefill if role == "prefill" else self.decode
            ledger.unreachable(engine, time.monotonic() + self._config.timeouts.cooldown_s)
        return _Failed(role, engine, how)

    async def _deliver(self, answer: Answer, send: Send, request_id: str, started: float) -> Outcome:
        headers = answer.headers | {"x-request-id": request_id}
        if answer.rest is None:
            await send_whole(send, answer.status, headers, answer.first)
            return Outcome.OK
        await send_start(send, answer.status, headers)
        await send_piece(send, answer.first)
        outcome = Outcome.STREAM_ERROR if holds_error_event(answer.first) else Outcome.OK
        last = answer.first
        bounds = self._config.timeouts
        try:
            while True:
                left = min(bounds.stall_s, started + bounds.decode_s - time.monotonic())
                async with asyncio.timeout(left):
                    piece = await anext(answer.rest, None)
                if piece is None:
                    break
                if holds_error_event(piece):
                    outcome = Outcome.STREAM_ERROR
                await send_piece(send, piece)
                last = piece
        except TimeoutError:
            outcome = Outcome.TIMEOUT
            await _send_error_event(send, last, 504, f"decode engine sent nothing for {left:g} s")
        except httpx.TransportError as error:
            outcome = Outcome.STREAM_ERROR
            await _send_error_event(send, last, 502, f"decode engine broke off: {error or type(error).__name__}")
        await send_piece(send, b"", more=False)
        return outcome


async def send_whole(send: Send, status: int, headers: dict[str, str], body: bytes) -> None:
    """Send a complete response."""
    await send_start(send, status, headers | {"content-length": str(len(body))})
    await send_piece(send, body, more=False)


async def send_start(send: Send, status: int, headers: dict[str, str]) -> None:
    """Send status and headers."""
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def send_piece(send: Send, piece: bytes, more: bool = True) -> None:
    """Send a piece of the body."""
    await send({"type": "http.response.body", "body": piece, "more_body": more})


def refusal(status: int, message: str) -> Failure:
    """Return what the proxy answers on its own."""
    return failure(status, message, retryable=False)


async def _send_error_event(send: Send, last: bytes, status: int, message: str) -> None:
    """End a broken stream so that the client's parser sees an error and an end."""
    gap = b"" if last.endswith(b"\n\n") else b"\n\n"
    await send_piece(send, gap + b"data: " + error_body(status, message) + b"\n\ndata: [DONE]\n\n")


def _outcome_of(how: Failure) -> Outcome:
    if how.status == httpx.codes.GATEWAY_TIMEOUT:
        return Outcome.TIMEOUT
    if httpx.codes.BAD_REQUEST <= how.status < httpx.codes.INTERNAL_SERVER_ERROR:
        return Outcome.REFUSED
    return Outcome.ENGINE_ERROR


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what still runs, wait for it, and close answers that nobody has taken to the end.

    The client may leave while this runs; the closing goes on to its end all the same.
    """
    for task in tasks:
        task.cancel()
    closing = asyncio.create_task(_close(tasks))
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await closing
        raise


async def _close(tasks: Sequence[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and task.exception() is None and isinstance(task.result(), Answer):
            with contextlib.suppress(httpx.TransportError):
                await task.result().close()
