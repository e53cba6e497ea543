# SPDX-License-Identifier: Apache-2.0
"""One HTTP/1.1 connection to an engine, and one request and its answer over it. Event loop's thread only.

Bytes come in by asyncio's protocol, answers go out by awaiting. Whatever breaks (the connection, or the form of what
came) ends the exchange with one error, and the connection with it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

import httptools

_PAUSE_BYTES = 1 << 18  # of an answer that wait to be taken, before the engine is told to pause


class WireError(Exception):
    """The connection broke, or what came over it is no HTTP."""


class ConnectFailed(WireError):
    """No connection could be opened: nothing was sent."""


class Connection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self.closed = False
        self.exchange: Exchange | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's callback."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio's callback."""
        if self.exchange is None:
            self.cut()  # nobody asked for anything
        else:
            self.exchange.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's callback."""
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


class Exchange:
    """One request and its answer, as the parser finds it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
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
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(WireError(f"its answer is no HTTP: {error or type(error).__name__}"))
        self._wake()

    def end(self) -> None:
        """Let go of the parser, which holds this object: left to the garbage collector, they would cost pauses."""
        self._parser = None

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
        if self.done:
            return
        text = value.decode("latin-1")
        key = name.decode("latin-1").lower()
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        """Parser's callback."""
        if self.done or self._parser is None:
            return
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
        if self.done:
            return
        self.pieces.append(body)
        self._buffered += len(body)
        if self._buffered > _PAUSE_BYTES and not self._paused and self._connection.transport is not None:
            self._paused = True
            self._connection.transport.pause_reading()

    def on_message_complete(self) -> None:
        """Parser's callback."""
        if self.begun and self._parser is not None:
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
