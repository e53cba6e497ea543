# SPDX-License-Identifier: Apache-2.0
"""One attempt of one request on one pair of engines: both legs at once, one verdict, nothing left behind.

The first failure of either leg ends both, as does word that an engine has ended or begun a new life: what it was sent
will not come back, even where its connection stays open. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec

from tidal_connector.ids import new_transfer_id
from tidal_connector.proxy.engines import Answer, Failure, failure, knock, run_leg
from tidal_connector.proxy.legs import Body, ClientRequest, decode_body, prefill_body
from tidal_connector.proxy.meters import Meters
from tidal_connector.proxy.picker import Picked, Picker
from tidal_connector.proxy.policy import Pair
from tidal_connector.proxy.roster import Change, Engine, Roster
from tidal_connector.proxy.settings import Timeouts
from tidal_connector.proxy.wire import Client, WireError
from tidal_connector.registry.members import State

_Leg = asyncio.Task[Answer | Failure]


class Failed(msgspec.Struct, frozen=True):
    """A failed attempt, and the engine that it failed on."""

    engine: Engine
    how: Failure


class Attempts:
    """Dispatches attempts, and ends those that cannot succeed any more.

    Args:
        client: to all engines.
        timeouts: bounds of each leg.
        roster: the engines.
        picker: is told which engines cannot be reached, and which answer.
        meters: counts.
    """

    def __init__(self, client: Client, timeouts: Timeouts, roster: Roster, picker: Picker, meters: Meters) -> None:
        self._client = client
        self._timeouts = timeouts
        self._picker = picker
        self._meters = meters
        self._waiting: dict[asyncio.Future[Failed], tuple[Engine, ...]] = {}
        self._probes: set[asyncio.Task[None]] = set()
        self.traffic: dict[Pair, int] = {}
        roster.listen(self._follow)

    @contextlib.asynccontextmanager
    async def run(
        self, request: ClientRequest, request_id: str, picked: Picked, deadline: float
    ) -> AsyncIterator[Answer | Failed]:
        """Dispatch both legs; yield the first verdict; end both legs, and close the claims, on the way out.

        Args:
            request: the client's.
            request_id: of this attempt.
            picked: the engines.
            deadline: of the whole request, in monotonic seconds.
        """
        now = time.monotonic()
        prefill, decode = picked.prefill, picked.decode
        transfer = new_transfer_id()
        headers = request.headers | {"x-request-id": request_id}
        bounds, left = self._timeouts, deadline - now
        self._meters.attempted()
        prefill_leg = self._dispatch(
            prefill, request, prefill_body(request, transfer, decode.engine), headers, min(bounds.prefill_s, left)
        )
        prefill_claim, decode_claim = picked.claims
        prefill_leg.add_done_callback(lambda _: prefill_claim.close())
        sent = decode_body(request, transfer, prefill.engine, prefill.control)
        decode_leg = self._dispatch(decode, request, sent, headers, min(bounds.decode_s, left))
        try:
            with self._counted(picked):
                yield await self._verdict(prefill_leg, decode_leg, picked, now)
        finally:
            decode_claim.close()
            await end(prefill_leg, decode_leg)

    def _dispatch(
        self, engine: Engine, request: ClientRequest, body: Body, headers: dict[str, str], bound_s: float
    ) -> _Leg:
        leg = run_leg(
            self._client, engine.url, request.path, body, headers, bound_s=max(bound_s, 0.0), engine=engine.engine
        )
        return asyncio.create_task(leg)

    @contextlib.contextmanager
    def _counted(self, picked: Picked) -> Iterator[None]:
        pair = picked.prefill.engine, picked.decode.engine
        self.traffic[pair] = self.traffic.get(pair, 0) + 1
        try:
            yield
        finally:
            self.traffic[pair] -= 1
            if not self.traffic[pair]:
                del self.traffic[pair]

    async def _verdict(self, prefill_leg: _Leg, decode_leg: _Leg, picked: Picked, started: float) -> Answer | Failed:
        lost: asyncio.Future[Failed] = asyncio.get_running_loop().create_future()
        self._waiting[lost] = (picked.prefill, picked.decode)
        waiting: set[asyncio.Future[Any]] = {prefill_leg, decode_leg, lost}
        try:
            while True:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if decode_leg in done and isinstance(answer := decode_leg.result(), Answer):
                    self._picker.reached(picked.decode)
                    self._meters.served(picked.decode)
                    return answer
                failed = [
                    self._note_failure(engine, how)
                    for engine, leg in ((picked.prefill, prefill_leg), (picked.decode, decode_leg))
                    if leg in done and isinstance(how := leg.result(), Failure)
                ]
                if failed:
                    return min(failed, key=lambda item: item.how.retryable)
                if lost in done:
                    return self._note_failure(lost.result().engine, lost.result().how)
                # From here on the decode engine itself finds out whether the rest arrives; the prefill engine may well
                # have been drained meanwhile.
                self._waiting[lost] = (picked.decode,)
                self._picker.reached(picked.prefill)
                self._meters.served(picked.prefill)
                self._meters.prefill_seconds.observe(time.monotonic() - started)
        finally:
            del self._waiting[lost]

    def _note_failure(self, engine: Engine, how: Failure) -> Failed:
        if not how.refused:  # a refusal is the client's doing
            self._meters.failed(engine)
        if how.unreachable:
            self._picker.out_of_reach(engine)
        return Failed(engine, how)

    def _follow(self, changes: list[Change]) -> None:
        for change in changes:
            before, after = change.before, change.after
            if before is None or not any(before.key == mine.key for each in self._waiting.values() for mine in each):
                continue
            if after is None:  # its lease may have run out for no fault of its own, so it is asked
                probe = asyncio.create_task(self._probe(before))
                self._probes.add(probe)
                probe.add_done_callback(self._probes.discard)
            elif after.state is State.DOWN:
                self._lose(before, "is down")
            elif before.incarnation and after.incarnation not in ("", before.incarnation):
                self._lose(before, "was started anew")

    async def _probe(self, engine: Engine) -> None:
        try:
            await knock(self._client, engine.url, self._timeouts.health_s)
        except (WireError, TimeoutError):
            self._lose(engine, "left the registry and does not answer")

    def _lose(self, engine: Engine, why: str) -> None:
        for lost, engines in self._waiting.items():
            for mine in engines:
                if not lost.done() and mine.key == engine.key and mine.incarnation == engine.incarnation:
                    how = failure(502, f"{engine.side} engine {engine.engine} {why}", retryable=True)
                    lost.set_result(Failed(mine, how))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """End what was asked in the background at the end of the context."""
        try:
            yield
        finally:
            await end(*self._probes)


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what still runs, wait for it, and close answers that nobody has taken to the end.

    The client may leave while this runs; the closing goes on to its end all the same.
    """
    running = [task for task in tasks if not task.done()]
    if running:
        for task in running:
            task.cancel()
        waiting = asyncio.create_task(_ended(running))
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            await waiting
            _close(tasks)
            raise
    _close(tasks)


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks)


def _close(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        if not task.cancelled() and task.exception() is None and isinstance(task.result(), Answer):
            task.result().close()
