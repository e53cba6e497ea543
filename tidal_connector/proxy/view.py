# SPDX-License-Identifier: Apache-2.0
"""What a proxy shows of itself: a frozen snapshot for pages and tools, which can change nothing.

Takes nothing and knows no HTTP: ``app`` gives an object of this form to whoever draws it (``dashboard``). Event loop's
thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine in one role, as this proxy sees it; an engine of role ``both`` is there twice.

    Attributes:
        engine: its id.
        role: ``prefill`` or ``decode``.
        state: ``starting``, ``ready``, ``draining`` or ``down``; an engine of the proxy's file is ``ready``.
        reachable: False while this proxy gives it nothing because a connection to it failed.
        source: ``file`` or ``registry``.
        http: base URL of its HTTP server.
        control: address of its control channel; may be empty.
        incarnation, revision, node, model, layout, note: as it announced them; may be empty.
        requests: requests of this proxy that it works on now.
        tokens: tokens that this proxy has dispatched to it and that are not answered yet.
        served: requests of this proxy that it has answered.
        failures: requests of this proxy that failed on it.
    """

    engine: str
    role: str
    state: str
    reachable: bool
    source: str
    http: str
    control: str = ""
    incarnation: str = ""
    revision: str = ""
    node: str = ""
    model: str = ""
    layout: str = ""
    note: str = ""
    requests: int = 0
    tokens: int = 0
    served: int = 0
    failures: int = 0


class RegistryView(msgspec.Struct, frozen=True):
    """Where engines are read from.

    Attributes:
        url: of the registry, without password.
        fresh: False while it cannot be reached; the engines are then those last heard of.
        age_s: seconds since it was last known to be reached; None before it ever was.
        odd: why an entry was left out, by its key.
    """

    url: str
    fresh: bool
    age_s: float | None
    odd: Mapping[str, str] = {}


class PairView(msgspec.Struct, frozen=True):
    """A prefill and a decode engine.

    Attributes:
        prefill, decode: their ids.
        requests: requests that the two work on together now.
        barred: why the pair may not be formed; empty where it may.
    """

    prefill: str
    decode: str
    requests: int = 0
    barred: str = ""


class Sample(msgspec.Struct, frozen=True):
    """One finished request.

    Attributes:
        at: seconds since 1970 at its end.
        outcome: a value of ``meters.Outcome``.
        queued_s: seconds in the queue, and without a pair of engines.
        first_byte_s: seconds from the request to the first byte of the answer; None where there was none. With a stream
            it is the time to the first token.
        seconds: from the request to the last byte.
        events: events of the stream, each about a token; 0 where the answer was no stream.
        event_s: mean seconds between two events: the time per output token; None where there are not two.
        prefill, decode: the engines that answered; empty where none did.
        attempts: pairs that were tried.
    """

    at: float
    outcome: str
    queued_s: float
    first_byte_s: float | None
    seconds: float
    events: int
    event_s: float | None
    prefill: str
    decode: str
    attempts: int


class ProxyState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at one moment.

    Attributes:
        at: seconds since 1970.
        started_at: seconds since 1970 at the proxy's start.
        listen: where it serves.
        policy: how it chooses engines.
        ready: whether a pair of engines can be formed now.
        why_not: one line that says why none can; empty where one can.
        engines: prefill engines first, each kind in the order in which they are chosen among equals.
        registry: None where all engines come from the file.
        pairs: how many pairs of ready, reachable engines may be formed.
        barred: why other pairs may not, each reason once.
        in_flight, max_in_flight: requests that engines work on, and how many may.
        queued, max_queue: requests that wait, and how many may.
        requests: finished requests by outcome, since the start.
        attempts, retries: pairs dispatched, and those that were not a request's first.
        recent: the last finished requests (up to 1000), oldest first.
        traffic: the pairs that work on a request now, and those that may not be formed; others are left out.
        silent_s: how long the request that waits longest for its first byte has waited; 0 where none waits.
    """

    at: float
    started_at: float
    listen: str
    policy: str
    ready: bool
    why_not: str
    engines: tuple[EngineView, ...]
    registry: RegistryView | None
    pairs: int
    barred: tuple[str, ...]
    in_flight: int
    max_in_flight: int
    queued: int
    max_queue: int
    requests: Mapping[str, int]
    attempts: int
    retries: int
    recent: tuple[Sample, ...]
    traffic: tuple[PairView, ...] = ()
    silent_s: float = 0.0


class View(Protocol):
    """Looks at a running proxy."""

    def state(self) -> ProxyState:
        """Return everything as it is now."""

    async def read(self, engine: str, path: str) -> bytes | None:
        """Return the body of an engine's answer to ``GET path`` (such as ``/metrics``).

        None where it is not known, cannot be reached, answers anything but 200, or not within the bound of health
        checks. Bounded to 4 MiB.
        """
