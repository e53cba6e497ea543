# SPDX-License-Identifier: Apache-2.0
"""The client's HTTP: connections that are kept, broken, cut and never mixed up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidal_connector.proxy.wire import Client, ConnectFailed, WireError, target_of

Handler = Callable[[bytes, asyncio.StreamWriter, int], Awaitable[None]]


class Server:
    """Answers each request with what the handler writes; counts connections."""

    def __init__(self, handler: Handler, host: str = "127.0.0.1") -> None:
        self._handler = handler
        self._host = host
        self.connections = 0
        self.ended = 0
        self.heads: list[bytes] = []
        self.url = ""

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://[{self._host}]:{port}" if ":" in self._host else f"http://{self._host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await self._handler(await reader.readexactly(length), writer, self.connections)
                await writer.drain()
        self.ended += 1
        writer.close()


def whole(body: bytes, extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%scontent-length: %d\r\n\r\n%s" % (extra, len(body), body)


async def echo(body: bytes, writer: asyncio.StreamWriter, connection: int) -> None:
    writer.write(whole(body))


def saying(raw: bytes, close: bool = False) -> Handler:
    async def handler(body: bytes, writer: asyncio.StreamWriter, connection: int) -> None:
        writer.write(raw)
        if close:
            await writer.drain()
            writer.close()
            raise ConnectionResetError

    return handler


def run(
    handler: Handler, story: Callable[[Server, Client], Awaitable[None]], keepalive_s: float = 3.0, **how: Any
) -> None:
    async def both() -> None:
        async with Server(handler, **how) as server, Client(2.0, keepalive_s) as client:
            await story(server, client)

    asyncio.run(asyncio.wait_for(both(), 20))


async def ask(server: Server, client: Client, body: bytes = b"hi") -> bytes:
    response = await client.request("POST", server.url, "/x", [(b"a", b"b")], body)
    assert response.status == 200
    return await response.read()


def test_one_connection_serves_requests_one_after_another() -> None:
    async def story(server: Server, client: Client) -> None:
        for number in range(5):
            assert await ask(server, client, b"%d" % number) == b"%d" % number
        assert server.connections == 1
        assert server.heads[0].startswith(b"POST /x HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\na: b\r\n" in server.heads[0]

    run(echo, story)


def test_requests_at_once_get_a_connection_each_and_their_own_answers() -> None:
    async def story(server: Server, client: Client) -> None:
        bodies = [b"%d" % number * 1000 for number in range(50)]
        assert await asyncio.gather(*(ask(server, client, body) for body in bodies)) == bodies
        assert await asyncio.gather(*(ask(server, client, body) for body in bodies)) == bodies
        assert server.connections == 50

    run(echo, story)


def test_a_question_whose_answer_stops_half_way_leaves_no_connection_behind() -> None:
    async def story(server: Server, client: Client) -> None:
        with pytest.raises(TimeoutError):
            await client.get(server.url, "/health", 0.1, 1 << 20)
        async with asyncio.timeout(5):
            while not server.ended:
                await asyncio.sleep(0.01)

    run(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"), story)


def test_an_idle_connection_is_closed_after_its_time() -> None:
    async def story(server: Server, client: Client) -> None:
        await ask(server, client)
        for _ in range(200):
            if server.ended:
                break
            await asyncio.sleep(0.01)
        assert server.ended == 1
        assert await ask(server, client) == b"hi"
        assert server.connections == 2

    run(echo, story, keepalive_s=0.05)


def test_a_connection_that_the_server_closed_meanwhile_is_not_used() -> None:
    async def story(server: Server, client: Client) -> None:
        for _ in range(3):
            assert await ask(server, client) == b"ok"
            await asyncio.sleep(0.05)
        assert server.connections == 3

    run(saying(whole(b"ok"), close=True), story)


@pytest.mark.parametrize(
    ("raw", "body", "again"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + whole(b"late"), b"late", True),
        (whole(b"bye", b"connection: close\r\n"), b"bye", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"", True),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", b"ok", False),
    ],
)
def test_forms_of_an_answer(raw: bytes, body: bytes, again: bool) -> None:
    async def story(server: Server, client: Client) -> None:
        assert await ask(server, client) == body
        assert await ask(server, client) == body
        assert server.connections == (1 if again else 2)

    run(saying(raw), story)


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async def story(server: Server, client: Client) -> None:
        assert await ask(server, client) == b"until the end"

    run(saying(b"HTTP/1.1 200 OK\r\n\r\nuntil the end", close=True), story)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "closed the connection before its answer was complete"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc", "closed the connection before"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab", "closed the connection before"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "no HTTP"),
    ],
)
def test_a_broken_answer_is_an_error_and_the_connection_is_not_kept(raw: bytes, words: str) -> None:
    async def story(server: Server, client: Client) -> None:
        for _ in range(2):
            with pytest.raises(WireError, match=words):
                await ask(server, client)
        assert server.connections == 2

    run(saying(raw, close=True), story)


def test_a_second_answer_that_nobody_asked_for_is_nobodys() -> None:
    async def story(server: Server, client: Client) -> None:
        for _ in range(2):
            with contextlib.suppress(WireError):
                assert await ask(server, client) == b"mine"
        assert server.connections == 2

    run(saying(whole(b"mine") + whole(b"whose?")), story)


def test_bytes_that_come_while_nothing_is_asked_end_the_connection() -> None:
    async def chatty(body: bytes, writer: asyncio.StreamWriter, connection: int) -> None:
        writer.write(whole(body))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(whole(b"unasked"))

    async def story(server: Server, client: Client) -> None:
        assert await ask(server, client, b"1") == b"1"
        await asyncio.sleep(0.15)
        assert await ask(server, client, b"2") == b"2"
        assert server.connections == 2

    run(chatty, story)


@pytest.mark.parametrize("moment", ["head", "body"])
def test_cancelling_cuts_the_connection(moment: str) -> None:
    raw = b"" if moment == "head" else b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc"

    async def story(server: Server, client: Client) -> None:
        task = asyncio.create_task(ask(server, client))
        while not server.heads:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if moment == "body":
            return  # whoever holds the response closes it; see the next test
        for _ in range(200):
            if server.ended:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the connection is still open")

    run(saying(raw), story)


def test_closing_a_response_early_cuts_its_connection_and_again_does_nothing() -> None:
    async def story(server: Server, client: Client) -> None:
        response = await client.request("POST", server.url, "/x", (), b"hi")
        assert await response.piece() == b"abc"
        response.close()
        response.close()
        for _ in range(200):
            if server.ended:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the connection is still open")

    run(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc"), story)


def test_an_answer_faster_than_its_reader_is_held_back() -> None:
    sent = 0

    async def flood(body: bytes, writer: asyncio.StreamWriter, connection: int) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
        for _ in range(64):
            writer.write(b"x" * (1 << 20))
            await writer.drain()
            sent += 1

    async def story(server: Server, client: Client) -> None:
        response = await client.request("POST", server.url, "/x", (), b"hi")
        seen, still = -1, 0
        while still < 20 and sent < 64:  # until nothing more is sent for a while
            still = still + 1 if sent == seen else 0
            seen = sent
            await asyncio.sleep(0.02)
        assert sent < 32
        assert len(await response.read()) == 64 << 20

    run(flood, story)


def test_a_limit_on_an_answer_is_kept() -> None:
    async def story(server: Server, client: Client) -> None:
        response = await client.request("POST", server.url, "/x", (), b"x" * 5000)
        with pytest.raises(WireError, match="longer than 4096 bytes"):
            await response.read(4096)

    run(echo, story)


def test_nobody_there_is_told_apart_from_somebody_who_breaks_off() -> None:
    async def story() -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            async with Client(2.0, 3.0) as client:
                with pytest.raises(ConnectFailed):
                    await client.request("GET", url, "/")
        async with Client(2.0, 3.0) as client:
            with pytest.raises(ConnectFailed):
                await client.request("GET", "http://no-such-host.invalid:1", "/")

    asyncio.run(asyncio.wait_for(story(), 20))


def test_a_connection_that_cannot_be_opened_in_time_is_given_up() -> None:
    async def story() -> None:
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            host, port = full.getsockname()
            with contextlib.ExitStack() as stack:  # fill what the kernel accepts for a listener that never does
                for _ in range(4):
                    filler = stack.enter_context(socket.socket())
                    filler.setblocking(False)
                    filler.connect_ex((host, port))
                async with Client(0.2, 3.0) as client:
                    with pytest.raises(ConnectFailed, match=r"no connection within 0\.2 s"):
                        await client.request("GET", f"http://127.0.0.1:{port}", "/")

    asyncio.run(asyncio.wait_for(story(), 20))


def test_ipv6_engines_are_reached_and_named_in_brackets() -> None:
    async def story(server: Server, client: Client) -> None:
        assert await ask(server, client) == b"hi"
        assert b"\r\nhost: [::1]:" in server.heads[0]

    run(echo, story, host="::1")


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "shown", "path"),
    [
        ("http://h:1", "h", 1, False, b"h:1", ""),
        ("https://h", "h", 443, True, b"h", ""),
        ("http://[fe80::1%eth0]:8", "fe80::1%eth0", 8, False, b"[fe80::1]:8", ""),
        ("http://h:1/base/", "h", 1, False, b"h:1", "/base"),
    ],
)
def test_base_urls_are_taken_apart(url: str, host: str, port: int, tls: bool, shown: bytes, path: str) -> None:
    target = target_of(url)
    assert (tuple(target.origin), target.host_header, target.path) == ((host, port, tls), shown, path)


@pytest.mark.parametrize("url", ["h:1", "ftp://h", "http://", "http://h:99999", "http://[::1", ""])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        target_of(url)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8), st.data())
def test_a_body_arrives_whole_however_its_bytes_are_cut(chunks: list[bytes], data: st.DataObject) -> None:
    raw = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    raw += b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=5)))
    parts = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]

    async def pieces(body: bytes, writer: asyncio.StreamWriter, connection: int) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

    async def story(server: Server, client: Client) -> None:
        assert await ask(server, client) == b"".join(chunks)

    run(pieces, story)
