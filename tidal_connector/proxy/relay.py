# SPDX-License-Identifier: Apache-2.0
"""One client request, from its turn in line to its last byte: attempts until one answers, and what the client gets.

Rules:

* A request waits for a slot, and for engines that can serve it, ``queue_s`` at most; where as many wait as may, it
  gets 429.
* Each attempt has a fresh transfer id. A 4xx is never tried again; a lost connection or a 5xx is, as long as
  the client has not got a byte, on other engines where there are any.
* The decode engine's answer is the client's answer, status, content type and bytes.
* All of it, waiting included, has one deadline: ``request_s``, or less where the client says so.
* Whatever ends a request (answer, error, bound, client gone) cancels what still runs and closes every claim.

Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from tidal_connector.log import get_logger
from tidal_connector.proxy.attempt import Attempts, end
from tidal_connector.proxy.engines import Answer, Failure, error_body, holds_error_event, refusal
from tidal_connector.proxy.gate import Gate, QueueFull, WaitedInVain
from tidal_connector.proxy.legs import ClientRequest, engine_request_id
from tidal_connector.proxy.meters import Meters, Outcome
from tidal_connector.proxy.picker import Picked, Picker, avoid_nothing
from tidal_connector.proxy.settings import ProxyConfig
from tidal_connector.proxy.story import Story
from tidal_connector.proxy.survey import Survey
from tidal_connector.proxy.wire import WireError

_log = get_logger(__name__)

_MOST_ATTEMPTS = 32  # of one request, also where engines come and go faster than they can be reached

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]


class _Stuck(Exception):
    """The client is there and takes nothing."""


class Relay:
    """Runs client requests.

    Args:
        config: bounds and counts.
        gate: slots and line.
        picker: chooses engines.
        attempts: runs them.
        survey: says why nothing fits.
        meters: counts.
    """

    def __init__(
        self,
        config: ProxyConfig,
        gate: Gate[Picked],
        picker: Picker,
        attempts: Attempts,
        survey: Survey,
        meters: Meters,
    ) -> None:
        self._config = config
        self._gate = gate
        self._picker = picker
        self._attempts = attempts
        self._survey = survey
        self._meters = meters
        self._silent: dict[Story, None] = {}

    @property
    def silent_s(self) -> float:
        """How long the request that waits longest for its first byte has waited; 0 where none waits."""
        oldest = next(iter(self._silent), None)
        return 0.0 if oldest is None else time.monotonic() - oldest.started

    async def serve(self, request: ClientRequest, receive: Receive, send: Send) -> None:
        """Answer one client; return when it has the last byte or is gone, with nothing of the request left
        behind.

        Args:
            request: the checked request.
            receive, send: the ASGI channel, its request body already read.
        """
        complete = False

        async def watched_send(message: Message) -> None:
            nonlocal complete
            complete = message["type"] == "http.response.body" and not message["more_body"]
            try:
                async with asyncio.timeout(self._config.timeouts.stall_s):
                    await send(message)
            except TimeoutError:  # not to be taken for the engine's
                raise _Stuck from None

        story = Story(engine_request_id(request.request_id), time.monotonic())
        self._silent[story] = None
        work = asyncio.create_task(self._answer(request, watched_send, story))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if complete:  # the server reports the end of the response as a disconnect, too
                await asyncio.wait((work,))
            try:
                story.outcome = work.result() if work.done() else Outcome.DISCONNECTED
            except _Stuck:
                story.outcome = Outcome.DISCONNECTED
        finally:
            await end(work, gone)
            self._silent.pop(story, None)
            self._meters.finished(story.finish(time.monotonic()))
            _log.info("request %s", story)

    async def _answer(self, request: ClientRequest, send: Send, story: Story) -> Outcome:
        bounds = self._config.timeouts
        deadline = story.started + min(bounds.request_s, request.timeout_s or bounds.request_s)
        avoid = avoid_nothing()
        want = self._picker.want(request)

        def take() -> Picked | None:
            return self._picker.pick(request, want, avoid)

        try:
            picked = await self._gate.enter(take, self._patience(story, deadline))
        except QueueFull:
            how = refusal(429, "the proxy's queue is full; come again later", self._gate.retry_after_s())
            return await self._refuse(send, story, how, Outcome.QUEUE_FULL)
        except WaitedInVain:
            return await self._waited(send, story, deadline, None)
        began = time.monotonic()
        story.queued_s = began - story.started
        outcome = None
        try:
            retries_left = self._config.retries
            while True:
                story.begin(picked.prefill.engine, picked.decode.engine)
                async with self._attempts.run(request, story.attempt_id, picked, deadline) as result:
                    if isinstance(result, Answer):
                        outcome = await self._deliver(result, send, story, deadline)
                        return outcome
                    failed = result
                how, engine = failed.how, failed.engine
                _log.warning(
                    "request %s: %s engine %s: %d %s", story.id, engine.side, engine.engine, how.status, _line(how.body)
                )
                if how.status == HTTPStatus.GATEWAY_TIMEOUT and time.monotonic() >= deadline:
                    how = _too_late(story, deadline)
                free = how.unreachable and story.attempts < _MOST_ATTEMPTS
                free = free and time.monotonic() < story.started + bounds.queue_s
                if not how.retryable or not (retries_left or free):
                    break
                retries_left -= not free
                avoid[engine.side].append(engine.engine)
                self._meters.retried()
                waited = time.monotonic()
                try:
                    picked = await self._gate.again(take, self._patience(story, deadline))
                except WaitedInVain:
                    return await self._waited(send, story, deadline, how)
                story.queued_s += time.monotonic() - waited
            return await self._refuse(send, story, how, _outcome_of(how))
        finally:
            # What was cut short or refused says nothing of how long a request takes.
            self._gate.leave(time.monotonic() - began if outcome is Outcome.OK else None)

    def _patience(self, story: Story, deadline: float) -> float:
        """Return the seconds for which a request may wait for engines.

        Where all engines come from the file and those that are there do not fit, waiting mends nothing.
        """
        now = time.monotonic()
        if self._config.registry is None and self._survey.nothing_fits:
            return 0.0
        return max(0.0, min(story.started + self._config.timeouts.queue_s, deadline) - now)

    async def _waited(self, send: Send, story: Story, deadline: float, last: Failure | None) -> Outcome:
        """Tell the client that it has waited in vain, and for what."""
        now = time.monotonic()
        story.queued_s = now - story.started
        if now >= deadline:
            return await self._refuse(send, story, _too_late(story, deadline), Outcome.TIMEOUT)
        why = self._picker.why_none(self._survey.nothing_fits)
        if not why:
            how = refusal(429, "all slots of the proxy are taken; come again later", self._gate.retry_after_s())
            return await self._refuse(send, story, how, Outcome.QUEUE_FULL)
        if last is not None:
            why += f"; last: {_line(last.body)}"
        how = refusal(503, why, max(1, round(self._config.timeouts.cooldown_s)))
        return await self._refuse(send, story, how, Outcome.UNPAIRED)

    async def _refuse(self, send: Send, story: Story, how: Failure, outcome: Outcome) -> Outcome:
        story.why = _line(how.body)
        await send_whole(send, how.status, how.headers | {"x-request-id": story.id}, how.body)
        return outcome

    async def _deliver(self, answer: Answer, send: Send, story: Story, deadline: float) -> Outcome:
        story.first_byte(time.monotonic())
        self._silent.pop(story, None)
        headers = answer.headers | {"x-request-id": story.id}
        if not answer.streams:
            await send_whole(send, answer.status, headers, answer.first)
            return Outcome.OK
        await send_start(send, answer.status, headers)
        outcome = Outcome.OK
        bounds = self._config.timeouts
        end_at = min(deadline, story.started + story.queued_s + bounds.decode_s)
        piece, last = answer.first, b""
        try:
            while piece:
                story.events(piece, time.monotonic())
                if holds_error_event(piece):
                    outcome = Outcome.STREAM_ERROR
                await send_piece(send, piece)
                last = piece
                left = min(bounds.stall_s, end_at - time.monotonic())
                async with asyncio.timeout(left):
                    piece = await answer.piece()
        except TimeoutError:
            outcome = Outcome.TIMEOUT
            if left < bounds.stall_s:
                story.why = f"the request took longer than its {end_at - story.started:.3g} s"
            else:
                story.why = f"decode engine sent nothing for {left:.3g} s"
            await _send_error_event(send, last, 504, story.why)
        except WireError as error:
            outcome = Outcome.STREAM_ERROR
            story.why = f"decode engine broke off: {error}"
            await _send_error_event(send, last, 502, story.why)
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


async def _send_error_event(send: Send, last: bytes, status: int, message: str) -> None:
    """End a broken stream so that the client's parser sees an error and an end."""
    gap = b"" if last.endswith(b"\n\n") else b"\n\n"
    await send_piece(send, gap + b"data: " + error_body(status, message) + b"\n\ndata: [DONE]\n\n")


def _outcome_of(how: Failure) -> Outcome:
    if how.status == HTTPStatus.GATEWAY_TIMEOUT:
        return Outcome.TIMEOUT
    if HTTPStatus.BAD_REQUEST <= how.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return Outcome.REFUSED
    return Outcome.ENGINE_ERROR


def _too_late(story: Story, deadline: float) -> Failure:
    return refusal(504, f"the request was not answered within its {deadline - story.started:.3g} s")


def _line(body: bytes) -> str:
    """Return an engine's or the proxy's own error as one bounded line for the log."""
    text = body[:4096].decode("utf-8", "replace")
    _, found, rest = text.partition('"message":')
    shown = rest.strip().lstrip('"').split('","', 1)[0].split('", "', 1)[0] if found else text
    return " ".join(shown.split())[:300]


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
