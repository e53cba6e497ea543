# SPDX-License-Identifier: Apache-2.0
"""Asks engines and proxy. Each call blocks; several may run in threads of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tidal_connector.cli.demo.compare import Generated, parse_completion
from tidal_connector.cluster.stack import MODEL_NAME, PREFILL_ENGINE, Stack
from tidal_connector.errors import TidalError
from tidal_connector.ids import new_transfer_id
from tidal_connector.vllm_plugin.params import decode_params, prefill_params

_ANSWER_S = 300.0
_TOP = 5


def ask(url: str, prompt: Sequence[int], max_tokens: int, **more: Any) -> Generated:
    """Ask for a greedy completion with log-probabilities.

    Args:
        url: base URL of an engine or the proxy.
        prompt: token ids.
        max_tokens: tokens to generate; exactly so many come.
        more: further fields of the request.

    Raises:
        TidalError: there is no answer, or its status is not 200.
    """
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": _TOP,
        "return_tokens_as_token_ids": True,
        **more,
    }
    try:
        answer = httpx.post(url + "/v1/completions", json=body, timeout=_ANSWER_S, trust_env=False)
    except httpx.TransportError as error:
        raise TidalError(f"{url}: no answer to a prompt of {len(prompt)} tokens: {error!r}") from None
    if answer.status_code != httpx.codes.OK:
        raise TidalError(f"{url}: {answer.status_code} for a prompt of {len(prompt)} tokens: {answer.text[:500]}")
    return parse_completion(answer.json())


def ask_many(url: str, prompts: Sequence[Sequence[int]], max_tokens: int, at_once: int) -> list[Generated]:
    """Ask several prompts, some at once; the answers come in the prompts' order."""
    with _threads(at_once) as pool:
        return list(pool.map(lambda prompt: ask(url, prompt, max_tokens), prompts))


def ask_sabotaged(stack: Stack, prompt: Sequence[int], max_tokens: int, layer: int, token: int) -> Generated:
    """Run both legs by hand, and let the decode engine corrupt one pool row after it has landed.

    Args:
        stack: the deployment; its decode engine must allow sabotage.
        prompt: token ids.
        max_tokens: tokens to generate.
        layer, token: the row.
    """
    transfer = new_transfer_id()
    prefill = prefill_params(transfer)
    decode = decode_params(transfer, PREFILL_ENGINE, stack.prefill_control)
    decode["sabotage"] = {"layer": layer, "token": token}
    with _threads(1) as pool:
        first = pool.submit(ask, stack.prefill.url, prompt, 1, kv_transfer_params=prefill)
        answer = ask(stack.decode.url, prompt, max_tokens, kv_transfer_params=decode)
        first.result()
    return answer


@contextlib.contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that an interrupt does not wait for: their requests end when the servers do."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
