# SPDX-License-Identifier: Apache-2.0
"""The engines of a cluster: what each says of itself, and how others find it.

An engine's entry lies under ``members/ENGINE``, leased. Whoever reads the registry gets :class:`Members`, in which an
entry that cannot be read is named and left out.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated

import msgspec

from tidal_connector.ids import EngineId, Incarnation, Role

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Text = Annotated[str, msgspec.Meta(max_length=8192)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class State(enum.StrEnum):
    """Where an engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine, as it announces itself.

    Attributes:
        engine: the operator's name; unique in the cluster.
        role: what it does.
        state: only ``ready`` engines get requests.
        incarnation: this life of its worker; empty before it is known.
        revision: of the rollout that started it; empty where there is none.
        node: the machine's name.
        model: name under which it serves.
        layout: fingerprint of its KV; engines with different ones do not fit. Empty before it is known.
        http: base URL of its HTTP server.
        control: ``host:port`` of its control channel.
        transfer: ``host:port`` of its data port; empty before it is known.
        requests: most requests at once; 0: not known.
        kv_tokens: tokens of KV that it holds; 0: not known.
        note: one line for people, such as why it is down.
    """

    engine: EngineId
    role: Role
    state: State
    http: Name
    control: Text = ""
    transfer: Text = ""
    incarnation: Incarnation = Incarnation("")
    revision: Text = ""
    node: Text = ""
    model: Text = ""
    layout: Text = ""
    requests: Count = 0
    kv_tokens: Count = 0
    note: Text = ""


class Members(msgspec.Struct, frozen=True):
    """The registry at one moment.

    Attributes:
        engines: by id.
        fresh: False where the registry cannot be reached and this is what was last heard.
        odd: why an entry was left out, by its key.
    """

    engines: Mapping[EngineId, Member]
    fresh: bool = True
    odd: Mapping[str, str] = {}
