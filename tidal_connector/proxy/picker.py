# SPDX-License-Identifier: Apache-2.0
"""Picks a pair of engines for one attempt, out of those that can serve now, and keeps what it picked accounted for.

Can serve: ``ready``, and not known to be out of reach. An engine to which no connection could be opened is out of reach
for ``cooldown_s`` and until it answers a question for its health, whatever the registry says; a new life (another
incarnation or address in the registry) is in reach at once. An engine of the file, which nobody else vouches for, is
asked for its health every ``inquiry_every_s``. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec

from tidal_connector.log import get_logger
from tidal_connector.proxy.engines import knock
from tidal_connector.proxy.legs import ClientRequest, leading
from tidal_connector.proxy.policy import Claim, Ledger, Pair, Policy, Want, choose_pair
from tidal_connector.proxy.roster import SIDES, Change, Engine, Roster, Side
from tidal_connector.proxy.settings import ProxyConfig
from tidal_connector.proxy.wire import Client, ConnectFailed, WireError
from tidal_connector.registry.members import State

_log = get_logger(__name__)

Avoid = dict[Side, list[str]]


class Picked(msgspec.Struct, frozen=True):
    """A pair for one attempt, and the claims on it."""

    prefill: Engine
    decode: Engine
    claims: tuple[Claim, Claim]

    def close(self) -> None:
        """Close both claims."""
        for claim in self.claims:
            claim.close()


class Picker:
    """Chooses engines.

    Args:
        config: policy and waits.
        roster: the engines.
        policy: from ``policy_of(config.policy, config.affinity)``.
        client: asks engines that were out of reach for their health.
        barred: pairs that must not be formed.
        changed: called when an engine is in reach again.

    Attributes:
        ledgers: what is outstanding, by role.
    """

    def __init__(
        self,
        config: ProxyConfig,
        roster: Roster,
        policy: Policy,
        client: Client,
        barred: Callable[[], Mapping[Pair, str]],
        changed: Callable[[], None],
    ) -> None:
        self._config = config
        self._roster = roster
        self._policy = policy
        self._client = client
        self._barred = barred
        self._changed = changed
        self._out: dict[tuple[Side, str], asyncio.Task[None]] = {}
        self.ledgers: dict[Side, Ledger] = {side: Ledger() for side in SIDES}
        roster.listen(self._follow)

    def want(self, request: ClientRequest) -> Want:
        """Say what the policy must know of a request."""
        tokens = request.prompt_tokens + request.answer_tokens
        if not self._policy.needs_prefix:
            return Want(tokens)
        return Want(tokens, leading(request.body, self._config.affinity.prefix_tokens))

    def pick(self, request: ClientRequest, want: Want, avoid: Avoid) -> Picked | None:
        """Choose a pair and claim it; None where none can be formed now.

        Args:
            request: what the engines will have to do.
            want: of this request.
            avoid: engines that it has failed on.
        """
        able = self.able(request.model)
        pair = choose_pair(
            self._policy,
            (able["prefill"], able["decode"]),
            (self.ledgers["prefill"], self.ledgers["decode"]),
            want,
            (avoid["prefill"], avoid["decode"]),
            self._barred(),
        )
        if pair is None:
            return None
        prefill, decode = self._roster.find("prefill", pair[0]), self._roster.find("decode", pair[1])
        assert prefill is not None
        assert decode is not None
        claims = (
            self.ledgers["prefill"].claim(prefill.engine, request.prompt_tokens),
            self.ledgers["decode"].claim(decode.engine, want.tokens),
        )
        return Picked(prefill, decode, claims)

    def able(self, model: str = "") -> dict[Side, list[str]]:
        """Return the engines that can serve, by role.

        Where some announce the model that is asked for, those that announce another one are left out; where none does,
        it may be another name (an adapter's) that the engines know.
        """
        found: dict[Side, list[str]] = {}
        for side in SIDES:
            serving = [item for item in self._roster.ready(side) if self.reachable(item)]
            if model and any(item.model == model for item in serving):
                serving = [item for item in serving if item.model in (model, "")]
            found[side] = [item.engine for item in serving]
        return found

    def pairs(self) -> int:
        """Count the pairs that could be formed now."""
        prefill, decode = (set(engines) for engines in self.able().values())
        return len(prefill) * len(decode) - sum(one in prefill and other in decode for one, other in self._barred())

    def why_none(self, nothing_fits: str) -> str:
        """Say in one line why no pair can be formed now; empty where one can.

        Args:
            nothing_fits: why engines that are ready do not fit, where that is so.
        """
        if self.pairs():
            return ""
        reasons = [
            f"no {side} engine is {'reachable' if self._roster.ready(side) else 'ready'}"
            + (f" ({', '.join(self._states(side))})" if self._roster.side(side) else "")
            for side, able in self.able().items()
            if not able
        ]
        if not reasons:
            return nothing_fits or "the engines that are ready and reachable do not fit: see /health"
        stale = "" if self._roster.fresh else "; the registry cannot be reached, so this may be old"
        return " and ".join(reasons) + stale

    def _states(self, side: Side) -> list[str]:
        shown = [
            f"{item.engine}: {item.state if item.state is not State.READY else 'out of reach'}"
            for item in self._roster.side(side)
        ]
        return shown if len(shown) <= 4 else [*shown[:4], f"and {len(shown) - 4} more"]

    def reachable(self, engine: Engine) -> bool:
        """Whether nothing is known against connections to an engine."""
        return engine.key not in self._out

    def out_of_reach(self, engine: Engine) -> None:
        """Give an engine nothing for a while: no connection to it could be opened."""
        now = self._roster.find(*engine.key)
        if engine.key in self._out or now is None or not _same_life(now, engine):
            return
        _log.warning("%s engine %s cannot be reached; it gets nothing until it answers", engine.side, engine.engine)
        self._out[engine.key] = asyncio.create_task(self._until_healthy(engine))

    def reached(self, engine: Engine) -> None:
        """Take note that an engine has answered."""
        task = self._out.pop(engine.key, None)
        if task is not None:
            task.cancel()
            _log.info("%s engine %s can be reached again", engine.side, engine.engine)
            self._changed()

    async def _until_healthy(self, engine: Engine) -> None:
        bounds = self._config.timeouts
        while True:
            await asyncio.sleep(bounds.cooldown_s)
            with contextlib.suppress(WireError, TimeoutError):
                await knock(self._client, engine.url, bounds.health_s)
                break
        self._out.pop(engine.key, None)
        _log.info("%s engine %s can be reached again", engine.side, engine.engine)
        self._changed()

    async def _ask_named(self) -> None:
        bounds = self._config.timeouts
        while True:
            named = [item for item in self._roster.engines if not item.registered and self.reachable(item)]
            await asyncio.gather(*(self._ask(item) for item in named))
            await asyncio.sleep(bounds.inquiry_every_s)

    async def _ask(self, engine: Engine) -> None:
        try:
            await knock(self._client, engine.url, self._config.timeouts.health_s)
        except ConnectFailed:
            self.out_of_reach(engine)
        except (WireError, TimeoutError):
            return  # it is there, and busy: a request that fails on it says more

    def _follow(self, changes: list[Change]) -> None:
        for change in changes:
            before, after = change.before, change.after
            if before is not None and (after is None or not _same_life(before, after)):
                task = self._out.pop(before.key, None)
                if task is not None:
                    task.cancel()
            if before is not None and after is None:
                self.ledgers[before.side].forget([before.engine])
        self._changed()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ask the engines of the file as long as the context is open, and end every question for health with it."""
        asking = asyncio.create_task(self._ask_named())
        try:
            yield
        finally:
            tasks = [asking, *self._out.values()]
            self._out.clear()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _same_life(one: Engine, other: Engine) -> bool:
    return (one.url, one.incarnation) == (other.url, other.incarnation)


def avoid_nothing() -> Avoid:
    """Return the engines that a request has failed on at its begin: none."""
    return {side: [] for side in SIDES}
