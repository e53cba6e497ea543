# SPDX-License-Identifier: Apache-2.0
"""Waits for a rollout and says what happens meanwhile: one line for every change, and now and then that it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rich.console import Console

from tidal_connector.cluster import rollout as verbs
from tidal_connector.cluster.orders import AWAITS_ADMISSION
from tidal_connector.cluster.rollout_records import Rollout, Status
from tidal_connector.cluster.rollout_status import EngineStatus, RolloutStatus, rollout_status
from tidal_connector.cluster.steps_words import Phase
from tidal_connector.errors import RegistryLost
from tidal_connector.registry.base import Store

_POLL_S = 0.5
_QUIET_S = 15.0
"""Seconds without a change after which a log gets a line all the same; a terminal shows the time as it passes."""


def wait_for(
    store: Store, number: int, timeout_s: float, console: Console, clock: Callable[[], float] = time.monotonic
) -> RolloutStatus:
    """Wait until a rollout is done, halted or replaced, or the time is over; return what there is then.

    Args:
        store: of the cluster.
        number: of the rollout.
        timeout_s: seconds to wait.
        console: where what happens is said.
        clock: monotonic seconds.
    """
    began = said = clock()
    changes = Changes()
    with console.status("") as line:
        while True:
            try:
                found = rollout_status(verbs.read_view(store))
            except RegistryLost as error:  # it goes on all the same
                line.update(str(error))
                found = None
            now = clock()
            if found is not None:
                news = list(changes.since_last(found))
                if not news and not console.is_terminal and now - said > _QUIET_S:
                    news = [f"waits for {_missing(found)}"]
                for text in news:
                    said = now
                    console.print(f"[{now - began:4.0f} s] {text}", highlight=False, markup=False, soft_wrap=True)
                if has_ended(found, number) or now - began > timeout_s:
                    return found
                line.update(f"{now - began:.0f} s: waits for {_missing(found)}")
            time.sleep(_POLL_S)


def has_ended(found: RolloutStatus, number: int) -> bool:
    """Whether a rollout is done, halted or replaced."""
    return found.rollout.number != number or found.rollout.status in (Status.DONE, Status.HALTED)


class Changes:
    """What became different from one look at a rollout to the next."""

    def __init__(self) -> None:
        self._rollout: tuple[int, str, str] | None = None
        self._engines: dict[str, str] = {}

    def since_last(self, found: RolloutStatus) -> Iterator[str]:
        """Yield one line for the rollout and for each engine that is not as it was; the end of all comes last."""
        now = found.rollout
        about = list(self._rollout_lines(now))
        ended = now.status in (Status.DONE, Status.HALTED)
        yield from () if ended else about
        engines = {item.engine: _words(item) for item in found.engines}
        for name in sorted(self._engines.keys() - engines.keys()):
            yield f"{name} has ended"
        for name, text in engines.items():
            if self._engines.get(name) != text:
                yield text
        self._engines = engines
        yield from about if ended else ()

    def _rollout_lines(self, now: Rollout) -> Iterator[str]:
        rollout = (now.number, str(now.status), now.reason)
        if rollout != self._rollout:
            self._rollout = rollout
            yield f"rollout {now.number} to {now.revision} is {now.status}" + (f": {now.reason}" if now.reason else "")


def _words(item: EngineStatus) -> str:
    phase = item.phase + (f" ({item.note})" if item.note else "")
    if item.phase == Phase.LOST and item.note == AWAITS_ADMISSION:
        phase = "let in"  # it was told so, and has not said yet that it knows
    return f"{item.engine} on {item.node}, revision {item.revision}: {phase}"


def _missing(found: RolloutStatus) -> str:
    """Return which engines are on their way, and where each is."""
    moving = [f"{item.engine} ({item.phase})" for item in found.engines if item.phase != Phase.READY]
    return ", ".join(moving) or found.rollout.reason or "the next step"
