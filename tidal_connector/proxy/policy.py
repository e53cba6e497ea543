# SPDX-License-Identifier: Apache-2.0
"""Which engines get a request, among those that can serve it and the pairs that may be formed.

Pure: no clock, no I/O, no knowledge of where engines come from. One :class:`Ledger` per role counts what is dispatched;
a :class:`Policy` turns the count into costs; :func:`choose_pair` takes the cheapest pair. Event loop's thread only.

Whatever the policy, an engine that this request has failed on costs more than any other.
"""

from __future__ import annotations

import abc
import hashlib
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import add
from typing import TypeAlias

import msgspec

from tidal_connector.proxy.settings import Affinity, PolicyKind

Pair: TypeAlias = tuple[str, str]
"""A prefill and a decode engine."""

Cost: TypeAlias = tuple[float, ...]
"""What speaks against an engine; the smaller the better, the first counts most. Those of a pair are added up."""


class Want(msgspec.Struct, frozen=True):
    """What a policy knows of a request.

    Attributes:
        tokens: about how many tokens it adds to an engine's account.
        prefix: what its prompt begins with; equal for prompts that should meet the same caches.
    """

    tokens: int = 0
    prefix: bytes = b""


class Claim:
    """A request and its tokens that count as outstanding; closing it again does nothing."""

    __slots__ = ("_engine", "_ledger", "_tokens")

    def __init__(self, ledger: Ledger, engine: str, tokens: int) -> None:
        self._ledger: Ledger | None = ledger
        self._engine = engine
        self._tokens = tokens

    def close(self) -> None:
        """Take the request off the engine's account."""
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger._settle(self._engine, self._tokens)


class Ledger:
    """What is outstanding on the engines of one role. Engines need not be known before they are claimed."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._requests: dict[str, int] = {}
        self._turn: dict[str, int] = {}
        self._turns = 0

    @property
    def outstanding(self) -> Mapping[str, int]:
        """Tokens dispatched and not answered yet, by engine; engines without a request are left out."""
        return self._tokens

    def tokens(self, engine: str) -> int:
        """Return the outstanding tokens of an engine."""
        return self._tokens.get(engine, 0)

    def requests(self, engine: str) -> int:
        """Return how many requests an engine works on."""
        return self._requests.get(engine, 0)

    def turn(self, engine: str) -> int:
        """Return a number that is the smaller the longer ago the engine was claimed last; 0 for never."""
        return self._turn.get(engine, 0)

    def claim(self, engine: str, tokens: int) -> Claim:
        """Count a request and its tokens as outstanding on an engine until the claim is closed."""
        self._tokens[engine] = self.tokens(engine) + tokens
        self._requests[engine] = self.requests(engine) + 1
        self._turns += 1
        self._turn[engine] = self._turns
        return Claim(self, engine, tokens)

    def _settle(self, engine: str, tokens: int) -> None:
        self._tokens[engine] -= tokens
        self._requests[engine] -= 1
        if not self._requests[engine]:
            del self._tokens[engine], self._requests[engine]

    def forget(self, engines: Collection[str]) -> None:
        """Forget when engines that are gone had their last turn; what is outstanding on them still counts."""
        for engine in engines:
            self._turn.pop(engine, None)


class Policy(abc.ABC):
    """Turns what is outstanding into costs."""

    needs_prefix = False
    """Whether it looks at :attr:`Want.prefix`."""

    @abc.abstractmethod
    def costs(self, engines: Sequence[str], ledger: Ledger, want: Want, decodes: bool) -> list[Cost]:
        """Return the cost of each engine, all of one length.

        Args:
            engines: those that can serve, all of one role.
            ledger: of their role.
            want: the request.
            decodes: whether these are decode engines; what is said of them goes before what is said of the others.
        """


class LeastTokens(Policy):
    """The engine with the least outstanding tokens; among equals the one whose last turn is longest ago."""

    def costs(self, engines: Sequence[str], ledger: Ledger, want: Want, decodes: bool) -> list[Cost]:
        """Outstanding tokens, then the turn."""
        return [(ledger.tokens(engine), ledger.turn(engine)) for engine in engines]


class Random(Policy):
    """Any engine, all equally likely.

    Args:
        source: of randomness.
    """

    def __init__(self, source: random.Random) -> None:
        self._source = source

    def costs(self, engines: Sequence[str], ledger: Ledger, want: Want, decodes: bool) -> list[Cost]:
        """A random number each."""
        return [(self._source.random(),) for _ in engines]


class PrefixAffinity(Policy):
    """Prompts with one prefix go to one engine, by rendezvous hashing, while it is not overloaded.

    Each prefix has its own order of engines; the first that is there and not overloaded is taken. So an engine that
    goes away takes only its own prefixes along; they spread over all others, and come back with it.

    Args:
        settings: what counts as overloaded.
    """

    needs_prefix = True

    def __init__(self, settings: Affinity) -> None:
        self._settings = settings

    def costs(self, engines: Sequence[str], ledger: Ledger, want: Want, decodes: bool) -> list[Cost]:
        """Overloaded or not, then the place in the prefix's own order."""
        limit = overload_limit([ledger.tokens(engine) for engine in engines], want.tokens, self._settings)
        places = {engine: place for place, engine in enumerate(rendezvous(want.prefix, engines))}
        found: list[Cost] = []
        for engine in engines:
            over = ledger.tokens(engine) > limit
            place = places[engine]
            found.append((over, place, 0) if decodes else (over, 0, place))
        return found


def overload_limit(outstanding: Sequence[int], tokens: int, settings: Affinity) -> float:
    """Return the outstanding tokens above which an engine gets nothing new.

    Never below the mean with the new request, so that at least one engine is not above it.
    """
    mean = (sum(outstanding) + tokens) / max(1, len(outstanding))
    return max(settings.spare_tokens, settings.overload * mean)


def rendezvous(prefix: bytes, engines: Iterable[str]) -> list[str]:
    """Return the engines in the prefix's own order, which does not depend on who else is there."""

    def weight(engine: str) -> tuple[bytes, str]:
        return hashlib.blake2b(engine.encode(), key=prefix[:64], digest_size=8).digest(), engine

    return sorted(engines, key=weight, reverse=True)


def policy_of(kind: PolicyKind, affinity: Affinity, source: random.Random | None = None) -> Policy:
    """Return the policy that the settings name."""
    if kind is PolicyKind.RANDOM:
        return Random(source or random.Random())
    if kind is PolicyKind.PREFIX_AFFINITY:
        return PrefixAffinity(affinity)
    return LeastTokens()


def choose_pair(
    policy: Policy,
    engines: tuple[Sequence[str], Sequence[str]],
    ledgers: tuple[Ledger, Ledger],
    want: Want,
    avoid: tuple[Collection[str], Collection[str]] = ((), ()),
    barred: Collection[Pair] = (),
) -> Pair | None:
    """Return the pair with the least cost; None where there is none, or every pair is barred.

    Args:
        policy: says what each engine costs.
        engines: prefill and decode engines that can serve.
        ledgers: of the same roles.
        want: the request.
        avoid: prefill and decode engines that this request has already failed on; chosen only if there is no other.
        barred: pairs that must not be formed.
    """
    if not engines[0] or not engines[1]:
        return None
    prefill, decode = (
        {
            engine: (engine in avoid[side], *cost)
            for engine, cost in zip(
                engines[side], policy.costs(engines[side], ledgers[side], want, bool(side)), strict=True
            )
        }
        for side in (0, 1)
    )
    # Sums of costs are ordered as their parts are, so the cheapest of each side are the cheapest pair.
    best = min(prefill, key=prefill.__getitem__), min(decode, key=decode.__getitem__)
    if best not in barred:
        return best

    def cost(pair: Pair) -> Cost:
        return tuple(map(add, prefill[pair[0]], decode[pair[1]]))

    left = [pair for one in prefill for other in decode if (pair := (one, other)) not in barred]
    return min(left, key=cost, default=None)
