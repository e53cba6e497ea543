# SPDX-License-Identifier: Apache-2.0
"""Asks the engines who they are, again and again, beside the requests; keeps which pairs must not be formed.

Takes the engines as they are now, each with its control address; hands on :attr:`Survey.barred` to whoever chooses
engines and to ``/health``. What changes is logged once. An engine of the file is asked in every round, since nobody
else tells of its new life; one of the registry once in each life. The questions wait in threads of the event loop's
pool, a few at a time; everything else is the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from tidal_connector.control.inquiry import inquire
from tidal_connector.control.messages import About
from tidal_connector.errors import PeerLost, TidalError
from tidal_connector.log import get_logger
from tidal_connector.proxy.beside import beside
from tidal_connector.proxy.pairing import barred_pairs
from tidal_connector.proxy.policy import Pair
from tidal_connector.proxy.roster import Change, Engine, Roster, Side
from tidal_connector.proxy.settings import Timeouts
from tidal_connector.registry.members import State

_log = get_logger(__name__)

_AT_ONCE = 3  # threads of the pool that questions may take; name resolution for the requests needs the others

Ask = Callable[[str, float], About]


class Survey:
    """What the engines have said about themselves.

    Args:
        roster: the engines.
        timeouts: how long and how often they are asked.
        ask: asks one control address, blocking for so many seconds at most (``control.inquiry.inquire``).
        changed: called when other pairs may be formed than before.
    """

    def __init__(
        self, roster: Roster, timeouts: Timeouts, ask: Ask = inquire, changed: Callable[[], None] = lambda: None
    ) -> None:
        self._roster = roster
        self._timeouts = timeouts
        self._ask = ask
        self._changed = changed
        self._known: dict[tuple[Side, str], tuple[Engine, About]] = {}
        self._odd: dict[tuple[Side, str], str] = {}
        self._barred: dict[Pair, str] = {}
        self._news = asyncio.Event()
        roster.listen(self._follow)
        self._judge()

    @property
    def barred(self) -> Mapping[Pair, str]:
        """Pairs of ready engines that must not be formed, with the reason."""
        return self._barred

    @property
    def reasons(self) -> list[str]:
        """The reasons, each once, in the order of the engines."""
        return list(dict.fromkeys(self._barred.values()))

    @property
    def unknown(self) -> list[str]:
        """Ids of the engines that have an address and have not answered yet."""
        return [engine.engine for engine in self._roster.engines if engine.control and engine.key not in self._known]

    @property
    def nothing_fits(self) -> str:
        """One line that says why no pair of ready engines may be formed; empty where one may, or none is ready."""
        pairs = len(self._roster.ready("prefill")) * len(self._roster.ready("decode"))
        if not pairs or len(self._barred) < pairs:
            return ""
        first, *others = self.reasons
        return first + (f" (and {len(others)} more: see /health)" if others else "")

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Ask in the background as long as the context is open."""
        return beside(self._run)

    async def _run(self) -> None:
        while True:
            self._news.clear()
            await self.round()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeouts.inquiry_every_s):
                    await self._news.wait()

    async def round(self) -> None:
        """Ask every engine once whose answer may have changed."""
        slots = asyncio.Semaphore(_AT_ONCE)
        await asyncio.gather(*(self._question(engine, slots) for engine in self._roster.engines if self._open(engine)))

    def _open(self, engine: Engine) -> bool:
        """Whether there is something to ask an engine."""
        if not engine.control:
            return False
        return not engine.registered or (engine.state is State.READY and engine.key not in self._known)

    async def _question(self, engine: Engine, slots: asyncio.Semaphore) -> None:
        async with slots:
            try:
                about = await asyncio.to_thread(self._ask, engine.control, self._timeouts.inquiry_s)
            except PeerLost:
                return  # not there, or busy; what it said before still holds
            except TidalError as error:
                self._note(engine, str(error))
                return
        now = self._roster.find(*engine.key)
        if now is None or now.control != engine.control or now.incarnation != engine.incarnation:
            return  # that was of another life
        self._odd.pop(engine.key, None)
        before = self._known.get(engine.key)
        if before is None or before[1] != about:
            self._known[engine.key] = now, about
            self._judge()

    def _note(self, engine: Engine, text: str) -> None:
        if self._odd.get(engine.key) != text:
            self._odd[engine.key] = text
            _log.warning("engine %s: %s", engine.engine, text)

    def _follow(self, changes: list[Change]) -> None:
        for change in changes:
            engine = change.before or change.after
            assert engine is not None
            known = self._known.get(engine.key)
            if known and not _same_life(known[0], change.after):
                del self._known[engine.key]
                self._odd.pop(engine.key, None)
        self._judge()
        self._news.set()

    def _judge(self) -> None:
        before = self.reasons
        known = {now: about for key, (_, about) in self._known.items() if (now := self._roster.find(*key))}
        self._barred = barred_pairs(self._roster.ready("prefill"), self._roster.ready("decode"), known)
        after = self.reasons
        for reason in after:
            if reason not in before:
                _log.error("%s", reason)
        for reason in before:
            if reason not in after:
                _log.info("mended: %s", reason)
        if before != after:
            self._changed()


def _same_life(before: Engine, after: Engine | None) -> bool:
    return after is not None and (before.control, before.incarnation) == (after.control, after.incarnation)
