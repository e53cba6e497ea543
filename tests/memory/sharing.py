# SPDX-License-Identifier: Apache-2.0
"""One rank of a shared pool as a process of its own, which does what it is told over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from tidal_connector.config import PoolConfig
from tidal_connector.errors import TidalError
from tidal_connector.memory import Share, open_shared

SPAWN = multiprocessing.get_context("spawn")
WAIT_S = 30.0


def serve(pipe: Connection, length: int, settings: PoolConfig, share: Share) -> None:
    """Open the pool, say what came of it, and answer until told to end."""
    try:
        with open_shared(length, settings, share) as region:
            pipe.send(("open", region.report, region.length))
            while True:
                match pipe.recv():
                    case ("write", int(offset), bytes(data)):
                        region.buffer[offset : offset + len(data)] = data
                        pipe.send(None)
                    case ("read", int(offset), int(count)):
                        pipe.send(bytes(region.buffer[offset : offset + count]))
                    case ("check",):
                        pipe.send(said_by(region.check))
                    case _:
                        return
    except TidalError as error:
        pipe.send((type(error).__name__, str(error)))


def said_by(call: Any) -> str:
    """What an error says; empty where there is none."""
    try:
        call()
    except TidalError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Rank:
    """The test's end of a rank."""

    def __init__(self, length: int, settings: PoolConfig, share: Share) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(theirs, length, settings, share), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, *command: object) -> Any:
        """Tell the rank something, and return its answer."""
        self.pipe.send(command)
        return self.answer()

    def answer(self) -> Any:
        """What the rank says next."""
        assert self.pipe.poll(WAIT_S), "the rank says nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(WAIT_S)

    def end(self) -> None:
        """Let it close the pool and end."""
        with suppress(BrokenPipeError):  # it has ended by itself
            self.pipe.send(("end",))
        self.process.join(WAIT_S)
        if self.process.is_alive():
            self.kill()
        self.pipe.close()


@contextmanager
def ranks(world: int, length: int, settings: PoolConfig, name: str) -> Iterator[list[Rank]]:
    """All ranks of a pool, each in a process, once they have it; they have ended afterwards."""
    with ExitStack() as stack:
        found = []
        for rank in reversed(range(world)):  # the others wait for rank 0 at first
            found.append(Rank(length, settings, Share(name, rank, world, "f", WAIT_S)))
            stack.callback(found[-1].end)
        yield found[::-1]
