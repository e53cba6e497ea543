# SPDX-License-Identifier: Apache-2.0
"""What the demo asks: seeded prompts of awkward lengths. Pure."""

from __future__ import annotations

import random

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300, 1000, 3000)
"""Below, at and above a block, the selection size and a chunk."""

QUICK_LENGTHS = (1, 17, 64, 129, 300)
SABOTAGE_LENGTH = 63
"""A context that selection takes as a whole, so that any corrupted row is one that attention reads."""

SHARED_PREFIX = 500
_BYTES = 256


def make_prompts(lengths: tuple[int, ...], seed: int, shared_prefix: bool) -> list[list[int]]:
    """Return prompts as token ids (the tokenizer's tokens 0 to 255 are bytes).

    Args:
        lengths: tokens of each prompt.
        seed: of the random bytes.
        shared_prefix: add two prompts that share their first 500 tokens.
    """
    source = random.Random(seed)
    prompts = [_random_tokens(source, length) for length in lengths]
    if shared_prefix:
        prefix = _random_tokens(source, SHARED_PREFIX)
        prompts += [prefix + _random_tokens(source, 20), prefix + _random_tokens(source, 90)]
    return prompts


def _random_tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(_BYTES) for _ in range(count)]
