# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half tells the worker half in one step: plain values, decided above, carried out
below.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from tidal_connector.vllm_plugin.params import Sabotage


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Prompt tokens that a prefill request computes in this step.

    Attributes:
        request: vLLM's request id.
        transfer: the attempt.
        first: first token whose rows the step (or an earlier prefix hit that nobody announced yet) provides.
        end: one past the last such token.
        pages: all block ids of the request so far, in order.
        done: the prompt is complete after this step.
        hold_s: seconds that its pages may wait for a reservation; None takes ``control.hold_s``.
        prompt: digest of the prompt's tokens; empty where vLLM has none.
    """

    request: str
    transfer: str
    first: int
    end: int
    pages: tuple[int, ...]
    done: bool
    hold_s: float | None
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class SendEnd:
    """A prefill request that vLLM finished.

    Attributes:
        total: tokens of its prompt.
        scheduled: it ran at least once, so that its pages may be being read.
        reason: why its KV is not complete; empty where it is.
    """

    request: str
    transfer: str
    total: int
    scheduled: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Receive:
    """Tokens [first, end) that a decode request lacks, and the blocks they go to.

    Attributes:
        pages: block ids from token ``first // block_size * block_size`` on.
        prompt: digest of the prompt's tokens; empty where vLLM has none.
    """

    request: str
    transfer: str
    engine: str
    control: str
    first: int
    end: int
    pages: tuple[int, ...]
    sabotage: Sabotage | None = None
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class Decline:
    """A transfer that this engine was offered and will not take; its sender may free the pages."""

    transfer: str
    engine: str
    control: str
    reason: str


@dataclass
class TidalMetadata(KVConnectorMetadata):
    """One step's intents.

    Attributes:
        chunks: prefill progress of the requests that run in this step.
        preempted: prefill requests whose blocks vLLM has just taken back.
        ends: prefill requests that ended.
        receives: decode requests that got their blocks.
        aborts: decode requests that ended while their KV was still awaited, with the reason.
        declines: transfers that were never admitted here.
        scheduled: number of tokens that the step computes.
        waiting: whether any transfer is outstanding, so that an empty step may wait for it.
    """

    chunks: list[SendChunk] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    ends: list[SendEnd] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    aborts: list[tuple[str, str]] = field(default_factory=list)
    declines: list[Decline] = field(default_factory=list)
    scheduled: int = 0
    waiting: bool = False


@dataclass
class TidalHandshake(KVConnectorHandshakeMetadata):
    """What a worker tells its scheduler once at start: the control address that was really bound."""

    control: str
    incarnation: str
