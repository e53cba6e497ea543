# SPDX-License-Identifier: Apache-2.0
"""What an engine is announced as: pure judgements on what was seen of it, and the entry that follows them."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import Self

import msgspec

from tidal_connector.cluster.engine_plan import EnginePlan
from tidal_connector.cluster.prober import INQUIRE_EVERY, Seen
from tidal_connector.cluster.serving import SuperviseConfig
from tidal_connector.log import get_logger
from tidal_connector.registry.base import Snapshot, Store
from tidal_connector.registry.members import MEMBERS, Announcement, Member, State, announce, members_of

_log = get_logger(__name__)

_TAKEN_S = 1.0  # for which an entry of the same addresses must stand until it is another's, not one's own just written
_LAST_WORD_S = 1.0  # that the registry has for the note of an engine that is withdrawn right after


def judge(seen: Seen, settings: SuperviseConfig, now: float) -> tuple[State, str]:
    """Return what an engine whose process runs is, and why where that needs saying. Pure.

    Args:
        seen: of it.
        settings: deadlines.
        now: monotonic seconds.
    """
    if seen.fault:
        return State.DOWN, seen.fault
    if not seen.known():
        return State.STARTING, ""
    silent_s = now - seen.healthy_at
    if silent_s > settings.down_after_s:
        return State.DOWN, f"/health has not answered for {silent_s:.0f} s"
    silent_s = now - seen.about_at
    if silent_s > settings.down_after_s + INQUIRE_EVERY * (settings.probe_every_s + settings.probe_s):
        return State.DOWN, f"the control channel has not answered for {silent_s:.0f} s"
    return State.READY, ""


def member_of(plan: EnginePlan, seen: Seen, state: State, note: str) -> Member:
    """Return the entry of an engine. Pure."""
    about = seen.about
    member = Member(
        engine=plan.engine,
        role=plan.role,
        state=state,
        http=plan.http,
        control=plan.control,
        revision=plan.revision,
        node=plan.node,
        model=plan.model,
        note=note,
    )
    if about is None:
        return member
    return msgspec.structs.replace(
        member,
        incarnation=about.identity.incarnation,
        layout=about.fingerprint,
        transfer=about.endpoint,
        requests=about.requests,
        kv_tokens=about.kv_tokens,
    )


class Announcer:
    """One engine's entry; a context manager that withdraws it.

    Args:
        store: where.
        ttl_s: after a death of this process the entry is gone within so many seconds.
    """

    def __init__(self, store: Store, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._announcement: Announcement | None = None
        self._last: Member | None = None
        self._standing: Member | None = None  # under this engine's name, whoever wrote it; from the store's thread
        self._taken_at: float | None = None
        self._taken_said = False
        self._exit = contextlib.ExitStack()

    def tell(self, member: Member) -> None:
        """Announce, unless this is what was announced last; does not block."""
        last = self._last
        self._look_who_stands(member)
        if member == last:
            return
        if self._announcement is None:
            self._announcement = announce(self._store, member, self._ttl_s)
            self._exit.enter_context(self._store.watch(MEMBERS + member.engine, self._heard))
        else:
            self._announcement.update(member)
        self._last = member
        if last is None or (last.state, last.note) != (member.state, member.note) or last.http != member.http:
            _log.info("%s%s", said_of(member), " (not listed: another one has its name)" if self._taken_said else "")

    def last_word(self, member: Member) -> None:
        """Announce why the entry goes, and give the registry a moment for it."""
        self.tell(member)
        if self._announcement is not None:
            self._announcement.wait(_LAST_WORD_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()
        if self._announcement is not None:
            self._announcement.withdraw()

    def _heard(self, snapshot: Snapshot) -> None:
        last = self._last  # the prefix also names engines called alike
        self._standing = members_of(snapshot).engines.get(last.engine) if last is not None else None

    def _look_who_stands(self, mine: Member) -> None:
        """Warn once when another engine has this one's name, and tell when it has let go."""
        standing, announcement = self._standing, self._announcement
        if announcement is None or announcement.held or standing is None:
            self._taken_at = None
            if self._taken_said and announcement is not None and announcement.held:
                self._taken_said = False
                _log.info("engine %s is listed now", mine.engine)
            return
        now = time.monotonic()
        if self._taken_at is None:
            self._taken_at = now
        elsewhere = (standing.http, standing.control) != (mine.http, mine.control)
        if (elsewhere or now - self._taken_at >= _TAKEN_S) and not self._taken_said:
            self._taken_said = True
            _log.warning("%s", taken_by(standing))


def taken_by(holder: Member) -> str:
    """Return what is wrong where another engine is announced under this one's name, and what helps."""
    where = holder.http + (f" on node {holder.node}" if holder.node else "")
    return (
        f"engine {holder.engine} is not listed, and gets no requests: another engine of this name is announced, at "
        f"{where}; give this one another name (engine = ... in its file), or end that one"
    )


def said_of(member: Member) -> str:
    """Return an engine's state as one line for the log."""
    where = f" at {member.http}, control {member.control}" if member.state is State.READY else ""
    who = f", incarnation {member.incarnation[:8]}" if member.state is State.READY else ""
    return f"engine {member.engine} is {member.state}{where}{who}" + (f": {member.note}" if member.note else "")
