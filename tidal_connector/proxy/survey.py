# SPDX-License-Identifier: Apache-2.0
"""Asks the engines who they are, again and again, beside the requests; keeps which pairs must not be formed.

Takes each engine's control address; hands on :attr:`Survey.barred` to whoever chooses engines and to ``/health``. What
changes is logged once. The questions wait in threads of the event loop's pool, a few at a time; everything else is the
event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from tidal_connector.control.inquiry import inquire
from tidal_connector.control.messages import About
from tidal_connector.errors import PeerLost, TidalError
from tidal_connector.log import get_logger
from tidal_connector.proxy.pairing import Engine, barred_pairs
from tidal_connector.proxy.policy import Pair
from tidal_connector.proxy.settings import ProxyConfig

_log = get_logger(__name__)

_AT_ONCE = 3  # threads of the pool that questions may take; name resolution for the requests needs the others

Ask = Callable[[str, float], About]


class Survey:
    """What the engines have said about themselves.

    Args:
        config: the engines, and how long and how often they are asked.
        ask: asks one control address, blocking for so many seconds at most (``control.inquiry.inquire``).
    """

    def __init__(self, config: ProxyConfig, ask: Ask = inquire) -> None:
        self._config = config
        self._ask = ask
        self._engines: list[Engine] = [item for item in (*config.prefill, *config.decode) if item.control]
        self._known: dict[Engine, About] = {}
        self._odd: dict[Engine, str] = {}
        self._barred: dict[Pair, str] = {}

    @property
    def barred(self) -> Mapping[Pair, str]:
        """Pairs that must not be formed, with the reason."""
        return self._barred

    @property
    def reasons(self) -> list[str]:
        """The reasons, each once, in the order of the configuration."""
        return list(dict.fromkeys(self._barred.values()))

    @property
    def unknown(self) -> list[str]:
        """Ids of the engines that have an address and have not answered yet."""
        return [item.engine for item in self._engines if item not in self._known]

    @property
    def nothing_fits(self) -> str:
        """One line that says why no pair can be formed; empty where one can."""
        if len(self._barred) < len(self._config.prefill) * len(self._config.decode):
            return ""
        first, *others = self.reasons
        return first + (f" (and {len(others)} more: see /health)" if others else "")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ask in the background as long as the context is open."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while self._engines:
            await self.round()
            await asyncio.sleep(self._config.timeouts.inquiry_every_s)

    async def round(self) -> None:
        """Ask every engine once."""
        slots = asyncio.Semaphore(_AT_ONCE)
        await asyncio.gather(*(self._question(engine, slots) for engine in self._engines))

    async def _question(self, engine: Engine, slots: asyncio.Semaphore) -> None:
        async with slots:
            try:
                about = await asyncio.to_thread(self._ask, engine.control, self._config.timeouts.inquiry_s)
            except PeerLost:
                return  # not there, or busy; what it said before still holds
            except TidalError as error:
                self._note(engine, str(error))
                return
        self._odd.pop(engine, None)
        if about != self._known.get(engine):
            self._known[engine] = about
            self._judge()

    def _note(self, engine: Engine, text: str) -> None:
        if self._odd.get(engine) != text:
            self._odd[engine] = text
            _log.warning("engine %s: %s", engine.engine, text)

    def _judge(self) -> None:
        before = self.reasons
        self._barred = barred_pairs(self._config, self._known)
        after = self.reasons
        for reason in after:
            if reason not in before:
                _log.error("%s", reason)
        for reason in before:
            if reason not in after:
                _log.info("mended: %s", reason)
