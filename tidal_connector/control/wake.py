# SPDX-License-Identifier: Apache-2.0
"""A bell that any thread may ring to end the control thread's sleep.

Owns one eventfd. Takes ``ring()`` from any thread, a plane's receipt callback included; hands on a file descriptor to
poll.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType


class Wake:
    """An eventfd with a lock around its end of life, so that a late ring after ``close`` does nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rung = False
        self._fd: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __enter__(self) -> Wake:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def fd(self) -> int:
        """The descriptor to poll for reading.

        Raises:
            ValueError: the bell was closed.
        """
        if self._fd is None:
            raise ValueError("the wake bell was closed")
        return self._fd

    def ring(self) -> None:
        """Wake the sleeper; rings before it wakes count as one. Never blocks.

        A bell that has rung costs no system call: with one, a forward pass that rings for each layer would hand the
        interpreter to a busy control thread each time.
        """
        if self._rung:
            return
        with self._lock:
            self._rung = True
            if self._fd is not None:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Forget the rings so far. What was posted before them must be looked at after this."""
        with self._lock:
            if self._fd is None:
                return
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                pass
            finally:
                self._rung = False

    def close(self) -> None:
        """Give the descriptor back; may be called again."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
