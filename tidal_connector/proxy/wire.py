# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 to the engines over kept connections: what a proxy needs of a client, and nothing that it would pay for.

The parser is httptools (llhttp), which uvicorn uses, too. A request costs less than a tenth of what it costs with
httpx, and headers travel as the bytes that the client sent, in whatever encoding. Cancelling whoever waits for an
answer cuts the connection, by which an engine notices that nobody wants it any more. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple, Self, cast
from urllib.parse import urlsplit

import httptools

_PAUSE_BYTES = 1 << 18  # of an answer that wait to be taken, before the engine is told to pause

Headers = Iterable[tuple[bytes, bytes]]


class WireError(Exception):
    """The connection broke, or what came over it is no HTTP."""


class ConnectFailed(WireError):
    """No connection could be opened: nothing was sent."""


class Origin(NamedTuple):
    """Where connections go."""

    host: str
    port: int
    tls: bool


class Target(NamedTuple):
    """A base URL taken apart."""

    origin: Origin
    host_header: bytes
    path: str


@functools.lru_cache(maxsize=4096)
def target_of(url: str) -> Target:
    """Take a base URL (``http://host:port/prefix``, ``http://[::1]:port``) apart.

    Raises:
        ValueError: it is no HTTP URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r}: expected http://host:port")
    tls = parts.scheme == "https"
    named = parts.hostname.partition("%")[0]  # an IPv6 zone means something on this machine only
    shown = f"[{named}]" if ":" in named else named
    if parts.port is not None:
        shown += f":{parts.port}"
    origin = Origin(parts.hostname, parts.port or (443 if tls else 80), tls)
    return Target(origin, shown.encode("idna" if not shown.isascii() else "ascii"), parts.path.rstrip("/"))


class _Connection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self.closed = False
        self.exchange: _Exchange | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.exchange is None:
            self.cut()  # nobody asked for anything
        else:
            self.exchange.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self.exchange is not None:
            self.exchange.lost(exc)

    def cut(self) -> None:
        """Close at once, whatever is under way."""
        self.closed = True
        if self.expiry is not None:
            self.expiry.cancel()
        if self.transport is not None:
            self.transport.abort()


class _Exchange:
    """One request and its answer, as the parser finds it."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._buffered = 0
        self._paused = False
        self._framed = False
        self.error: WireError | None = None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.pieces: deque[bytes] = deque()
        self.begun = False
        self.done = False
        self.reusable = False

    def feed(self, data: bytes) -> None:
        """Take bytes from the connection."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(WireError(f"its answer is no HTTP: {error or type(error).__name__}"))
        self._wake()

    def lost(self, error: Exception | None) -> None:
        """Take note that the connection is gone."""
        if not self.done:
            if self.begun and not self._framed and error is None:
                self.done = True  # a body without a length ends with its connection
            else:
                closed = "it closed the connection before its answer was complete"
                self._fail(WireError(str(error) if error else closed))
        self._wake()

    def on_message_begin(self) -> None:
        """Parser's callback."""
        if self.done:  # a second answer to one request: whose would the next one be?
            self._fail(WireError("it sent more than one answer"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Parser's callback."""
        text = value.decode("latin-1")
        key = name.decode("latin-1").lower()
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        """Parser's callback."""
        status = self._parser.get_status_code()
        if status < 200:  # 1xx: the answer is still to come
            self.headers.clear()
            return
        self.status = status
        bodiless = status in (204, 304)
        self._framed = bodiless or "content-length" in self.headers or "transfer-encoding" in self.headers
        self.begun = True

    def on_body(self, body: bytes) -> None:
        """Parser's callback."""
        self.pieces.append(body)
        self._buffered += len(body)
        if self._buffered > _PAUSE_BYTES and not self._paused and self._connection.transport is not None:
            self._paused = True
            self._connection.transport.pause_reading()

    def on_message_complete(self) -> None:
        """Parser's callback."""
        if self.begun:
            self.done = True
            self.reusable = self._parser.should_keep_alive()

    async def head(self) -> None:
        """Wait for status and headers."""
        while not self.begun:
            await self._more()

    async def piece(self) -> bytes:
        """Wait for what has come of the body; empty at its end."""
        while not self.pieces:
            if self.done:
                return b""
            await self._more()
        found = self.pieces.popleft() if len(self.pieces) == 1 else b"".join(self.pieces)
        self.pieces.clear()
        self._buffered = 0
        if self._paused and self._connection.transport is not None and not self._connection.closed:
            self._paused = False
            self._connection.transport.resume_reading()
        return found

    async def _more(self) -> None:
        if self.error is not None:
            raise self.error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _fail(self, error: WireError) -> None:
        if self.error is None:
            self.error = error
        self._connection.cut()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Response:
    """An answer whose head has come.

    Attributes:
        status: HTTP status.
        headers: by lower-case name.
    """

    __slots__ = ("_client", "_connection", "_exchange", "_origin", "headers", "status")

    def __init__(self, client: Client, origin: Origin, connection: _Connection, exchange: _Exchange) -> None:
        self._client = client
        self._origin = origin
        self._connection: _Connection | None = connection
        self._exchange = exchange
        self.status = exchange.status
        self.headers = exchange.headers

    async def piece(self) -> bytes:
        """Return what has come of the body; empty at its end.

        Raises:
            WireError: the connection broke.
        """
        found = await self._exchange.piece()
        if not found:
            self.close()
        return found

    async def read(self, limit: int = 1 << 62) -> bytes:
        """Return the rest of the body.

        Raises:
            WireError: the connection broke, or there is more than the limit.
        """
        parts, size = [], 0
        while piece := await self.piece():
            parts.append(piece)
            size += len(piece)
            if size > limit:
                self.close()
                raise WireError(f"its answer is longer than {limit} bytes")
        return b"".join(parts)

    def close(self) -> None:
        """Keep the connection for the next request if the answer was taken to its end; otherwise cut it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._client._release(self._origin, connection, self._exchange)


class Client:
    """Connections to all engines.

    Args:
        connect_s: seconds to open a connection.
        keepalive_s: seconds for which an idle connection is kept.
    """

    def __init__(self, connect_s: float, keepalive_s: float) -> None:
        self._connect_s = connect_s
        self._keepalive_s = keepalive_s
        self._idle: dict[Origin, list[_Connection]] = {}
        self._tls: ssl.SSLContext | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in [item for items in self._idle.values() for item in items]:
            connection.cut()
        self._idle.clear()

    async def request(self, method: str, url: str, path: str, headers: Headers = (), body: bytes = b"") -> Response:
        """Send a request and wait for the head of its answer.

        Args:
            method: such as ``POST``.
            url: base URL of the server.
            path: behind the base URL.
            headers: further headers; names and values hold no line breaks.
            body: whole body.

        Raises:
            ConnectFailed: no connection could be opened.
            WireError: the connection broke.
        """
        target = target_of(url)
        lines = [f"{method} {target.path}{path} HTTP/1.1".encode("ascii"), b"host: " + target.host_header]
        lines += [name + b": " + value for name, value in headers]
        lines.append(b"content-length: %d\r\n\r\n" % len(body))
        connection = self._kept(target.origin) or await self._open(target.origin)
        exchange = connection.exchange = _Exchange(connection)
        try:
            assert connection.transport is not None
            connection.transport.write(b"\r\n".join(lines) + body)
            await exchange.head()
        except BaseException:
            connection.exchange = None
            connection.cut()
            raise
        return Response(self, target.origin, connection, exchange)

    def _kept(self, origin: Origin) -> _Connection | None:
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.expiry is not None:
                connection.expiry.cancel()
                connection.expiry = None
            if not connection.closed and connection.transport is not None and not connection.transport.is_closing():
                return connection
        return None

    async def _open(self, origin: Origin) -> _Connection:
        loop = asyncio.get_running_loop()
        context = None
        if origin.tls:
            context = self._tls = self._tls or ssl.create_default_context()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(_Connection, origin.host, origin.port, ssl=context)
        except TimeoutError:
            raise ConnectFailed(f"no connection within {self._connect_s:g} s") from None
        except OSError as error:  # ssl.SSLError is one, too
            raise ConnectFailed(error.strerror or str(error) or type(error).__name__) from None
        except UnicodeError:
            raise ConnectFailed(f"{origin.host!r} is no host name") from None
        return connection

    def _release(self, origin: Origin, connection: _Connection, exchange: _Exchange) -> None:
        connection.exchange = None
        if not exchange.done or not exchange.reusable or connection.closed or exchange.pieces:
            connection.cut()
            return
        connection.expiry = asyncio.get_running_loop().call_later(self._keepalive_s, self._expire, origin, connection)
        self._idle.setdefault(origin, []).append(connection)

    def _expire(self, origin: Origin, connection: _Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._idle[origin].remove(connection)
            if not self._idle[origin]:
                del self._idle[origin]
        connection.cut()
