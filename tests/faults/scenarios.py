# SPDX-License-Identifier: Apache-2.0
"""Worlds drawn from a number, for runs that must be the same each time."""

from __future__ import annotations

import random

from tests.faults.world import KINDS, Faults, Plan, Step, World

TROUBLE = [kind for kind in KINDS if kind not in ("reserve", "open")]


def scenario(seed: int, trouble: tuple[str, ...] | None = None, ranks: tuple[int, int] = (1, 1)) -> World:
    """Return a world; ``trouble`` restricts what happens to it, ``ranks`` are those of P and of D."""
    chance = random.Random(seed)
    plans = []
    for _ in range(chance.randint(1, 4)):
        tokens = chance.randint(1, 40)
        first = int(tokens * chance.choice([0.0, 0.0, 0.3, 0.6, 1.0]))
        plans.append(Plan(tokens, first, chance.randint(3, 40)))
    faults = Faults(
        lost=chance.choice([0.0, 0.0, 0.1, 0.4]),
        doubled=chance.choice([0.0, 0.3]),
        delay_s=chance.choice([0.0, 0.2, 1.0]),
        garbage=chance.choice([0.0, 0.3]),
        write_fails=chance.choice([0.0, 0.0, 0.05, 0.3]),
        write_s=chance.choice([0.0, 0.1, 0.2]),
        hides_connections=chance.random() < 0.5,
    )
    moments = [chance.uniform(0.0, 3.0) for _ in range(2 * len(plans))]
    steps = [Step(moments.pop(), kind, index) for index in range(len(plans)) for kind in ("reserve", "open")]
    kinds = TROUBLE if trouble is None else trouble
    for _ in range(chance.randint(0, 4) if kinds else 0):
        steps.append(Step(chance.uniform(0.0, 4.0), chance.choice(kinds), chance.randrange(len(plans))))
    return World(seed, faults, plans, steps, ranks)
