# SPDX-License-Identifier: Apache-2.0
"""Brings the registry's views from the store's thread to the event loop's.

Takes an open store and a roster; nothing here decides anything. A view that comes before the last one was looked at
replaces it, so that a registry that changes faster than the proxy reads costs no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tidal_connector.proxy.roster import Roster
from tidal_connector.registry.base import Store
from tidal_connector.registry.members import Members, watch_members


class Bridge:
    """The newest view that the event loop has not seen yet.

    Args:
        roster: takes the views.
        loop: on whose thread.
    """

    def __init__(self, roster: Roster, loop: asyncio.AbstractEventLoop) -> None:
        self._roster = roster
        self._loop = loop
        self._newest: Members | None = None

    def put(self, members: Members) -> None:
        """Take a view; any thread."""
        self._newest = members
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is interested any more
            self._loop.call_soon_threadsafe(self._pass_on)

    def _pass_on(self) -> None:
        members, self._newest = self._newest, None
        if members is not None:
            self._roster.take(members)


@contextlib.asynccontextmanager
async def following(store: Store | None, roster: Roster) -> AsyncIterator[None]:
    """Keep the roster up to date as long as the context is open; close the store at its end.

    Args:
        store: of the registry; None where all engines come from the file.
        roster: takes the views.
    """
    if store is None:
        yield
        return
    bridge = Bridge(roster, asyncio.get_running_loop())
    watch = await asyncio.to_thread(watch_members, store, bridge.put)
    try:
        yield
    finally:
        await asyncio.to_thread(watch.close)
        await asyncio.to_thread(store.close)
