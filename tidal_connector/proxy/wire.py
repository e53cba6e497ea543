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
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from tidal_connector.proxy.exchange import ConnectFailed, Connection, Exchange, WireError

Headers = Iterable[tuple[bytes, bytes]]


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


class Response:
    """An answer whose head has come.

    Attributes:
        status: HTTP status.
        headers: by lower-case name.
    """

    __slots__ = ("_client", "_connection", "_exchange", "_origin", "headers", "status")

    def __init__(self, client: Client, origin: Origin, connection: Connection, exchange: Exchange) -> None:
        self._client = client
        self._origin = origin
        self._connection: Connection | None = connection
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
        self._idle: dict[Origin, list[Connection]] = {}
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
        exchange = connection.exchange = Exchange(connection)
        try:
            assert connection.transport is not None
            connection.transport.write(b"\r\n".join(lines) + body)
            await exchange.head()
        except BaseException:
            connection.exchange = None
            exchange.end()
            connection.cut()
            raise
        return Response(self, target.origin, connection, exchange)

    async def get(self, url: str, path: str, within_s: float, most_bytes: int) -> tuple[int, bytes]:
        """Ask for something; return the status and the whole body of the answer.

        Args:
            url: base URL of the server.
            path: behind the base URL.
            within_s: seconds for all of it.
            most_bytes: of the body.

        Raises:
            TimeoutError: it took longer.
            ConnectFailed: no connection could be opened.
            WireError: the connection broke, or the body is longer.
        """
        async with asyncio.timeout(within_s):
            answer = await self.request("GET", url, path)
            try:
                return answer.status, await answer.read(most_bytes)
            finally:
                answer.close()

    def _kept(self, origin: Origin) -> Connection | None:
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.expiry is not None:
                connection.expiry.cancel()
                connection.expiry = None
            if not connection.closed and connection.transport is not None and not connection.transport.is_closing():
                return connection
        return None

    async def _open(self, origin: Origin) -> Connection:
        loop = asyncio.get_running_loop()
        context = None
        if origin.tls:
            context = self._tls = self._tls or ssl.create_default_context()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(Connection, origin.host, origin.port, ssl=context)
        except TimeoutError:
            raise ConnectFailed(f"no connection within {self._connect_s:g} s") from None
        except OSError as error:  # ssl.SSLError is one, too
            raise ConnectFailed(error.strerror or str(error) or type(error).__name__) from None
        except UnicodeError:
            raise ConnectFailed(f"{origin.host!r} is no host name") from None
        return connection

    def _release(self, origin: Origin, connection: Connection, exchange: Exchange) -> None:
        connection.exchange = None
        exchange.end()
        if not exchange.done or not exchange.reusable or connection.closed or exchange.pieces:
            connection.cut()
            return
        connection.expiry = asyncio.get_running_loop().call_later(self._keepalive_s, self._expire, origin, connection)
        self._idle.setdefault(origin, []).append(connection)

    def _expire(self, origin: Origin, connection: Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._idle[origin].remove(connection)
            if not self._idle[origin]:
                del self._idle[origin]
        connection.cut()
