# SPDX-License-Identifier: Apache-2.0
"""Times several ways to do one thing in turn, so that whatever else the machine does meets all of them alike.

One thread. What a round works on is drawn anew before each timing and is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

WARM_UP = 2


class Contender(NamedTuple):
    """One way to do it.

    Attributes:
        name: what it is called in the result.
        prepare: draws fresh work and returns what is timed.
    """

    name: str
    prepare: Callable[[], Callable[[], object]]


def interleaved(
    contenders: Sequence[Contender],
    repetitions: int,
    done: Callable[[], None],
    warm_up: int = WARM_UP,
    settle_s: float = 0.0,
) -> dict[str, list[float]]:
    """Return the seconds of each contender, one for each repetition; the same index is the same round.

    Who begins a round changes from one to the next.

    Args:
        contenders: who takes part.
        repetitions: timed rounds.
        done: called after each round, also of the warm-up.
        warm_up: rounds before the first that counts.
        settle_s: seconds for which a contender works before each of its timings, so that nobody inherits what another
            left behind: OpenMP's threads, for one, spin on their cores for milliseconds after their work.
    """
    seconds: dict[str, list[float]] = {each.name: [] for each in contenders}
    for number in range(warm_up + repetitions):
        first = number % len(contenders)
        for each in (*contenders[first:], *contenders[:first]):
            act = each.prepare()
            settled = time.perf_counter() + settle_s
            while time.perf_counter() < settled:
                act()
                act = each.prepare()
            began = time.perf_counter()
            act()
            seconds[each.name].append(time.perf_counter() - began)
        done()
    return {name: values[warm_up:] for name, values in seconds.items()}
