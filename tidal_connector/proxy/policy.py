# SPDX-License-Identifier: Apache-2.0
"""Which engine gets a request: the one with the least outstanding tokens.

Pure, no clock and no I/O of its own. One :class:`Ledger` per role, used from the event loop's thread only. A
claim is opened when a leg is dispatched and closed exactly once, however the leg ends, so that the sum
returns to zero.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


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

        def cost(engine: str) -> tuple[bool, bool, int]:
            return (
                engine in avoid,
                self._unreachable_until.get(engine, now) > now,
                self._outstanding[engine],
            )

        return min(self._outstanding, key=cost)

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
