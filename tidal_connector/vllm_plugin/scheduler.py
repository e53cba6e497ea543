# SPDX-License-Identifier: Apache-2.0
"""The ledger half of the connector: runs in vLLM's scheduler, holds integers and ids, never sees a tensor or
a peer.

It hands intents down (:class:`~tidal_connector.vllm_plugin.metadata.TidalMetadata`) and filters the outcomes
that come up, so that vLLM hears each request id once and never one that it no longer tracks.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidal_connector.config import TidalConfig
from tidal_connector.errors import ParamsError
from tidal_connector.ids import EngineId, TransferId, new_transfer_id
from tidal_connector.log import get_logger
from tidal_connector.vllm_plugin.metadata import Decline, Receive, SendChunk, SendEnd, TidalMetadata
from tidal_connector.vllm_plugin.params import DecodeLeg, Leg, PrefillLeg, parse_params, sequential_answer

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)


@dataclass(slots=True)
class _Sending:
    """A prefill request from its first step until the worker says that nothing reads its pages."""

    transfer: TransferId
    sequential: bool
    prompt: int
    digest: str
    pages: list[int] = field(default_factory=list)
    announced: int = 0
    held: bool = False


class TidalScheduler:
    """Scheduler half of one engine.

    Args:
        config: the connector's settings.
        engine: this engine's id.
        block_size: tokens per vLLM block.
        producer: this engine may prefill for others.
        consumer: this engine may receive KV.
    """

    def __init__(
        self, config: TidalConfig, engine: EngineId, block_size: int, *, producer: bool, consumer: bool
    ) -> None:
        self._config = config
        self._engine = engine
        self._block_size = block_size
        self._producer = producer
        self._consumer = consumer
        self._control = ""
        self._sending: dict[str, _Sending] = {}
        self._receiving: dict[str, DecodeLeg] = {}
        self._asked: set[str] = set()
        self._next = TidalMetadata()

    def control_bound(self, address: str) -> None:
        """Take the control address that the worker really bound (``host:port``)."""
        self._control = address

    def matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        """Return how many prompt tokens the prefill side will deliver beyond ``computed``, and whether
        asynchronously.

        The last prompt token is left out: vLLM computes it here in any case to sample from it.
        """
        leg = self._leg(request)
        if not isinstance(leg, DecodeLeg) or request.request_id in self._asked:
            return 0, False
        wanted = request.num_prompt_tokens - 1 - computed
        return (wanted, True) if wanted > 0 else (0, False)

    def blocks_allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Note the reservation of a decode request; an empty one still tells the prefill side that nothing
        is needed.
        """
        leg = self._leg(request)
        if not isinstance(leg, DecodeLeg) or request.request_id in self._asked:
            return
        self._asked.add(request.request_id)
        end = request.num_prompt_tokens - 1
        first = end - external
        pages = blocks.get_block_ids()[0][first // self._block_size : -(-end // self._block_size)] if external else []
        self._next.receives.append(
            Receive(
                request.request_id,
                leg.transfer,
                leg.engine,
                leg.control,
                first,
                end,
                tuple(pages),
                leg.sabotage,
                _digest(request),
            )
        )
        if external:
            self._receiving[request.request_id] = leg

    def build(self, output: SchedulerOutput) -> TidalMetadata:
        """Return the step's intents and start collecting the next step's."""
        metadata, self._next = self._next, TidalMetadata()
        metadata.preempted = [r for r in output.preempted_req_ids or () if r in self._sending]
        for request_id in metadata.preempted:
            self._sending[request_id].announced = 0
        if self._producer:
            metadata.chunks = list(self._chunks(output))
        metadata.scheduled = output.total_num_scheduled_tokens
        metadata.waiting = bool(self._receiving) or any(s.held for s in self._sending.values())
        return metadata

    def _chunks(self, output: SchedulerOutput) -> Iterable[SendChunk]:
        for new in output.scheduled_new_reqs:
            sending = self._sending.get(new.req_id)
            if sending is not None:
                sending.pages = list(new.block_ids[0])
                yield from self._chunk(new.req_id, sending, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            sending = self._sending.get(request_id)
            if sending is None:
                continue
            added = list(blocks[0]) if blocks else []
            resumed = request_id in cached.resumed_req_ids
            sending.pages = added if resumed else sending.pages + added
            if resumed:
                sending.announced = 0
            yield from self._chunk(request_id, sending, computed, output)

    def _chunk(self, request_id: str, sending: _Sending, computed: int, output: SchedulerOutput) -> Iterable[SendChunk]:
        # Rows of a prefix hit are announced with the first chunk, layer by layer, and not at once: vLLM lets
        # a request hit blocks that another request of the same step is only about to write.
        end = min(computed + output.num_scheduled_tokens[request_id], sending.prompt)
        if end <= sending.announced:
            return
        first, sending.announced = sending.announced, end
        yield SendChunk(
            request_id,
            sending.transfer,
            first,
            end,
            tuple(sending.pages),
            end == sending.prompt,
            self._config.control.hold_s if sending.sequential else None,
            sending.digest,
        )

    def new_request(self, request: Request) -> None:
        """Start to track a request that this engine prefills for another."""
        leg = self._leg(request)
        if isinstance(leg, PrefillLeg):
            transfer = leg.transfer or new_transfer_id()
            self._sending[request.request_id] = _Sending(
                transfer, leg.sequential, request.num_prompt_tokens, _digest(request)
            )

    def finished(self, request: Request, *, aborted: bool) -> tuple[bool, dict[str, Any] | None]:
        """Say whether the blocks of a finished request must stay, and what the client gets to hand on."""
        request_id = request.request_id
        self._asked_and_gone(request)
        sending = self._sending.get(request_id)
        if sending is None:
            return False, None
        complete = not aborted and request.num_computed_tokens >= sending.prompt
        reason = "" if complete else f"the prefill request ended early ({request.status.name})"
        scheduled = bool(sending.pages)
        self._next.ends.append(SendEnd(request_id, sending.transfer, sending.prompt, scheduled, reason))
        if not scheduled:
            del self._sending[request_id]
            return False, None
        sending.held = True
        if not (complete and sending.sequential):
            return True, None
        expires = time.time() + self._config.control.hold_s
        return True, sequential_answer(sending.transfer, self._engine, self._control, expires)

    def _asked_and_gone(self, request: Request) -> None:
        request_id = request.request_id
        leg = self._receiving.get(request_id)
        if leg is not None:
            # The leg stays until the worker reports that no write can arrive: vLLM holds the blocks and
            # waits for it.
            self._next.aborts.append((request_id, f"the decode request ended ({request.status.name})"))
        elif request_id not in self._asked:
            leg = self._declinable(request)
            if leg is not None:
                self._next.declines.append(
                    Decline(leg.transfer, leg.engine, leg.control, f"never admitted ({request.status.name})")
                )
        self._asked.discard(request_id)

    def _declinable(self, request: Request) -> DecodeLeg | None:
        leg = self._leg(request)
        return leg if isinstance(leg, DecodeLeg) else None

    def filter_output(self, output: KVConnectorOutput) -> None:
        """Drop ids that vLLM no longer tracks, in place, and forget those that it now hears."""
        sent = {r for r in output.finished_sending or () if r in self._sending and self._sending[r].held}
        received = {r for r in output.finished_recving or () if r in self._receiving}
        for request_id in sent:
            del self._sending[request_id]
        for request_id in received:
            del self._receiving[request_id]
        output.finished_sending = sent or None
        output.finished_recving = received or None

    def pending(self) -> bool:
        """Whether a transfer needs further engine steps."""
        return (
            bool(self._receiving)
            or bool(self._next.declines or self._next.ends)
            or any(s.held for s in self._sending.values())
        )

    def _leg(self, request: Request) -> Leg | None:
        """Parse a request's parameters; bad ones were refused at the front door, so here they only mean
        "serve it alone".
        """
        try:
            return parse_params(
                request.kv_transfer_params, self._config, producer=self._producer, consumer=self._consumer
            )
        except ParamsError as error:
            logger.warning("request %s is served without a transfer: %s", request.request_id, error)
            return None


def _digest(request: Request) -> str:
    """Digest the prompt's tokens: each engine tokenizes, fills its template and truncates on its own, and rows of one
    prompt must never be taken for another's. Empty for a prompt that is given as embeddings.
    """
    tokens = request.prompt_token_ids
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).hexdigest() if tokens else ""
