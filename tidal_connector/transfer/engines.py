# SPDX-License-Identifier: Apache-2.0
"""Engines for carriers: made on demand, kept, and never given twice for one peer's name.

An engine caches what a peer's name once meant and cannot forget it, and destroying one holds the interpreter for about
a second; so a used engine waits here until another name needs one. Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tidal_connector.transfer.carrier import Engine


def _nothing() -> None:
    """Prepare no thread."""


class EnginePool:
    """Engines that write: made on demand, kept, and never given twice for one name.

    Args:
        make: makes one.
        shared: one for everybody, where the transport allows no other in this process.
        enter: prepares the thread that is about to use the shared one.
    """

    def __init__(self, make: Callable[[], Engine], shared: Engine | None, enter: Callable[[], None] = _nothing) -> None:
        self._make = make
        self._shared = shared
        self._enter = enter
        self._lock = threading.Lock()
        self._spare: list[Engine] = []
        self._opened: dict[Engine, set[str]] = {}

    def take(self, peer: str) -> Engine:
        """Return an engine that has never opened this peer, or the shared one."""
        if self._shared is not None:
            self._enter()
            return self._shared
        with self._lock:
            fresh = next((engine for engine in self._spare if peer not in self._opened[engine]), None)
            if fresh is None:
                fresh = self._make()
                self._opened[fresh] = set()
            else:
                self._spare.remove(fresh)
            self._opened[fresh].add(peer)
            return fresh

    def give(self, engine: Engine) -> None:
        """Take back an engine with nothing in flight."""
        with self._lock:
            if engine in self._opened:
                self._spare.append(engine)

    def drop(self, engine: Engine) -> bool:
        """Destroy an engine; False for the shared one."""
        with self._lock:
            if self._opened.pop(engine, None) is None:
                return False
        engine.close()
        return True

    def close(self) -> None:
        """Destroy all engines but the shared one."""
        with self._lock:
            engines, self._opened, self._spare = list(self._opened), {}, []
        for engine in engines:
            engine.close()
