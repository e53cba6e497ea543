# SPDX-License-Identifier: Apache-2.0
"""HTTP to the engines: one leg of one attempt, as a value that says how it went.

A leg never raises for what an engine does: it returns an :class:`Answer` or a :class:`Failure`. Cancelling
the task that runs a leg closes its connection, which makes vLLM abort the request. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping

import httpx
import msgspec

from tidal_connector.proxy.legs import Body
from tidal_connector.proxy.settings import Timeouts

Pieces = AsyncGenerator[bytes, None]

SSE = "text/event-stream"
_KEPT_HEADERS = ("content-type", "retry-after")
_ERROR_EVENT = b'data: {"error"'


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


class Answer:
    """An engine's good answer: a whole body, or a stream that has begun.

    Attributes:
        status, headers: as the engine sent them (headers that concern the client only).
        first: the body, or the first piece of the stream.
        rest: the following pieces; None where ``first`` is all.
    """

    __slots__ = ("_response", "first", "headers", "rest", "status")

    def __init__(self, response: httpx.Response, first: bytes, rest: AsyncGenerator[bytes, None] | None) -> None:
        self._response = response
        self.status = response.status_code
        self.headers = kept_headers(response)
        self.first = first
        self.rest = rest

    async def close(self) -> None:
        """Close the connection if the stream is still open; again does nothing."""
        if self.rest is not None:
            await self.rest.aclose()
        await self._response.aclose()


def open_client(timeouts: Timeouts) -> httpx.AsyncClient:
    """Return the client for all legs; reading has no bound of its own because each leg has one as a whole."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(timeouts.connect_s, read=None),
        limits=httpx.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=timeouts.keepalive_s
        ),
        trust_env=False,
    )


async def run_leg(
    client: httpx.AsyncClient,
    url: str,
    body: Body,
    headers: Mapping[str, str],
    *,
    bound_s: float,
    engine: str,
) -> Answer | Failure:
    """Send one leg and wait for its body, or for the first piece of its stream.

    Args:
        client: from :func:`open_client`.
        url: full URL.
        body: JSON object.
        headers: further request headers.
        bound_s: seconds for all of it.
        engine: what messages call the engine.
    """
    try:
        async with asyncio.timeout(bound_s):
            fixed = {"content-type": "application/json", "accept-encoding": "identity"}
            request = client.build_request(
                "POST",
                url,
                content=msgspec.json.encode(body),
                # As the bytes that the client sent: httpx would refuse any text beyond ASCII.
                headers={name.encode(): value.encode("latin-1") for name, value in {**headers, **fixed}.items()},
            )
            return await _opened(await client.send(request, stream=True))
    except TimeoutError:
        return failure(504, f"engine {engine} did not answer within {bound_s:g} s", retryable=False)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        return failure(502, f"engine {engine} cannot be reached: {error}", retryable=True, unreachable=True)
    except httpx.TransportError as error:
        return failure(502, f"engine {engine} broke off: {name_of(error)}", retryable=True)


async def _opened(response: httpx.Response) -> Answer | Failure:
    good = False
    try:
        if response.status_code != httpx.codes.OK or not is_stream(response.headers):
            body = await response.aread()
            good = response.is_success
            return Answer(response, body, None) if good else _engine_failure(response, body)
        pieces = _pieces(response)
        first = await anext(pieces, b"")
        if first.startswith(_ERROR_EVENT):
            with contextlib.suppress(httpx.TransportError):  # the error event itself is what counts
                async for piece in pieces:
                    first += piece
            return _engine_failure(response, first)
        good = True
        return Answer(response, first, pieces)
    finally:
        if not good:
            await response.aclose()


async def _pieces(response: httpx.Response) -> Pieces:
    async for piece in response.aiter_raw():
        yield piece


def _engine_failure(response: httpx.Response, body: bytes) -> Failure:
    status = response.status_code
    code = _event_code(body) if status == httpx.codes.OK else status
    return Failure(status, kept_headers(response), body, retryable=code >= httpx.codes.INTERNAL_SERVER_ERROR)


def _event_code(body: bytes) -> int:
    """Return the code in an error event; 500 where it holds none."""
    line = body.split(b"\n", 1)[0].removeprefix(b"data:")
    try:
        code = msgspec.json.decode(line)["error"]["code"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return 500
    return code if isinstance(code, int) else 500


def name_of(error: Exception) -> str:
    """Return an error's text, or its kind where it has none."""
    return str(error) or type(error).__name__


def is_stream(headers: Mapping[str, str]) -> bool:
    """Whether an answer is a stream of server-sent events."""
    return headers.get("content-type", "").split(";")[0].strip() == SSE


def holds_error_event(piece: bytes) -> bool:
    """Whether a piece of a stream holds an error event."""
    return piece.startswith(_ERROR_EVENT) or b"\n" + _ERROR_EVENT in piece


def kept_headers(response: httpx.Response) -> dict[str, str]:
    """Return the headers of an engine's answer that concern the client."""
    return {name: response.headers[name] for name in _KEPT_HEADERS if name in response.headers}


def error_body(status: int, message: str) -> bytes:
    """Return an error in OpenAI's form, as JSON."""
    kind = "invalid_request_error" if status < httpx.codes.INTERNAL_SERVER_ERROR else "server_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def failure(status: int, message: str, retryable: bool, unreachable: bool = False) -> Failure:
    """Return a failure in the proxy's own words."""
    return Failure(status, {"content-type": "application/json"}, error_body(status, message), retryable, unreachable)
