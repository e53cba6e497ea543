# SPDX-License-Identifier: Apache-2.0
"""The words of a rollout's planner: what shall be, what is seen, and the steps between them. Pure values."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from tidal_connector.ids import Role

OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
"""The role that an engine's counterpart has."""


class Phase(enum.StrEnum):
    """Where an engine is, as far as a rollout is concerned."""

    STARTING = "starting"
    """Started, or about to be; not healthy yet."""
    HEALTHY = "healthy"
    """Could serve; waits for its probe."""
    READY = "ready"
    """Gets clients' requests."""
    LOST = "lost"
    """Was let in, and is not ready now; its agent brings it back."""
    FAILED = "failed"
    """Ended too often, or was not healthy in time."""
    STOPPING = "stopping"
    """Drains, or ends."""
    GONE = "gone"
    """Has ended as it should; only its record is left."""


class Target(msgspec.Struct, frozen=True):
    """What one group shall be.

    Attributes:
        group, role, count: as in the cluster's file.
        surge: engines that it may have beyond its count.
        template: what its engines are made of.
        nodes: engine N is on node N modulo their number.
    """

    group: str
    role: Role
    count: int
    surge: int
    template: str
    nodes: tuple[str, ...]


class Limits(msgspec.Struct, frozen=True):
    """How careful a rollout is; see ``spec.ClusterTable``."""

    max_unavailable: int = 1
    max_surge: int = 0
    allow_outage: bool = False


class Seen(msgspec.Struct, frozen=True):
    """One engine, as it is.

    Attributes:
        engine: its id.
        group, slot: where it belongs.
        role, node, template: what it is, where, and what it was made of.
        phase: where it is in its life.
        layout: fingerprint of its KV; empty before it is known.
        why: reason of a failure.
    """

    engine: str
    group: str
    slot: int
    role: Role
    node: str
    template: str
    phase: Phase
    layout: str = ""
    why: str = ""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Run a new engine in a free slot."""

    engine: str
    group: str
    slot: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Drain an engine, and end it."""

    engine: str


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Drop the record of an engine that has ended."""

    engine: str


class Try(msgspec.Struct, frozen=True, tag="try"):
    """Send a probe through a pair; if it is answered, let in those of ``admit``.

    Attributes:
        prefill, decode: the pair; both the same engine where it serves alone.
        admit: the engines that are new.
    """

    prefill: str
    decode: str
    admit: tuple[str, ...]


class Halt(msgspec.Struct, frozen=True, tag="halt"):
    """Go no further: a new engine failed."""

    reason: str


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """Everything is as it shall be."""


Step: TypeAlias = Start | Stop | Forget | Try | Halt | Finish


def fit(one: Seen, other: Seen) -> bool:
    """Whether two engines' layouts are known and equal, and their roles a pair."""
    return bool(one.layout) and one.layout == other.layout and OTHER.get(one.role) is other.role


def serving(engines: Iterable[Seen]) -> list[Seen]:
    """Return the engines that are ready and have a counterpart that is (one that serves alone needs none)."""
    ready = [item for item in engines if item.phase is Phase.READY]
    return [item for item in ready if item.role is Role.BOTH or any(fit(item, other) for other in ready)]
