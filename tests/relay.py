# SPDX-License-Identifier: Apache-2.0
"""A TCP relay in this process, to cut connections between two parties that go on living.

``cut`` breaks what is open and refuses what is new (a router that says so); ``freeze`` keeps connections and moves no
byte (a network that is gone without a word); ``mend`` ends both.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from types import TracebackType
from typing import Self


class Relay:
    """Listens on a port of its own and passes bytes to one target.

    Attributes:
        netloc: ``host:port`` to connect to.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host.strip("[]"), int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.netloc = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._wake_out, self._wake_in = socket.socketpair()
        self._lock = threading.Lock()
        self._state = "open"
        self._peers: dict[socket.socket, socket.socket] = {}  # by the thread alone
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Reset every connection and refuse new ones."""
        self._set("cut")

    def freeze(self) -> None:
        """Keep every connection, accept new ones, and move nothing."""
        self._set("frozen")

    def mend(self) -> None:
        """Pass bytes again."""
        self._set("open")

    def close(self) -> None:
        """End."""
        self._set("over")
        self._thread.join(10)
        for each in (self._listener, self._wake_out, self._wake_in):
            each.close()

    def _set(self, state: str) -> None:
        with self._lock:
            self._state = state
        self._wake_in.send(b"x")

    def _run(self) -> None:
        while True:
            with self._lock:
                state = self._state
            if state in ("cut", "over"):
                self._drop(*self._peers)
            if state == "over":
                return
            sources = [*self._peers] if state == "open" else []
            for ready in select.select([self._wake_out, self._listener, *sources], [], [])[0]:
                if ready is self._wake_out:
                    ready.recv(64)
                elif ready is self._listener:
                    self._accept(refuse=state == "cut")
                elif ready in self._peers:
                    self._pass(ready)

    def _accept(self, refuse: bool) -> None:
        near, _ = self._listener.accept()
        if not refuse:
            with contextlib.suppress(OSError):
                far = socket.create_connection(self._target, timeout=2)
                far.settimeout(10)
                near.settimeout(10)
                self._peers[near], self._peers[far] = far, near
                return
        near.close()

    def _pass(self, source: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
            if data:
                self._peers[source].sendall(data)
                return
        except OSError:
            pass
        self._drop(source)

    def _drop(self, *gone: socket.socket) -> None:
        for each in gone:
            other = self._peers.pop(each, None)
            if other is not None:
                self._peers.pop(other)
                each.close()
                other.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
