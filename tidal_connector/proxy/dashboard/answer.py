# SPDX-License-Identifier: Apache-2.0
"""What the page is told, as values: the form of ``/dashboard/data``. ``static/*.js`` reads it and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

COLUMNS = (
    "at",
    "requests_s",
    "failed_s",
    "in_flight",
    "queued",
    "first_p50",
    "first_p99",
    "token_p50",
    "token_p99",
    "bytes_s",
    "transfers",
    "hit_rate",
)
"""The numbers of one row of the past; what is not known is null. Seconds are the proxy's own, since its start."""

Row = Sequence[float | None]


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that an operator has to know.

    Attributes:
        level: ``critical`` (clients see errors), ``warning`` (something is lost, clients do not see it) or ``note``.
        what: one line.
        hint: what to do; may be empty.
        engine: the engine that it is about; empty where it is about none.
        since_s: for how long it has been so.
    """

    level: str
    what: str
    hint: str = ""
    engine: str = ""
    since_s: float = 0.0


class EngineRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One engine in one role.

    Attributes:
        engine, role, node, revision, http, note: as in ``view.EngineView``.
        state: ``starting``, ``ready``, ``draining``, ``down``, ``unreachable``, or, of one that was there lately,
            ``left`` (it had drained) or ``gone``.
        state_s: how long it has been in this state, as far as this proxy saw.
        requests: requests of this proxy that it works on now; tokens: their tokens.
        failures: requests of this proxy that failed on it, ever.
        running, waiting: requests in the engine, whoever sent them; null where it is not known.
        transfers: transfers in flight on its side.
        bytes_s: KV bytes per second, sent by prefill engines and received by decode engines; bytes: ever.
        kv: share of the engine's KV blocks (of the host pool where there is one) in use; slots: of selection slots.
        hit_rate: share of selected rows that were in the selection cache already, lately.
        quarantined: pages out of use until no late write can arrive.
        states: one letter for each stretch of the past, oldest first; loads: the most requests in it.
    """

    engine: str
    role: str
    state: str
    state_s: float
    http: str = ""
    node: str = ""
    revision: str = ""
    note: str = ""
    requests: int = 0
    tokens: int = 0
    failures: int = 0
    running: float | None = None
    waiting: float | None = None
    transfers: float | None = None
    bytes_s: float | None = None
    bytes: float | None = None
    kv: float | None = None
    slots: float | None = None
    hit_rate: float | None = None
    quarantined: float | None = None
    states: str = ""
    loads: Sequence[int] = ()


class Totals(msgspec.Struct, kw_only=True):
    """The proxy as a whole.

    Attributes:
        in_flight, max_in_flight, queued, max_queue, attempts, retries: as in ``view.ProxyState``.
        outcomes: finished requests by outcome, since the proxy's start.
        retries_minute: attempts beyond the first of a request, in the last minute.
        silent_s: how long the request that waits longest for its first byte has waited.
        bytes: KV bytes that were seen to move since the proxy's start.
    """

    in_flight: int
    max_in_flight: int
    queued: int
    max_queue: int
    attempts: int
    retries: int
    retries_minute: int
    outcomes: dict[str, int]
    silent_s: float
    bytes: float


class Registry(msgspec.Struct, frozen=True):
    """Where engines are read from; ``age_s`` is null before it was ever reached."""

    url: str
    fresh: bool
    age_s: float | None


class Rollout(msgspec.Struct, frozen=True):
    """Engines of more than one revision are there: how many of each, by revision."""

    revisions: dict[str, int]


class Answer(msgspec.Struct, kw_only=True):
    """Everything that the page shows.

    Attributes:
        boot: this life of the proxy; with another one the page forgets the past that it holds.
        sequence: number of the newest row; handed back as ``since``, only newer rows are sent.
        now_s: the proxy's own seconds at this moment, to which ``at`` of the rows refers.
        every_s: seconds until the next row.
        keep_s: how long a row is kept.
        listen, policy, version: of the proxy.
        level: the worst finding's, ``ok`` without one worse than a note; headline: one line.
        pairs: prefill engine, decode engine, requests now; barred: prefill engine, decode engine, reason.
        columns, rows: the past.
    """

    boot: str
    sequence: int
    now_s: float
    every_s: float
    keep_s: float
    listen: str
    policy: str
    version: str
    level: str
    headline: str
    findings: Sequence[Finding]
    engines: Sequence[EngineRow]
    pairs: Sequence[tuple[str, str, int]]
    barred: Sequence[tuple[str, str, str]]
    totals: Totals
    registry: Registry | None
    rollout: Rollout | None
    columns: Sequence[str] = COLUMNS
    rows: Sequence[Row] = ()
