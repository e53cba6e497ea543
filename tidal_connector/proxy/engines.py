# SPDX-License-Identifier: Apache-2.0
"""HTTP to the engines: one leg of one attempt, as a value that says how it went.

A leg never raises for what an engine does: it returns an :class:`Answer` or a :class:`Failure`. Cancelling
the task that runs a leg closes its connection, which makes vLLM abort the request. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from tidal_connector.proxy.legs import Body
from tidal_connector.proxy.wire import Client, ConnectFailed, Response, WireError

SSE = "text/event-stream"
JSON = {"content-type": "application/json"}
_KEPT_HEADERS = ("content-type", "retry-after")
_ERROR_EVENT = b'data: {"error"'
_FIXED = ((b"content-type", b"application/json"), (b"accept-encoding", b"identity"))


class Failure(msgspec.Struct, frozen=True):
    """How a leg failed, as the client would see it.

    Attributes:
        status: HTTP status.
        headers: content type, and ``retry-after`` where the engine sent it.
        body: the engine's own text where it sent one.
        retryable: another attempt may succeed: no connection, or 5xx.
        unreachable: the connection could not even be opened.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    retryable: bool
    unreachable: bool = False

    @property
    def refused(self) -> bool:
        """Whether the engine is well and the request is at fault: 4xx, as status or in an error event."""
        return not self.retryable and self.status < HTTPStatus.INTERNAL_SERVER_ERROR


class Answer:
    """An engine's good answer: a whole body, or a stream that has begun.

    Attributes:
        status, headers: as the engine sent them (headers that concern the client only).
        first: the body, or the first piece of the stream.
        streams: whether further pieces may follow.
    """

    __slots__ = ("_response", "first", "headers", "status", "streams")

    def __init__(self, response: Response, first: bytes, streams: bool) -> None:
        self._response = response
        self.status = response.status
        self.headers = kept_headers(response)
        self.first = first
        self.streams = streams

    async def piece(self) -> bytes:
        """Return the next piece of the stream; empty at its end.

        Raises:
            WireError: the engine broke off.
        """
        return await self._response.piece()

    def close(self) -> None:
        """Close the connection if the stream is still open; again does nothing."""
        self._response.close()


async def run_leg(
    client: Client,
    url: str,
    path: str,
    body: Body,
    headers: Mapping[str, str],
    *,
    bound_s: float,
    engine: str,
) -> Answer | Failure:
    """Send one leg and wait for its body, or for the first piece of its stream.

    Args:
        client: to all engines.
        url: the engine's base URL.
        path: route on the engine.
        body: JSON object.
        headers: further request headers.
        bound_s: seconds for all of it.
        engine: what messages call the engine.
    """
    # As the bytes that the client sent: starlette reads them as latin-1.
    raw = [*_FIXED, *((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items())]
    try:
        async with asyncio.timeout(bound_s):
            return await _opened(await client.request("POST", url, path, raw, msgspec.json.encode(body)))
    except TimeoutError:
        return failure(504, f"engine {engine} did not answer within {bound_s:.3g} s", retryable=False)
    except ConnectFailed as error:
        return failure(502, f"engine {engine} cannot be reached: {error}", retryable=True, unreachable=True)
    except WireError as error:
        return failure(502, f"engine {engine} broke off: {error}", retryable=True)


async def _opened(response: Response) -> Answer | Failure:
    good = False
    try:
        if response.status != HTTPStatus.OK or not is_stream(response.headers):
            body = await response.read()
            good = response.status // 100 == 2
            return Answer(response, body, streams=False) if good else _engine_failure(response, body)
        first = await response.piece()
        if first.startswith(_ERROR_EVENT):
            with contextlib.suppress(WireError):  # the error event itself is what counts
                first += await response.read()
            return _engine_failure(response, first)
        good = True
        return Answer(response, first, streams=True)
    finally:
        if not good:
            response.close()


def _engine_failure(response: Response, body: bytes) -> Failure:
    status = response.status
    code = _event_code(body) if status == HTTPStatus.OK else status
    return Failure(status, kept_headers(response), body, retryable=code >= HTTPStatus.INTERNAL_SERVER_ERROR)


def _event_code(body: bytes) -> int:
    """Return the code in an error event; 500 where it holds none."""
    line = body.split(b"\n", 1)[0].removeprefix(b"data:")
    try:
        code = msgspec.json.decode(line)["error"]["code"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return 500
    return code if isinstance(code, int) else 500


async def knock(client: Client, url: str, within_s: float) -> None:
    """Return once an engine answers the question for its health, whatever it says of it: it is there.

    Raises:
        TimeoutError: it took longer.
        ConnectFailed: no connection could be opened.
        WireError: the connection broke.
    """
    async with asyncio.timeout(within_s):
        (await client.request("GET", url, "/health")).close()


def is_stream(headers: Mapping[str, str]) -> bool:
    """Whether an answer is a stream of server-sent events."""
    return headers.get("content-type", "").split(";")[0].strip() == SSE


def holds_error_event(piece: bytes) -> bool:
    """Whether a piece of a stream holds an error event."""
    return piece.startswith(_ERROR_EVENT) or b"\n" + _ERROR_EVENT in piece


def kept_headers(response: Response) -> dict[str, str]:
    """Return the headers of an engine's answer that concern the client."""
    return {name: response.headers[name] for name in _KEPT_HEADERS if name in response.headers}


def error_body(status: int, message: str) -> bytes:
    """Return an error in OpenAI's form, as JSON."""
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def failure(status: int, message: str, retryable: bool, unreachable: bool = False) -> Failure:
    """Return a failure in the proxy's own words."""
    return Failure(status, JSON, error_body(status, message), retryable, unreachable)


def refusal(status: int, message: str, retry_after_s: int | None = None) -> Failure:
    """Return what the proxy answers on its own."""
    later = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
    return Failure(status, JSON | later, error_body(status, message), retryable=False)
