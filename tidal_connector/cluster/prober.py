# SPDX-License-Identifier: Apache-2.0
"""Looks after one engine from outside: is it healthy, who is it, does it listen where it should, what does it still do.

One thread of its own asks; whoever decides reads :class:`Seen`, a value. So a question that takes long delays no
decision: what is decided on is how old the last good answer is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import httpx
import msgspec

from tidal_connector.cluster.engine_plan import EnginePlan
from tidal_connector.cluster.listeners import listening_fault
from tidal_connector.cluster.series import parse_series, work_left
from tidal_connector.cluster.serving import SuperviseConfig
from tidal_connector.control.inquiry import inquire
from tidal_connector.control.messages import About
from tidal_connector.errors import PeerLost, TidalError

NEVER = float("-inf")
INQUIRE_EVERY = 3  # rounds: the control channel is another thread of the engine than /health
_EAGER_S = 0.25  # between two looks at an engine that somebody waits for: it starts, or drains
_END_S = 10.0


class Seen(msgspec.Struct, frozen=True):
    """What was seen of an engine last.

    Attributes:
        healthy_at: when ``/health`` last answered 200 (monotonic seconds).
        about: what its worker said of itself; None before it did.
        about_at: when.
        fault: why it must not serve, though it answers; empty where nothing is wrong.
        work: what it still does, by kind; None where that is not known (or was not asked for).
        work_at: when.
    """

    healthy_at: float = NEVER
    about: About | None = None
    about_at: float = NEVER
    fault: str = ""
    work: Mapping[str, int] | None = None
    work_at: float = NEVER

    def known(self) -> bool:
        """Whether it once was healthy and said who it is."""
        return self.healthy_at > NEVER and self.about is not None


class Prober:
    """Asks one engine again and again; a context manager that owns the thread.

    Args:
        plan: where it is.
        settings: how often, and how long an answer may take.
        pids: returns its processes, of which one must be the listener.
    """

    def __init__(self, plan: EnginePlan, settings: SuperviseConfig, pids: Callable[[], Sequence[int]]) -> None:
        self._plan = plan
        self._settings = settings
        self._pids = pids
        self._seen = Seen()
        self._rounds = 0
        self._load = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tidal-probe", daemon=True)

    @property
    def seen(self) -> Seen:
        """What was seen so far."""
        return self._seen

    def watch_work(self) -> None:
        """From now on also ask what the engine still does, and more often."""
        self._load.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        # One connection at a time and none kept: an engine that was replaced on its port must not answer for another.
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(
            base_url=self._plan.http_here, timeout=self._settings.probe_s, verify=False, trust_env=False, limits=limits
        ) as client:
            while not self._stop.is_set():
                self._round(client)
                eager = self._load.is_set() or not self._seen.known()
                self._stop.wait(min(_EAGER_S, self._settings.probe_every_s) if eager else self._settings.probe_every_s)

    def _round(self, client: httpx.Client) -> None:
        try:
            healthy = client.get("/health").status_code == httpx.codes.OK
        except (httpx.TransportError, httpx.InvalidURL):
            healthy = False
        if healthy:
            self._note(healthy_at=time.monotonic())
            if not self._seen.known() or self._seen.fault or self._rounds % INQUIRE_EVERY == 0:
                self._inquire()
            self._rounds += 1
        if self._load.is_set():
            self._look_at_work(client)

    def _inquire(self) -> None:
        """Ask the control channel who it is; a silent one leaves what was known, which grows old."""
        plan = self._plan
        try:
            about = inquire(plan.control_here, self._settings.probe_s)
        except PeerLost:
            return
        except TidalError as error:
            self._note(fault=str(error))
            return
        if about.identity.engine != plan.engine:
            self._note(fault=f"engine {about.identity.engine!r} answers at {plan.control_here}: give each its own port")
            return
        pids = self._pids()
        fault = listening_fault("the HTTP server", *plan.http_bind, pids)
        fault = fault or listening_fault("the control channel", *plan.control_bind, pids)
        self._note(about=about, about_at=time.monotonic(), fault=fault)

    def _look_at_work(self, client: httpx.Client) -> None:
        try:
            answer = client.get("/metrics")
        except httpx.TransportError:
            return
        if answer.status_code == httpx.codes.OK:
            self._note(work=work_left(parse_series(answer.text)), work_at=time.monotonic())

    def _note(self, **news: object) -> None:
        self._seen = msgspec.structs.replace(self._seen, **news)
