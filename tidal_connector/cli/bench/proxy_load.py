# SPDX-License-Identifier: Apache-2.0
"""One client of a proxy's benchmark: asks directly or through the proxy, times both alike, and looks at every token.

The direct way is what a proxy does for its client: both legs at once, to the same engines, with a fresh transfer id.
Its bodies are made before the clock starts. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tidal_connector.cluster.standin_answers import expected_text
from tidal_connector.ids import new_transfer_id
from tidal_connector.proxy.engines import is_stream
from tidal_connector.proxy.wire import Client
from tidal_connector.vllm_plugin.params import decode_params, prefill_params

PATH = "/v1/completions"
_HEADERS = ((b"content-type", b"application/json"),)

Body = dict[str, Any]


class Address(NamedTuple):
    """An engine."""

    engine: str
    url: str
    control: str


class Timed(NamedTuple):
    """One request that was answered as it should be: seconds to the answer's first and to its last byte."""

    first_s: float
    last_s: float


class WrongAnswer(Exception):
    """Another text than the engines answer, or an error."""


class Asker:
    """A client.

    Args:
        client: its connections.
        proxy: base URL.
        prefill, decode: the engines that the proxy has, for the direct way; taken in turn.
        bound_s: longest wait for a whole answer.
    """

    def __init__(
        self, client: Client, proxy: str, prefill: Sequence[Address], decode: Sequence[Address], bound_s: float
    ) -> None:
        self._client = client
        self._proxy = proxy
        self._pairs = itertools.cycle(itertools.product(prefill, decode))
        self._bound_s = bound_s
        self.open = 0
        """Answers that have begun and not ended."""
        self.most_open = 0
        """The most of them at one moment."""

    async def through_proxy(self, body: Body) -> Timed:
        """Ask the proxy.

        Raises:
            WrongAnswer, WireError, TimeoutError: it was not answered as it should be.
        """
        raw = msgspec.json.encode(body)
        return await self._timed(self._proxy, raw, body)

    async def directly(self, body: Body) -> Timed:
        """Ask a prefill and a decode engine at the same time.

        Raises:
            WrongAnswer, WireError, TimeoutError: it was not answered as it should be.
        """
        prefill, decode = next(self._pairs)
        transfer = new_transfer_id()
        first = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": prefill_params(transfer, decode.engine)}
        second = body | {"kv_transfer_params": decode_params(transfer, prefill.engine, prefill.control)}
        raw, other = msgspec.json.encode(second), msgspec.json.encode(first)
        timed, _ = await asyncio.gather(self._timed(decode.url, raw, body), self._whole(prefill.url, other))
        return timed

    async def _whole(self, url: str, raw: bytes) -> None:
        async with asyncio.timeout(self._bound_s):
            response = await self._client.request("POST", url, PATH, _HEADERS, raw)
            text = await response.read()
        if response.status != 200:
            raise WrongAnswer(f"{response.status}: {text[:200]!r}")

    async def _timed(self, url: str, raw: bytes, body: Body) -> Timed:
        async with asyncio.timeout(self._bound_s):
            began = time.perf_counter()
            response = await self._client.request("POST", url, PATH, _HEADERS, raw)
            try:
                parts = [await response.piece()]
                first_s = time.perf_counter() - began
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                try:
                    while part := await response.piece():
                        parts.append(part)
                finally:
                    self.open -= 1
                last_s = time.perf_counter() - began
            finally:
                response.close()
        check_answer(response.status, is_stream(response.headers), b"".join(parts), body)
        return Timed(first_s, last_s)


def check_answer(status: int, streams: bool, raw: bytes, body: Body) -> None:
    """Look whether an answer is the one that the engines give to a body.

    Raises:
        WrongAnswer: it is not.
    """
    if status != 200:
        raise WrongAnswer(f"{status}: {raw[:200]!r}")
    wanted_stream = bool(body.get("stream"))
    if streams != wanted_stream:
        raise WrongAnswer(f"a stream was {'' if wanted_stream else 'not '}asked for: {raw[:200]!r}")
    if streams and not raw.endswith(b"data: [DONE]\n\n"):
        raise WrongAnswer(f"the stream ends with {raw[-80:]!r}")
    events = [line[6:] for line in raw.split(b"\n\n") if line.startswith(b"data: {")] if streams else [raw]
    try:
        text = "".join(msgspec.json.decode(event)["choices"][0]["text"] for event in events)
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        raise WrongAnswer(f"no answer: {raw[:200]!r}") from None
    if text != (wanted := expected_text(body)):
        raise WrongAnswer(f"{text[:60]!r}, expected {wanted[:60]!r}")
