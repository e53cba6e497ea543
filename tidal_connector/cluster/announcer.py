# SPDX-License-Identifier: Apache-2.0
"""What an engine is announced as: pure judgements on what was seen of it, and the entry that follows them."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import msgspec

from tidal_connector.cluster.engine_plan import EnginePlan
from tidal_connector.cluster.prober import INQUIRE_EVERY, Seen
from tidal_connector.cluster.serving import SuperviseConfig
from tidal_connector.log import get_logger
from tidal_connector.registry.base import Store
from tidal_connector.registry.members import Announcement, Member, State, announce

_log = get_logger(__name__)

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

    def tell(self, member: Member) -> None:
        """Announce, unless this is what was announced last; does not block."""
        last = self._last
        if member == last:
            return
        if self._announcement is None:
            self._announcement = announce(self._store, member, self._ttl_s)
        else:
            self._announcement.update(member)
        self._last = member
        if last is None or (last.state, last.note) != (member.state, member.note) or last.http != member.http:
            _log.info("%s", said_of(member))

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
        if self._announcement is not None:
            self._announcement.withdraw()


def said_of(member: Member) -> str:
    """Return an engine's state as one line for the log."""
    where = f" at {member.http}, control {member.control}" if member.state is State.READY else ""
    who = f", incarnation {member.incarnation[:8]}" if member.state is State.READY else ""
    return f"engine {member.engine} is {member.state}{where}{who}" + (f": {member.note}" if member.note else "")
