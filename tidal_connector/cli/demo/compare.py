# SPDX-License-Identifier: Apache-2.0
"""Whether two answers to one prompt are the same, token by token and in their log-probabilities. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tidal_connector.errors import TidalError

_TOKEN_PREFIX = "token_id:"


class Generated(msgspec.Struct, frozen=True):
    """An answer.

    Attributes:
        tokens: generated token ids.
        logprobs: of each of them.
        top: per position, the most likely tokens and their log-probabilities.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[Mapping[int, float], ...]


class Difference(msgspec.Struct, frozen=True):
    """How far two answers are apart.

    Attributes:
        tokens_equal: same tokens and same number of them.
        logprob: largest absolute difference of log-probabilities, over the positions up to and with the first
            different token: of the chosen tokens where they are equal, and of the likely tokens that both name.
    """

    tokens_equal: bool
    logprob: float


def parse_completion(answer: Mapping[str, Any]) -> Generated:
    """Read a completion that was asked with ``logprobs`` and ``return_tokens_as_token_ids``.

    Raises:
        TidalError: it has another shape.
    """
    try:
        shown = answer["choices"][0]["logprobs"]
        return Generated(
            tokens=tuple(_token(text) for text in shown["tokens"]),
            logprobs=tuple(float(value) for value in shown["token_logprobs"]),
            top=tuple({_token(k): float(v) for k, v in place.items()} for place in shown["top_logprobs"]),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise TidalError(f"a completion has no readable logprobs ({error!r}): {str(answer)[:200]}") from None


def compare(mine: Generated, reference: Generated) -> Difference:
    """Compare an answer with the reference's."""
    largest = 0.0
    places = zip(
        mine.tokens, reference.tokens, mine.logprobs, reference.logprobs, mine.top, reference.top, strict=False
    )
    for my_token, its_token, my_logprob, its_logprob, my_top, its_top in places:
        gaps = [abs(my_top[token] - its_top[token]) for token in my_top.keys() & its_top.keys()]
        if my_token != its_token:
            largest = max(largest, *gaps, 0.0)
            break
        largest = max(largest, abs(my_logprob - its_logprob), *gaps)
    return Difference(mine.tokens == reference.tokens, largest)


def _token(text: str) -> int:
    if not text.startswith(_TOKEN_PREFIX):
        raise ValueError(f"token {text!r} is no id")
    return int(text.removeprefix(_TOKEN_PREFIX))
