# SPDX-License-Identifier: Apache-2.0
"""``BatchStaging``: a step's batch, composed in host memory and copied to the device's fixed buffers in one piece.

The copy runs when the device gets to it, while the host is composing the next step. So there are several pieces of host
memory, and one is written anew only once its copy has been made. Forward thread, before the pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tidal_connector.errors import DeviceFailed
from tidal_connector.ops.npu.state import DeviceBatch

PIECES = 4
"""Steps that the host may be ahead of the device; vLLM's asynchronous scheduling is ahead by one or two."""

WAIT_S = 60.0
"""Longest wait for a copy that a step ``PIECES`` ago asked for; one that takes longer means that the device hangs."""


@dataclass(frozen=True, slots=True)
class StagedRequest:
    """One request of a step: its seat, generation and stable position (see ``DeviceBatch``), and its queries."""

    seat: int
    generation: int
    stable: int
    queries: int


class BatchStaging:
    """Fills a batch.

    Args:
        batch: what is filled.
    """

    def __init__(self, batch: DeviceBatch) -> None:
        device = batch.memory.device
        self._batch = batch
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        pinned = self._module is not None
        size = batch.memory.numel()
        self._pieces = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(PIECES)]
        self._copied: list[Any] = [None] * PIECES
        self._next = 0

    def fill(self, requests: Sequence[StagedRequest], padded_requests: int, most_queries: int) -> None:
        """Set the batch of the next step.

        The selection's rows are taken to be in the order of the requests, those of a request in the order of its
        queries; whatever comes after is padding.

        Raises:
            ValueError: the step is larger than the buffers.
            DeviceFailed: the device does not get on.
        """
        batch = self._batch
        tokens = sum(request.queries for request in requests)
        if not (
            len(requests) <= padded_requests <= batch.most_requests
            and 1 <= most_queries <= batch.most_queries
            and tokens <= batch.most_tokens
        ):
            raise ValueError(
                f"{len(requests)} requests padded to {padded_requests}, at most {most_queries} queries each, {tokens} "
                f"tokens: expected at most {batch.most_requests} requests, {batch.most_queries} queries, "
                f"{batch.most_tokens} tokens; were the buffers made for smaller batches than the engine runs?"
            )
        piece = self._free_piece()
        seat, count, owner, stable, rows, place = (part.numpy() for part in batch.parts(piece))
        for array, padding in ((seat, -1), (count, 0), (owner, 0), (stable, 0), (rows, 0), (place, batch.no_place)):
            array.fill(padding)
        first = 0
        for index, request in enumerate(requests):
            if not 1 <= request.queries <= most_queries:
                raise ValueError(f"queries[{index}] = {request.queries}: expected 1 to {most_queries}")
            seat[index], owner[index], stable[index] = request.seat, request.generation, request.stable
            count[index] = request.queries
            for query in range(request.queries):
                rows[index * most_queries + query] = first + query
                place[first + query] = index * most_queries + query
            first += request.queries
        batch.memory.copy_(piece, non_blocking=True)
        if self._module is not None:
            self._copied[self._next] = self._module.current_stream(batch.memory.device).record_event()
        self._next = (self._next + 1) % PIECES
        batch.requests, batch.queries = padded_requests, most_queries

    def _free_piece(self) -> torch.Tensor:
        event = self._copied[self._next]
        deadline = time.monotonic() + WAIT_S
        while event is not None and not event.query():
            if time.monotonic() > deadline:
                raise DeviceFailed(
                    f"the device has not copied a batch of {PIECES} steps ago within {WAIT_S:.0f} s: it hangs; look at "
                    "its log (plog) and restart the engine"
                )
            time.sleep(50e-6)
        return self._pieces[self._next]
