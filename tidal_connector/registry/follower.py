# SPDX-License-Identifier: Apache-2.0
"""Telling one watcher of snapshots: each change once, "not fresh" once, and nothing after ``close``."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable

from tidal_connector.log import get_logger
from tidal_connector.registry.base import Snapshot, Watch

_log = get_logger(__name__)

_JOIN_S = 15.0
_AFTER_FAULT_S = 1.0


class Follower(Watch):
    """The thread of one watch. A store's own kind says how it follows a prefix, in ``_follow``."""

    def __init__(self, prefix: str, on_change: Callable[[Snapshot], None]) -> None:
        """Prepare; :meth:`begin` starts the thread.

        Args:
            prefix: what is watched.
            on_change: told of each snapshot that differs from the last.
        """
        self.prefix = prefix
        self._on_change = on_change
        self._telling = threading.RLock()  # held during a call, so that close() can wait for it, or come out of it
        self._closed = threading.Event()
        self._last: Snapshot | None = None
        self._lost = False
        self._thread = threading.Thread(target=self._run, name=f"tidal-watch-{prefix}", daemon=True)

    @property
    def closed(self) -> bool:
        """Whether the watch has ended."""
        return self._closed.is_set()

    def begin(self) -> None:
        """Start to follow."""
        self._thread.start()

    def rest(self, seconds: float) -> bool:
        """Sleep, unless the watch is closed meanwhile; return whether it goes on."""
        return not self._closed.wait(seconds)

    def tell(self, snapshot: Snapshot) -> None:
        """Tell of a snapshot, unless it is the one that was told last."""
        with self._telling:
            if self._lost and snapshot.fresh and not self._closed.is_set():
                self._lost = False
                _log.info("watch of %r: the registry answers again", self.prefix)
            if self._closed.is_set() or snapshot == self._last:
                return
            self._last = snapshot
            try:
                self._on_change(snapshot)
            except Exception:
                _log.exception("watch of %r: its callback failed; the watch goes on", self.prefix)

    def tell_lost(self, why: str) -> None:
        """Say that what was told last may be out of date; logged and told once for each loss."""
        with self._telling:
            if self._lost or self._closed.is_set():
                return
            self._lost = True
            _log.warning("watch of %r: the registry does not answer, trying on (%s)", self.prefix, why)
            if self._last is not None:
                self.tell(Snapshot(self._last.entries, fresh=False))

    @abc.abstractmethod
    def _follow(self) -> None:
        """Tell of every change until closed."""

    def _wake(self) -> None:
        """Interrupt ``_follow``; called by ``close``."""

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._follow()
            except Exception as error:  # whatever it is, a watch that goes silent would be worse
                _log.exception("watch of %r: a fault of its own; it begins anew", self.prefix)
                self.tell_lost(f"a fault of its own: {error}")
                self.rest(_AFTER_FAULT_S)

    def close(self) -> None:
        """End the watch; waits for a call that runs, unless it comes out of that call."""
        with self._telling:
            self._closed.set()
        self._wake()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
