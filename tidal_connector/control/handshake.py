# SPDX-License-Identifier: Apache-2.0
"""Who may talk to whom: pure checks of :class:`Hello` and :class:`Welcome`. Every refusal names both values.

Takes the words of a peer; hands on a :class:`Peer`, the only thing about it that the rooms get to see.
"""

from __future__ import annotations

import msgspec

from tidal_connector.control.messages import About, Hello, Identity, Welcome
from tidal_connector.control.shares import SHARE_RULE
from tidal_connector.errors import LayoutMismatch, ProtocolError
from tidal_connector.ids import EngineId
from tidal_connector.layout import KVLayout, Placement


class Capacity(msgspec.Struct, frozen=True):
    """How much a worker serves at once; 0 where that is not known.

    Attributes:
        requests: most requests in one step.
        kv_tokens: tokens of KV that its pages hold.
    """

    requests: int = 0
    kv_tokens: int = 0


UNKNOWN = Capacity()
"""Of a worker that does not say how much it serves."""


class Local(msgspec.Struct, frozen=True):
    """What this worker says about itself.

    Attributes:
        identity: engine, incarnation, rank and size.
        layout: what our KV is.
        placement: where it is.
        endpoint: what the transfer plane of a peer needs to reach it.
        lease_s: seconds of silence after which we take a peer for lost.
        capacity: how much this worker serves at once.
        siblings: control addresses of all ranks of this engine, in their order; empty where it has one.
    """

    identity: Identity
    layout: KVLayout
    placement: Placement
    endpoint: str
    lease_s: float
    capacity: Capacity = UNKNOWN
    siblings: tuple[str, ...] = ()


class Peer(msgspec.Struct, frozen=True):
    """What a session knows about the other side.

    Attributes:
        identity: engine, incarnation, rank and size.
        endpoint: its transfer plane.
        lease_s: the shorter of both sides' leases.
        placement: where its KV is; None for a peer that never receives from us.
        siblings: control addresses of all ranks of its engine, where we called it.
    """

    identity: Identity
    endpoint: str
    lease_s: float
    placement: Placement | None = None
    siblings: tuple[str, ...] = ()

    @property
    def host(self) -> str:
        """Host of the peer's transfer plane, without brackets."""
        return self.endpoint.rpartition(":")[0].strip("[]")


def hello(local: Local, expects: EngineId, door: str = "") -> Hello:
    """Introduce this worker to the engine that it expects at an address, and name the door that is kept for it."""
    endpoint = door or local.endpoint
    return Hello(local.identity, expects, local.layout, local.placement, endpoint, local.lease_s, SHARE_RULE)


def about(local: Local, *, sends: bool, receives: bool) -> About:
    """Describe this worker to somebody who opens no session."""
    capacity = local.capacity
    return About(
        local.identity,
        sends,
        receives,
        local.layout,
        local.layout.fingerprint(),
        local.lease_s,
        local.endpoint,
        capacity.requests,
        capacity.kv_tokens,
    )


def answer(local: Local, heard: Hello) -> tuple[Welcome, Peer]:
    """Check a caller.

    Raises:
        ProtocolError: it looks for another engine, or its identity contradicts itself.
        LayoutMismatch: its KV differs from ours, or its regions do not fit its own layout.
    """
    mine = local.identity
    if heard.expects != mine.engine:
        raise ProtocolError(
            f"engine {heard.expects!r} was looked for, engine {mine.engine!r} is here: correct its address"
        )
    _check_identity(heard.identity)
    _check_shares(mine, heard.identity, heard.shares)
    if heard.identity.incarnation == mine.incarnation:
        raise ProtocolError(f"engine {mine.engine!r} called itself: correct the address of the engine")
    if heard.layout.fingerprint() != local.layout.fingerprint():
        raise LayoutMismatch(
            f"layouts of {mine.engine!r} (here) and {heard.identity.engine!r} (there) differ: "
            f"{local.layout.differences(heard.layout)}"
        )
    heard.placement.check(heard.layout)
    lease_s = min(local.lease_s, heard.lease_s)
    fingerprint = local.layout.fingerprint()
    welcome = Welcome(mine, fingerprint, local.endpoint, lease_s, SHARE_RULE, local.siblings)
    return welcome, Peer(heard.identity, heard.endpoint, lease_s, heard.placement)


def check_welcome(local: Local, expects: EngineId, heard: Welcome) -> Peer:
    """Check the answer of the peer that we called.

    Raises:
        ProtocolError: another engine answered, or its identity contradicts itself.
        LayoutMismatch: it welcomes another layout than ours.
    """
    if heard.identity.engine != expects:
        raise ProtocolError(
            f"engine {expects!r} was looked for, engine {heard.identity.engine!r} answered: correct the address"
        )
    _check_identity(heard.identity)
    _check_shares(local.identity, heard.identity, heard.shares)
    if heard.identity.size > 1 and len(heard.siblings) != heard.identity.size:
        raise ProtocolError(
            f"engine {expects!r} has {heard.identity.size} ranks and names {len(heard.siblings)} control addresses"
        )
    mine = local.layout.fingerprint()
    if heard.fingerprint != mine:
        raise LayoutMismatch(f"layout fingerprint {mine} here, {heard.fingerprint} at {expects!r}")
    return Peer(heard.identity, heard.endpoint, min(local.lease_s, heard.lease_s), siblings=heard.siblings)


def _check_shares(mine: Identity, theirs: Identity, rule: int) -> None:
    """Engines of one rank each need no rule; all others must divide the rows alike, or rows would be missing."""
    if max(mine.size, theirs.size) > 1 and rule != SHARE_RULE:
        raise ProtocolError(
            f"engine {mine.engine!r} (here) has {mine.size} ranks and share rule {SHARE_RULE}, {theirs.engine!r} "
            f"(there) has {theirs.size} and rule {rule}: run the same release on both sides"
        )


def _check_identity(identity: Identity) -> None:
    if not identity.engine or not identity.incarnation or identity.rank >= identity.size:
        raise ProtocolError(f"identity contradicts itself: {identity!r}; expected names, and a rank below the size")
