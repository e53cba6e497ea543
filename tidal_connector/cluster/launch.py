# SPDX-License-Identifier: Apache-2.0
"""Starts engines and proxies as child processes, waits until they serve, and leaves none behind.

:class:`ServerProcess` is one server, as a context manager; :func:`wait_ready` waits for several that start at
the same time. Every process has a keeper (``cluster.keeper``), so that even kill -9 of the starter ends it.
Called from one thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import httpx

from tidal_connector.cluster.keeper import group_members, kill_group
from tidal_connector.errors import TidalError

GRACE_S = 10.0
"""Seconds that a server has between SIGTERM and SIGKILL."""

_TAIL_LINES = 25
_POLL_S = 0.25


class StartFailed(TidalError):
    """A server did not come up; the message ends with the tail of its log."""


class ServerProcess:
    """One HTTP server in a child process.

    Attributes:
        name: what messages call it.
        url: base URL of its HTTP server.
        log: file that holds its output; None where it goes where this process's goes.
        command: what runs under the keeper.
        probe: path that answers 200 once it serves.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        url: str,
        log: Path | None,
        probe: str = "/health",
    ) -> None:
        self.name = name
        self.probe = probe
        self.url = url
        self.log = log
        self.command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process; it need not serve yet when this returns.

        Raises:
            StartFailed: it is running already.
        """
        if self._process is not None:
            raise StartFailed(f"{self.name} is running already; stop it first")
        with contextlib.ExitStack() as stack:
            output: IO[bytes] | None = None
            if self.log is not None:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(self.log.open("ab"))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tidal_connector.cluster.keeper", str(GRACE_S), *self.command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def begin_stop(self) -> None:
        """Ask the process to end, without waiting for it."""
        if self._process is not None:
            _close(self._process.stdin)

    def stop(self) -> None:
        """End the process and its descendants; bounded, and nothing where it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        _close(process.stdin)
        try:
            process.wait(GRACE_S + 5.0)
        except subprocess.TimeoutExpired:
            kill_group(process.pid)
            process.wait()

    def kill(self) -> None:
        """End the process and its descendants at once, with SIGKILL."""
        process, self._process = self._process, None
        if process is None:
            return
        kill_group(process.pid)
        process.wait()
        _close(process.stdin)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and its descendants (not to its keeper), such as SIGSTOP."""
        _signal_all(self.pids(), number)

    def pids(self) -> list[int]:
        """Return the server's processes, without its keeper."""
        if self._process is None:
            return []
        return [pid for pid in group_members(self._process.pid) if pid != self._process.pid]

    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs or was never started."""
        return None if self._process is None else self._process.poll()

    def ready(self) -> bool:
        """Whether it serves: its probe answers 200.

        Raises:
            StartFailed: the process has ended.
        """
        if not self.running():
            raise StartFailed(f"{self.name} ended before it served; {self.log_tail()}")
        try:
            return httpx.get(self.url + self.probe, timeout=2.0, trust_env=False).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def log_tail(self) -> str:
        """Return where the log is and its last lines."""
        return "its output is above" if self.log is None else tail_of(self.log)


def tail_of(log: Path) -> str:
    """Return where a log is and its last lines."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError as error:
        return f"its log cannot be read: {error}"
    return f"the end of {log}:\n" + "\n".join("    " + line for line in lines)


def wait_ready(
    servers: Sequence[ServerProcess],
    bound_s: float,
    progress: Callable[[list[str], float], None] | None = None,
) -> None:
    """Wait until all servers answer their health check.

    Args:
        servers: started processes.
        bound_s: seconds for all of them together.
        progress: called several times a second with the names still awaited and the seconds gone.

    Raises:
        StartFailed: one ended, or the bound has passed.
    """
    started = time.monotonic()
    waiting = list(servers)
    while waiting:
        waiting = [server for server in waiting if not server.ready()]
        gone = time.monotonic() - started
        if progress is not None:
            progress([server.name for server in waiting], gone)
        if waiting and gone > bound_s:
            raise StartFailed(f"{waiting[0].name} did not serve within {bound_s:g} s; {waiting[0].log_tail()}")
        if waiting:
            time.sleep(_POLL_S)


def free_ports(count: int) -> list[int]:
    """Return distinct TCP ports of 127.0.0.1 that nobody listens on at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        pipe.close()
