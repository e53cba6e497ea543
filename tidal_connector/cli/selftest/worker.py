# SPDX-License-Identifier: Apache-2.0
"""One thread that owns the device, and answers that are waited for with a deadline.

A device that hangs does so inside a call that nobody can interrupt. So all calls are made by this thread, and who waits
for it gives up in time. The thread is then lost, and with it the device: :class:`Stuck` says so, and nothing more may
be asked.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from tidal_connector.errors import TidalError

Result = TypeVar("Result")


class Stuck(TidalError):
    """The device did not answer in time."""


class Worker:
    """The device's thread, as a context manager; leaving it waits for the thread only if it is not stuck.

    Attributes:
        stuck: a call did not come back; the process has to be left without waiting for it.
    """

    def __init__(self) -> None:
        self.stuck = False
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tidal-selftest-device", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.put(None)
        if not self.stuck and not isinstance(error, KeyboardInterrupt):
            self._thread.join()

    def run(self, what: str, bound_s: float, call: Callable[[], Result]) -> Result:
        """Make a call on the device's thread and return what it returns, or raise what it raises.

        Args:
            what: is being done, for the message.
            bound_s: seconds until the device counts as stuck.
            call: without arguments.

        Raises:
            Stuck: it did not come back, now or at an earlier call.
        """
        if self.stuck:
            raise Stuck(f"{what}: not tried, an earlier call has not come back")
        answer: Future[Result] = Future()
        self._calls.put((call, answer))
        try:
            return answer.result(bound_s)
        except TimeoutError:
            if answer.done():  # the call itself raised it
                raise
            self.stuck = True
            raise Stuck(
                f"{what}: no answer from the device within {bound_s:g} s; look at npu-smi info and the plog files in "
                "~/ascend/log, and end the process that holds the device"
            ) from None

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, answer = item
            try:
                answer.set_result(call())
            except BaseException as error:  # whatever it is belongs to the caller
                answer.set_exception(error)
