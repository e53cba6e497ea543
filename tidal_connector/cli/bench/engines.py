# SPDX-License-Identifier: Apache-2.0
"""Single engines for the benchmarks, and requests whose tokens are timed as they arrive.

An engine is alone: it prefills and decodes by itself, with its latents in the host pool or on the device. One thread
starts and stops engines; the requests of one :func:`stream` run side by side in it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import httpx
import msgspec

from tidal_connector.cluster.launch import ServerProcess
from tidal_connector.cluster.serving import ServeConfig, kv_transfer_config
from tidal_connector.cluster.stack import MODEL_NAME, StackSettings, plain_engine
from tidal_connector.errors import TidalError
from tidal_connector.ids import Role

Result = TypeVar("Result")

START_S = 240.0
"""Bound of the start of all engines together."""

_PATH = "/v1/completions"
_ANSWER_S = 300.0
_LONG_ANSWER_S = 1800.0
_END, _DATA, _JSON = b"\n\n", b"data: ", b"data: {"
_NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
_BYTES = 256  # the tokenizer's tokens 0 to 255


def single_engine(name: str, settings: StackSettings, tidal: Mapping[str, Any] | None = None) -> ServerProcess:
    """Return an engine that serves alone, not started yet.

    Args:
        name: what messages and its log file are called.
        settings: of a stack; those of prefill and decode engines are not used.
        tidal: the connector's settings; None leaves the connector out.
    """
    if tidal is not None:
        transfer = kv_transfer_config(ServeConfig(engine=name, tidal=dict(tidal)), Role.BOTH)
        settings = msgspec.structs.replace(settings, vllm_args=(*settings.vllm_args, "--kv-transfer-config", transfer))
    server = plain_engine(settings)
    server.name, server.log = name, settings.logs / f"{name}.log"
    return server


def waiting(update: Callable[[str], None]) -> Callable[[list[str], float], None]:
    """Return what ``wait_ready`` may tell its progress to, as one line."""

    def show_waiting(names: list[str], seconds: float) -> None:
        update(f"starting {', '.join(names)} ({seconds:.0f} s)")

    return show_waiting


def random_prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Return prompts of random bytes that share nothing."""
    source = random.Random(seed)
    return [[source.randrange(_BYTES) for _ in range(tokens)] for _ in range(count)]


class Arrival(msgspec.Struct, frozen=True):
    """Tokens of one answer as they came.

    Attributes:
        asked: when the request was sent, seconds of ``time.monotonic``.
        times: when each piece came.
        counts: tokens of the answer so far, with each piece.
    """

    asked: float
    times: tuple[float, ...]
    counts: tuple[int, ...]


async def stream(
    client: httpx.AsyncClient,
    server: ServerProcess,
    prompt: Sequence[int],
    max_tokens: int,
    started: Callable[[], None] | None = None,
) -> Arrival:
    """Ask for exactly so many greedy tokens and note when each comes.

    Args:
        client: keeps connections.
        server: the engine.
        prompt: token ids.
        max_tokens: tokens to generate.
        started: called when the first piece has come.

    Raises:
        TidalError: the engine does not answer, refuses, or sends fewer tokens.
    """
    body = {
        **_body(prompt, max_tokens),
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    times: list[float] = []
    events: list[bytes] = []
    rest = b""
    asked = time.monotonic()
    try:
        async with client.stream("POST", server.url + _PATH, json=body, timeout=_ANSWER_S) as answer:
            if answer.status_code != httpx.codes.OK:
                text = (await answer.aread()).decode(errors="replace")
                raise TidalError(f"{server.name}: {answer.status_code} for {len(prompt)} tokens: {text[:500]}")
            async for part in answer.aiter_raw():
                now = time.monotonic()
                *whole, rest = (rest + part).split(_END)
                if whole and not events and started is not None:
                    started()
                times += [now] * len(whole)
                events += whole
    except httpx.TransportError as error:
        raise TidalError(f"{server.name}: no answer to a prompt of {len(prompt)} tokens: {error!r}") from None
    return arrival(asked, times, events, max_tokens, server.name)


def arrival(asked: float, times: Sequence[float], events: Sequence[bytes], max_tokens: int, name: str) -> Arrival:
    """Read the events of a streamed answer; done when all have come, so that reading delays no timing.

    Args:
        asked: when the request was sent.
        times: when each event came.
        events: what the server sent, without the empty lines between them.
        max_tokens: tokens that were asked for.
        name: of the engine, for messages.

    Raises:
        TidalError: there are fewer tokens than were asked for.
    """
    kept: list[float] = []
    counts: list[int] = []
    for at, event in zip(times, events, strict=True):
        if not event.startswith(_JSON):
            continue
        piece = json.loads(event.removeprefix(_DATA))
        so_far = (piece.get("usage") or {}).get("completion_tokens", 0)
        if piece.get("choices") and so_far > (counts[-1] if counts else 0):
            kept.append(at)
            counts.append(so_far)
    if not counts or counts[-1] < max_tokens:
        raise TidalError(f"{name}: {counts[-1] if counts else 0} of {max_tokens} tokens came; see its log")
    return Arrival(asked, tuple(kept), tuple(counts))


def at_once(
    server: ServerProcess,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    all_started: Callable[[], None] | None = None,
) -> list[Arrival]:
    """Ask all prompts side by side and wait for all answers.

    Args:
        server: the engine.
        prompts: token ids of each.
        max_tokens: tokens to generate for each.
        all_started: called once, when every answer has its first token; what it takes is in the timings.

    Raises:
        TidalError: an answer did not come.
    """
    missing = len(prompts)

    def started() -> None:
        nonlocal missing
        missing -= 1
        if missing == 0 and all_started is not None:
            all_started()

    async def run() -> list[Arrival]:
        async with httpx.AsyncClient(trust_env=False, limits=_NO_LIMITS) as client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream(client, server, prompt, max_tokens, started)) for prompt in prompts]
        return [task.result() for task in tasks]

    return _run(run())


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return one of the errors of a group; the others were cancelled or have the same cause."""
    found = group.exceptions[0]
    return first_error(found) if isinstance(found, BaseExceptionGroup) else found


def complete(
    server: ServerProcess,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    answered: Callable[[], None] | None = None,
) -> None:
    """Ask all prompts at once for exactly so many greedy tokens and wait for all answers.

    Args:
        server: the engine.
        prompts: token ids of each.
        max_tokens: tokens to generate for each.
        answered: called after each answer.

    Raises:
        TidalError: an answer did not come, or is shorter.
    """

    async def one(client: httpx.AsyncClient, prompt: Sequence[int]) -> None:
        body = {**_body(prompt, max_tokens), "stream": False}
        try:
            answer = await client.post(server.url + _PATH, json=body, timeout=_LONG_ANSWER_S)
        except httpx.TransportError as error:
            raise TidalError(f"{server.name}: no answer to a prompt of {len(prompt)} tokens: {error!r}") from None
        if answer.status_code != httpx.codes.OK:
            raise TidalError(f"{server.name}: {answer.status_code} for {len(prompt)} tokens: {answer.text[:500]}")
        tokens = answer.json()["usage"]["completion_tokens"]
        if tokens != max_tokens:
            raise TidalError(f"{server.name}: {tokens} of {max_tokens} tokens came; see its log")
        if answered is not None:
            answered()

    async def run() -> None:
        async with httpx.AsyncClient(trust_env=False, limits=_NO_LIMITS) as client, asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(one(client, prompt))

    _run(run())


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    try:
        return asyncio.run(work)
    except BaseExceptionGroup as group:
        raise first_error(group) from None


def _body(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }


def token_times(arrivals: Sequence[Arrival]) -> list[float]:
    """Return the seconds between successive tokens while all answers were under way.

    What lies before the last of the first tokens, or after the first of the last ones, is another batch and left out.
    Where several tokens came in one piece they share its time.

    Raises:
        TidalError: the answers were never under way together, or came in one piece.
    """
    begin = max(each.times[0] for each in arrivals)
    end = min(each.times[-1] for each in arrivals)
    found = []
    for each in arrivals:
        for place in range(1, len(each.times)):
            if each.times[place - 1] >= begin and each.times[place] <= end:
                tokens = each.counts[place] - each.counts[place - 1]
                found += [(each.times[place] - each.times[place - 1]) / tokens] * tokens
    if not found:
        raise TidalError("no two tokens came while all requests were under way: ask for more, or less load elsewhere")
    return found
