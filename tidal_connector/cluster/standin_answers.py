# SPDX-License-Identifier: Apache-2.0
"""What an engine stand-in answers: a function of the prompt alone, so that whoever asks can check every token. Pure.

:func:`expected_text` is what a client compares with; the server itself uses the same :func:`answer_token`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from tidal_connector.errors import ParamsError

DEFAULT_TOKENS = 16


def prompt_tokens(body: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens of a request's prompt: bytes of its text, or the token ids that it holds.

    Raises:
        ParamsError: there is neither a prompt nor a list of messages.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return tuple(prompt.encode())
    if isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt):
        return tuple(prompt)
    messages = body.get("messages")
    if isinstance(messages, list) and messages:
        return tuple("".join(_message_text(item) for item in messages).encode())
    raise ParamsError("prompt: expected a text, a list of token ids, or messages")


def answer_length(body: Mapping[str, Any]) -> int:
    """Return how many tokens a request asks for.

    Raises:
        ParamsError: not a positive number.
    """
    asked = body.get("max_completion_tokens", body.get("max_tokens"))
    if asked is None:
        return DEFAULT_TOKENS
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise ParamsError(f"max_tokens = {asked!r}: expected a number from 1 on")
    return asked


def digest(tokens: Sequence[int]) -> str:
    """Return the digest of a prompt's tokens, as vLLM's side of the connector makes it."""
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).hexdigest()


def answer_token(prompt_digest: str, position: int) -> str:
    """Return one token of the answer: a word of five letters and digits, with a space in front."""
    return " " + hashlib.blake2b(f"{prompt_digest}:{position}".encode(), digest_size=4).hexdigest()[:5]


def expected_text(body: Mapping[str, Any]) -> str:
    """Return the whole text that a stand-in answers to a request.

    Raises:
        ParamsError: it is no request that a stand-in answers.
    """
    key = digest(prompt_tokens(body))
    return "".join(answer_token(key, position) for position in range(answer_length(body)))


def _message_text(message: object) -> str:
    if not isinstance(message, Mapping):
        raise ParamsError(f"messages holds {type(message).__name__}: expected objects")
    return f"<{message.get('role')}>{message.get('content')}\n"
