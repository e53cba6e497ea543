# SPDX-License-Identifier: Apache-2.0
"""Clients that never stop asking while a cluster is changed under them, and that look at every answer.

Half of the requests are streamed. A thread of its own with an event loop; counters are read from any thread.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

_ANSWER_S = 120.0
_KEPT = 5
_SHOWN = 300

Expected = Callable[[dict[str, Any]], str]


class Tally(msgspec.Struct, frozen=True):
    """What the clients have seen so far.

    Attributes:
        requests: that have come to an end.
        failed: without a whole answer.
        wrong: with another answer than expected.
        slowest_s: the longest of them.
        faults: the first failures and wrong answers, for people.
    """

    requests: int = 0
    failed: int = 0
    wrong: int = 0
    slowest_s: float = 0.0
    faults: tuple[str, ...] = ()


class Load:
    """Clients at work, as a context manager.

    Args:
        url: of the proxy.
        clients: how many ask at once.
        prompts: makes the body of a request from a number.
        expected: the text that a body must be answered with.
        pause_s: between an answer and the next request of a client: a CPU that is full of requests starts no engine.
        seed: of the choice which requests are streamed.
    """

    def __init__(
        self,
        url: str,
        clients: int,
        prompts: Callable[[int], dict[str, Any]],
        expected: Expected,
        pause_s: float = 0.0,
        seed: int = 5,
    ) -> None:
        self._url = url
        self._clients = clients
        self._prompts = prompts
        self._expected = expected
        self._pause_s = pause_s
        self._random = random.Random(seed)
        self._tally = Tally()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="bench-clients", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join(_ANSWER_S)

    def take(self) -> Tally:
        """Return what was seen since the last call."""
        with self._lock:
            found, self._tally = self._tally, Tally()
        return found

    @property
    def requests(self) -> int:
        """Requests that have ended since the last :meth:`take`."""
        return self._tally.requests

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None, keepalive_expiry=3.0)
        async with httpx.AsyncClient(timeout=_ANSWER_S, limits=limits, trust_env=False) as client:
            await asyncio.gather(*(self._ask_on(client, number) for number in range(self._clients)))

    async def _ask_on(self, client: httpx.AsyncClient, number: int) -> None:
        count = 0
        while not self._end.is_set():
            body = self._prompts(number + count * self._clients)
            started = time.monotonic()
            fault, wrong = "", False
            try:
                stream = self._random.random() < 0.5
                text = await (self._streamed(client, body) if stream else self._whole(client, body))
                wanted = self._expected(body)
                if text != wanted:
                    fault, wrong = f"answered {text[:_SHOWN]!r}, expected {wanted[:_SHOWN]!r}", True
            except (httpx.HTTPError, _Failed) as error:
                fault = f"{type(error).__name__}: {error}"
            self._note(time.monotonic() - started, fault, wrong)
            count += 1
            await asyncio.sleep(self._pause_s)

    async def _whole(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        answer = await client.post(self._url + "/v1/completions", json=body)
        if answer.status_code != httpx.codes.OK:
            raise _Failed(f"status {answer.status_code}: {answer.text[:_SHOWN]}")
        text = answer.json()["choices"][0]["text"]
        return str(text)

    async def _streamed(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        text, done = "", False
        async with client.stream("POST", self._url + "/v1/completions", json={**body, "stream": True}) as answer:
            if answer.status_code != httpx.codes.OK:
                raise _Failed(f"status {answer.status_code}: {(await answer.aread())[:_SHOWN]!r}")
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if data == line or not data:
                    continue
                if data == "[DONE]":
                    done = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise _Failed(f"in a stream: {data[:_SHOWN]}")
                text += "".join(choice.get("text", "") for choice in event["choices"])
        if not done:
            raise _Failed("a stream without an end")
        return text

    def _note(self, seconds: float, fault: str, wrong: bool) -> None:
        with self._lock:
            now = self._tally
            faults = (*now.faults, f"{time.strftime('%H:%M:%S')} {fault}") if fault else now.faults
            self._tally = Tally(
                requests=now.requests + 1,
                failed=now.failed + bool(fault and not wrong),
                wrong=now.wrong + wrong,
                slowest_s=round(max(now.slowest_s, seconds), 3),
                faults=faults[:_KEPT],
            )


class _Failed(Exception):
    """A request without a whole answer."""
