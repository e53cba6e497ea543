# SPDX-License-Identifier: Apache-2.0
"""Which engines get a request: those with the least outstanding tokens, among the pairs that may be formed.

Pure, no clock and no I/O of its own. One :class:`Ledger` per role, used from the event loop's thread only. A
claim is opened when a leg is dispatched and closed exactly once, however the leg ends, so that the sum
returns to zero.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import add
from typing import TypeAlias

Pair: TypeAlias = tuple[str, str]
"""A prefill and a decode engine."""

Cost: TypeAlias = tuple[int, int, int]
"""Failed on by this request, lately not reached, outstanding tokens; the smaller the better, the first counts most."""


class Claim:
    """Tokens that count as outstanding; closing it again does nothing."""

    __slots__ = ("_engine", "_ledger", "_tokens")

    def __init__(self, ledger: Ledger, engine: str, tokens: int) -> None:
        self._ledger = ledger
        self._engine = engine
        self._tokens = tokens

    def close(self) -> None:
        """Take the tokens off the engine's account."""
        tokens, self._tokens = self._tokens, 0
        self._ledger._settle(self._engine, tokens)


class Ledger:
    """Outstanding tokens of the engines of one role."""

    def __init__(self, engines: Sequence[str]) -> None:
        self._outstanding = dict.fromkeys(engines, 0)
        self._unreachable_until: dict[str, float] = {}

    @property
    def outstanding(self) -> dict[str, int]:
        """Tokens dispatched and not answered yet, by engine."""
        return dict(self._outstanding)

    def choose(self, now: float, avoid: Collection[str] = ()) -> str:
        """Return the engine with the least outstanding tokens; among equals the first configured.

        Args:
            now: monotonic seconds.
            avoid: engines that this request has already failed on; chosen only if there is no other, as are
                engines that could lately not be reached.
        """
        return min(self._outstanding, key=lambda engine: self.cost(engine, now, avoid))

    def cost(self, engine: str, now: float, avoid: Collection[str] = ()) -> Cost:
        """Return what speaks against an engine; arguments as in :meth:`choose`."""
        unreachable = self._unreachable_until.get(engine, now) > now
        return (engine in avoid, unreachable, self._outstanding[engine])

    def claim(self, engine: str, tokens: int) -> Claim:
        """Count tokens as outstanding on an engine until the claim is closed."""
        self._outstanding[engine] += tokens
        return Claim(self, engine, tokens)

    def _settle(self, engine: str, tokens: int) -> None:
        self._outstanding[engine] -= tokens

    def unreachable(self, engine: str, until: float) -> None:
        """Remember that an engine could not be reached, up to a monotonic time."""
        self._unreachable_until[engine] = until

    def reached(self, engine: str) -> None:
        """Forget that an engine could not be reached."""
        self._unreachable_until.pop(engine, None)


def choose_pair(
    prefill: Ledger,
    decode: Ledger,
    now: float,
    avoid: tuple[Collection[str], Collection[str]] = ((), ()),
    barred: Collection[Pair] = (),
) -> Pair | None:
    """Return the pair with the least cost; None where every pair is barred.

    Where nothing is barred, each engine is the one that its ledger chooses.

    Args:
        prefill, decode: the ledgers.
        now: monotonic seconds.
        avoid: prefill and decode engines that this request has already failed on.
        barred: pairs that must not be formed.
    """
    if not barred:
        return prefill.choose(now, avoid[0]), decode.choose(now, avoid[1])

    def cost(pair: Pair) -> tuple[int, ...]:
        return tuple(map(add, prefill.cost(pair[0], now, avoid[0]), decode.cost(pair[1], now, avoid[1])))

    left = [pair for one in prefill.outstanding for other in decode.outstanding if (pair := (one, other)) not in barred]
    return min(left, key=cost, default=None)
