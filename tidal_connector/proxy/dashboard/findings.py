# SPDX-License-Identifier: Apache-2.0
"""What is wrong, worst first: the first thing on the page. Pure.

``critical`` means that clients see errors; ``warning`` that something is lost and clients do not see it yet; ``note``
that somebody should know. A finding's key stays the same while its words change: so it is known since when it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tidal_connector.proxy.dashboard.answer import EngineRow
from tidal_connector.proxy.view import ProxyState

CRITICAL, WARNING, NOTE = "critical", "warning", "note"
LEVELS = (CRITICAL, WARNING, NOTE)

SILENT_S = 60.0
"""A request that waits so long for its first byte is worth a look."""

FULL = 0.9
LONGEST = 400
"""Characters of a text that somebody else wrote."""


class Minute(msgspec.Struct, frozen=True):
    """What happened in the last minute.

    Attributes:
        failed: requests that failed for their clients, by outcome.
        retries: attempts beyond a request's first.
        on_engine: legs that failed, by engine.
        transfers_failed, handshakes_refused: by engine.
    """

    failed: Mapping[str, int]
    retries: int
    on_engine: Mapping[str, int]
    transfers_failed: Mapping[str, float]
    handshakes_refused: Mapping[str, float]


class Found(msgspec.Struct, frozen=True):
    """A finding before it is known since when; fields as in ``answer.Finding``."""

    key: str
    level: str
    what: str
    hint: str = ""
    engine: str = ""


def find(state: ProxyState, rows: Sequence[EngineRow], minute: Minute) -> list[Found]:
    """Return everything that is worth saying, worst first."""
    found = [*_proxy(state, minute), *_registry(state), *_engines(rows, minute), *_pairs(state), *_rollout(rows)]
    return sorted(found, key=lambda each: LEVELS.index(each.level))


def verdict(found: Sequence[Found], rows: Sequence[EngineRow]) -> tuple[str, str]:
    """Return the level of the whole and one line that says how it is."""
    levels = Counter(each.level for each in found)
    if levels[CRITICAL]:
        return CRITICAL, "No request can be served." if found[0].key == "not-ready" else "Requests are failing."
    if levels[WARNING]:
        return WARNING, f"Serving, with {_counted(levels[WARNING], 'warning')}."
    ready = [row for row in rows if row.state == "ready"]
    counted = Counter(row.role for row in ready)
    kinds = [_counted(counted[role], f"{role} engine") for role in ("prefill", "decode") if counted[role]]
    return "ok", f"All is well: {' and '.join(kinds)} ready." if ready else "No engine is known yet."


def _proxy(state: ProxyState, minute: Minute) -> Iterator[Found]:
    if not state.ready:
        why = clip(state.why_not) or "no pair of engines can be formed"
        yield Found(
            "not-ready", CRITICAL, f"No request can be served: {why}", "Look at the engines below, and at /health."
        )
    if minute.failed:
        number = sum(minute.failed.values())
        kinds = ", ".join(f"{kind.replace('_', ' ')} {count}" for kind, count in sorted(minute.failed.items()))
        where = ", ".join(f"{engine} ({count})" for engine, count in sorted(minute.on_engine.items()))
        what = f"{_counted(number, 'request')} failed in the last minute: {kinds}."
        yield Found("failed", CRITICAL, what, f"Legs failed on {clip(where)}." if where else "")
    if state.max_queue and state.queued >= FULL * state.max_queue:
        what = f"The queue is nearly full: {state.queued} of {state.max_queue} places."
        yield Found("queue", WARNING, what, "Clients will be told 429 to try later. Add engines, or shed load.")
    if state.silent_s > SILENT_S:
        what = f"A request has waited {duration(state.silent_s)} for its first byte."
        yield Found("silent", WARNING, what, "A long prompt, a full engine, or one that hangs.")
    if minute.retries:
        requests = "1 request was" if minute.retries == 1 else f"{minute.retries} requests were"
        yield Found("retries", NOTE, f"{requests} tried again on another pair in the last minute.")


def _registry(state: ProxyState) -> Iterator[Found]:
    registry = state.registry
    if registry is None:
        return
    if not registry.fresh:
        age = "was never reached" if registry.age_s is None else f"was last reached {duration(registry.age_s)} ago"
        what = f"The registry {clip(registry.url)} {age}; the engines are those last heard of."
        yield Found("registry", WARNING, what, "Requests go on. Look at etcd's health: tidal doctor.")
    for key, why in sorted(registry.odd.items())[:20]:
        yield Found(f"odd {key}", WARNING, f"Registry entry {clip(key)} was left out: {clip(why)}")


def _engines(rows: Sequence[EngineRow], minute: Minute) -> Iterator[Found]:
    for row in rows:
        yield from _engine(row)
    for kind, text, numbers in (
        ("transfer", "failed", minute.transfers_failed),
        ("handshake", "refused", minute.handshakes_refused),
    ):
        if where := {engine: round(number) for engine, number in sorted(numbers.items()) if number}:
            engines = clip(", ".join(f"{engine} ({number})" for engine, number in where.items()))
            what = f"{_counted(sum(where.values()), kind)} {text} in the last minute: {engines}."
            yield Found(kind, WARNING, what, "The engines' logs say why.")


def _engine(row: EngineRow) -> Iterator[Found]:
    name = f"{row.role.capitalize()} engine {clip(row.engine)}"
    note = f" It says: {clip(row.note)}" if row.note else ""
    key = f"{row.role} {row.engine}"
    if row.state == "unreachable":
        what = f"{name} cannot be reached at {clip(row.http)}.{note}"
        yield Found(f"unreachable {key}", WARNING, what, "Is it running? Try tidal status.", row.engine)
    elif row.state == "down":
        yield Found(f"down {key}", WARNING, f"{name} is down.{note}", "The engine's log says why.", row.engine)
    elif row.state == "gone":
        what = f"{name} has left the registry without draining."
        yield Found(f"gone {key}", WARNING, what, "It died, or its machine did.", row.engine)
    elif row.state in {"starting", "draining"}:
        yield Found(f"{row.state} {key}", NOTE, f"{name} is {row.state}.{note}", engine=row.engine)
    if (row.slots or 0) >= FULL:
        what = f"{name}: {row.slots:.0%} of the selection slots are taken."
        yield Found(f"slots {key}", NOTE, what, "More requests will wait.", row.engine)
    if row.quarantined:
        what = f"{name}: {row.quarantined:.0f} pages are out of use until no late write can arrive."
        yield Found(f"quarantine {key}", NOTE, what, engine=row.engine)


def _pairs(state: ProxyState) -> Iterator[Found]:
    reasons = Counter(pair.barred for pair in state.traffic if pair.barred)
    for reason in dict.fromkeys((*state.barred, *reasons)):
        count = f" ({reasons[reason]} pairs)" if reasons[reason] > 1 else ""
        yield Found(f"barred {reason}", WARNING, f"Barred: {clip(reason)}{count}")


def _rollout(rows: Sequence[EngineRow]) -> Iterator[Found]:
    if revisions := mixed_revisions(rows):
        parts = ", ".join(f"{count} of {clip(revision)}" for revision, count in sorted(revisions.items()))
        yield Found("rollout", NOTE, f"A rollout is in progress: {parts}.", "tidal rollout status")


def mixed_revisions(rows: Sequence[EngineRow]) -> dict[str, int]:
    """Count the engines that are there, by revision; empty where they are not of several."""
    revisions = Counter(row.revision for row in rows if row.revision and row.state not in {"gone", "left"})
    return dict(revisions) if len(revisions) > 1 else {}


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def clip(text: str) -> str:
    """Return a text that somebody else wrote, on one line and not longer than ``LONGEST``."""
    line = " ".join(text[: 4 * LONGEST].split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def duration(seconds: float) -> str:
    """Return seconds for people: ``12 s``, ``3 min``, ``2 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
