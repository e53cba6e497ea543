# SPDX-License-Identifier: Apache-2.0
"""What an operator can say about rollouts: apply, undo, pause, resume. Each is one transaction on the registry.

An operator only writes what shall be; the agents' conductor does the rest, so that a terminal may close at any moment.
A word that crosses another operator's, or a decision of the conductor that changes what it rests on, is not written.
"""

from __future__ import annotations

import getpass
import secrets
import socket
import time
from collections.abc import Callable

import msgspec

from tidal_connector.cluster.conductor_view import observe
from tidal_connector.cluster.rollout_records import (
    ENGINES,
    HISTORY_LENGTH,
    SPECS,
    Kind,
    Rollout,
    Status,
    View,
    encode,
    expected,
    history_key,
    state_changes,
    view_of,
)
from tidal_connector.cluster.spec import ClusterSpec, revision_id, without_registry
from tidal_connector.cluster.steps_words import Phase
from tidal_connector.errors import ConfigError, Conflict, RegistryLost
from tidal_connector.registry.base import Delete, Put, Store

_ATTEMPTS = 20
_PATIENCE_S = 10.0
_PAUSE_S = 0.5

Change = Put | Delete


def whoami() -> str:
    """Return who gives the orders, as user@host."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def read_view(store: Store, patience_s: float = _PATIENCE_S) -> View:
    """Read everything that concerns rollouts, waiting so long for a store that does not answer.

    Raises:
        RegistryLost: it does not answer in time.
        TidalError: the state cannot be read.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return view_of(store.read(""))
        except RegistryLost:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)


def apply(store: Store, spec: ClusterSpec, by: str) -> Rollout:
    """Begin a rollout to a specification; where it is what the cluster has already, return the rollout that made it so.

    Raises:
        Conflict: another rollout goes on; the message says whose and since when.
        ConfigError: it cannot be rolled out.
        RegistryLost: the registry does not answer.
    """
    revision = revision_id(spec)
    token = secrets.token_hex(8)

    def change(view: View) -> tuple[Rollout, list[Change]]:
        now = view.rollout
        if now is not None and now.token == token:
            return now, []
        if now is not None and now.status in (Status.RUNNING, Status.PAUSED):
            if now.revision == revision:
                return now, []
            raise Conflict(_busy(now))
        if now is not None and now.revision == revision and now.status is Status.DONE:
            return now, []
        begun = _next(view, token, Kind.APPLY, revision, by)
        stored: list[Change] = [Put(SPECS + revision, encode(without_registry(spec)))]
        return begun, [*stored, *_begin(view, begun, by), *_anew(view)]

    return _transact(store, change)


def undo(store: Store, by: str, to: str = "") -> Rollout:
    """Begin a rollout back: to the last revision that was reached before the present one, or to one that is named.

    It may be given while a rollout goes on, another undo too, and takes its place; where that one goes to the very same
    revision already, it is returned.

    Raises:
        Conflict: another operator began a rollout at the same moment, or the very same undo is paused.
        ConfigError: there is no such revision.
        RegistryLost: the registry does not answer.
    """
    token = secrets.token_hex(8)
    answered: list[str] = []

    def change(view: View) -> tuple[Rollout, list[Change]]:
        now = view.rollout
        if now is None:
            raise ConfigError("nothing was ever rolled out in this cluster, so there is nothing to undo")
        if now.token == token:
            return now, []
        answered.append(now.token)
        if now.token != answered[0]:
            raise Conflict(_busy(now))  # what was to be undone has been replaced since: the word was about another one
        target = _undo_target(view, now, to)
        if now.kind is Kind.UNDO and now.revision == target and now.status is Status.RUNNING:
            return now, []
        if now.kind is Kind.UNDO and now.revision == target and now.status is Status.PAUSED:
            raise Conflict(
                f"rollout {now.number} is this very undo (to {now.revision}), and is paused; let it go on with: tidal "
                "rollout resume, or go elsewhere with: tidal rollout undo --to REVISION"
            )
        begun = _next(view, token, Kind.UNDO, target, by)
        return begun, _begin(view, begun, by)

    return _transact(store, change)


def never_reached(view: View, begun: Rollout) -> str:
    """Return one line of warning where a rollout goes to a revision that no earlier one has reached; else nothing."""
    earlier = [item for item in view.history if item.number < begun.number and item.revision == begun.revision]
    if not earlier or any(item.status is Status.DONE for item in earlier):
        return ""
    last = earlier[-1]
    why = f": {last.reason}" if last.reason else ""
    return f"revision {begun.revision} was never reached; rollout {last.number} to it was {last.status}{why}"


def pause(store: Store, by: str) -> Rollout:
    """Let a rollout take no further step; what is on its way comes to its end.

    Raises:
        ConfigError: none goes on.
        RegistryLost: the registry does not answer.
    """

    def change(view: View) -> tuple[Rollout, list[Change]]:
        now = _present(view)
        if now.status is Status.PAUSED:
            return now, []
        if now.status is not Status.RUNNING:
            raise ConfigError(
                f"rollout {now.number} to {now.revision} is {now.status}; only a running one can be paused"
            )
        paused = msgspec.structs.replace(now, status=Status.PAUSED, reason=f"paused by {by}", changed_by=by)
        return paused, list(state_changes(paused))

    return _transact(store, change)


def resume(store: Store, by: str) -> Rollout:
    """Let a paused rollout go on, or a halted one try again: engines that failed are started anew.

    Raises:
        ConfigError: it neither is paused nor halted.
        RegistryLost: the registry does not answer.
    """

    def change(view: View) -> tuple[Rollout, list[Change]]:
        now = _present(view)
        if now.status is Status.RUNNING:
            return now, []
        if now.status not in (Status.PAUSED, Status.HALTED):
            raise ConfigError(f"rollout {now.number} to {now.revision} is {now.status}; there is nothing to resume")
        again = msgspec.structs.replace(now, status=Status.RUNNING, reason="", changed_by=by, ended_at=None)
        return again, [*state_changes(again), *(_anew(view) if now.status is Status.HALTED else [])]

    return _transact(store, change)


def _anew(view: View) -> list[Change]:
    """Return the writes that start failed engines once more."""
    failed = {item.engine for item in observe(view, frozenset()) if item.phase is Phase.FAILED}
    return [
        Put(ENGINES + name, encode(msgspec.structs.replace(item, attempt=item.attempt + 1, why="", admitted=False)))
        for name, item in view.assignments.items()
        if name in failed or item.why
    ]


def _present(view: View) -> Rollout:
    if view.rollout is None:
        raise ConfigError("nothing was ever rolled out in this cluster; begin with: tidal rollout apply cluster.toml")
    return view.rollout


def _undo_target(view: View, now: Rollout, to: str) -> str:
    if to:
        found = [revision for revision in view.specs if revision.startswith(to)]
        if len(found) != 1:
            known = ", ".join(sorted(view.specs)) or "none"
            raise ConfigError(f"--to {to!r}: expected the beginning of one revision; known: {known}")
        return found[0]
    reached = [item.revision for item in view.history if item.status is Status.DONE and item.revision in view.specs]
    if now.kind is Kind.UNDO and now.status in (Status.RUNNING, Status.PAUSED) and reached:
        return reached[-1]  # where that undo comes from, or goes to already
    for revision in reversed(reached):
        if revision != now.revision:
            return revision
    raise ConfigError(
        f"no revision was reached before {now.revision}, so there is nothing to return to; apply another cluster.toml"
    )


def _next(view: View, token: str, kind: Kind, revision: str, by: str) -> Rollout:
    now = view.rollout
    return Rollout(
        number=now.number + 1 if now else 1,
        token=token,
        kind=kind,
        revision=revision,
        before=now.revision if now else "",
        by=by,
        at=time.time(),
    )


def _begin(view: View, begun: Rollout, by: str) -> list[Change]:
    """Return the writes that begin a rollout: its state, the end of the one before, and what is too old to keep."""
    changes: list[Change] = list(state_changes(begun))
    now = view.rollout
    if now is not None and now.status in (Status.RUNNING, Status.PAUSED):
        ended = msgspec.structs.replace(now, status=Status.REPLACED, changed_by=by, ended_at=time.time())
        changes.append(Put(history_key(now.number), encode(ended)))
    kept = [item for item in view.history if item.number > begun.number - HISTORY_LENGTH]
    changes += [Delete(history_key(item.number)) for item in view.history if item not in kept][:20]
    used = {item.revision for item in kept} | {item.revision for item in view.assignments.values()}
    used |= {begun.revision, begun.before}
    changes += [Delete(SPECS + revision) for revision in sorted(view.specs) if revision not in used][:20]
    return changes


def _busy(now: Rollout) -> str:
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now.at))
    other = "return with: tidal rollout undo"
    if now.kind is Kind.UNDO:
        other = "take its place with: tidal rollout undo --to REVISION"
    return (
        f"rollout {now.number} ({now.kind} of {now.revision}) was begun by {now.by} at {begun} and is {now.status}; "
        f"wait for it (tidal rollout status --wait), or {other}"
    )


def _transact(store: Store, change: Callable[[View], tuple[Rollout, list[Change]]]) -> Rollout:
    """Read, decide and write until it holds; a lost answer is settled by reading again.

    Raises:
        Conflict: others change the state again and again.
    """
    for _ in range(_ATTEMPTS):
        view = read_view(store)
        wanted, changes = change(view)
        if not changes:
            return wanted
        try:
            store.write(changes, expected(view, changes))
        except (Conflict, RegistryLost):
            continue  # the next round sees what holds, which may be this very write
        return wanted
    raise Conflict("the rollout's state changes faster than it can be read; try again")
