# SPDX-License-Identifier: Apache-2.0
"""The batches that a single engine is judged by. Pure.

The test checkpoints select 64 tokens (``TOP_K``), and the cache is tried with 64, 128 and 256 slots, so contexts lie
below the slots, between and far above, and some cross each of these sizes while decoding. Where many tokens are
generated, rows that were written while decoding are themselves selected, lose their slots and are fetched again.
"""

from __future__ import annotations

from tests.e2e.single_instance import Ask
from tidal_connector.cli.demo.prompts import make_prompts

TOP_K = 64


def make_batch(name: str) -> list[Ask]:
    """Return a batch by its name, or that of a repetition; always the same one.

    * ``short``: four requests whose contexts never exceed the smallest cache.
    * ``alone``: one request, whose context crosses 256 and goes on.
    * ``few``: four requests at once, of which one is short and one crosses 256.
    * ``crowd``: up to eight at once, of 32 to 6,000 tokens, joining while others run; one leaves early.
    * ``turns``: a shared prefix, a prompt that comes again, and requests that go on from an answer.
    * ``pressure``: ten requests of which a pool of 48 blocks holds two or three.
    * ``flood``: two requests that have the device to themselves for a while, then six more.
    * ``switch``: a long request, and another that comes while it decodes and ends before it.
    """
    return BATCHES[once(name)]()


def once(name: str) -> str:
    """Return the name of the batch that a repetition repeats: ``alone`` for ``alone, again 2``."""
    return name.partition(",")[0]


def often(name: str, times: int) -> tuple[str, ...]:
    """Return the names of a batch and its repetitions; what depends on the timing of threads shows in some only."""
    return (name, *(f"{name}, again {number}" for number in range(1, times)))


def _short() -> list[Ask]:
    return _asks(30, [(20, 40, 0), (33, 31, 0), (1, 50, 0), (40, 24, 0)])


def _alone() -> list[Ask]:
    return _asks(31, [(200, 160, 0)])


def _few() -> list[Ask]:
    return _asks(32, [(32, 24, 0), (64, 80, 0), (129, 140, 0), (700, 60, 0)])


def _crowd() -> list[Ask]:
    asks = _asks(
        33,
        [
            (32, 110, 0),  # crosses 64 and 128
            (100, 40, 0),  # crosses 128
            (230, 60, 0),  # crosses 256
            (1000, 60, 0),
            (6000, 40, 4),
            (65, 30, 12),
            (300, 40, 20),
            (2500, 24, 30),
            (500, 40, 34),
            (127, 24, 60),
        ],
    )
    left = Ask("left", make_prompts((400,), 34, shared_prefix=False)[0], 60, joins=8, leaves=9)
    return [*asks, left]


def _turns() -> list[Ask]:
    first, second, last = make_prompts((60,), 35, shared_prefix=True)
    one = Ask("one", first, 70)
    long = Ask("long", second, 90)
    return [
        one,
        long,
        Ask("other", last, 40, joins=3),
        Ask("again", second, 20, joins=30),
        Ask("one-goes-on", first[:20], 60, follows="one"),
        Ask("long-goes-on", first[:33], 60, follows="long"),
        Ask("one-goes-on-twice", first[:7], 40, follows="one-goes-on"),
    ]


def _pressure() -> list[Ask]:
    lengths = (180, 33, 250, 64, 199, 120, 300, 161, 17, 222)
    return _asks(36, [(length, 64, 0) for length in lengths])


def _flood() -> list[Ask]:
    shape = [(900, 60, 0), (400, 60, 0), (300, 40, 12), (600, 30, 12), (250, 30, 14), (150, 30, 16), (700, 20, 18)]
    return _asks(37, [*shape, (90, 20, 20)])


def _switch() -> list[Ask]:
    long, late = make_prompts((1500, 300), 38, shared_prefix=False)
    return [Ask("long", long, 80), Ask("late", late, 24, joins=30)]


def _asks(seed: int, shape: list[tuple[int, int, int]]) -> list[Ask]:
    """Make requests of (prompt tokens, new tokens, step at which they join)."""
    prompts = make_prompts(tuple(length for length, _, _ in shape), seed, shared_prefix=False)
    return [
        Ask(f"r{number}-{length}", prompt, new_tokens, joins)
        for number, (prompt, (length, new_tokens, joins)) in enumerate(zip(prompts, shape, strict=True))
    ]


BATCHES = {
    "short": _short,
    "alone": _alone,
    "few": _few,
    "crowd": _crowd,
    "turns": _turns,
    "pressure": _pressure,
    "flood": _flood,
    "switch": _switch,
}
"""Every batch by its name."""
