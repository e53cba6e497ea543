# SPDX-License-Identifier: Apache-2.0
"""Between vllm-ascend's steps and the selection cache: which requests decode, which step is served from the cache.

One :class:`EngineSelection` per engine, made when its caches are; one :class:`LayerSelection` per attention layer. All
that a step decides is decided here, on the host, before the forward pass or the replay of a graph; within it nothing
is. Forward thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput

    from tidal_connector.selection.device import ArenaView
    from tidal_connector.selection.device_seats import DeviceSeats


class Cache(Protocol):
    """What is asked of ``selection.device.DeviceSelection``."""

    seats: DeviceSeats

    def begin(
        self, requests: Sequence[str], queries: Sequence[int], *, padded_requests: int, most_queries: int
    ) -> None:
        """Take the requests of the next pass, each with a seat."""

    def release(self, request: str) -> None:
        """Take a request's seat back."""

    def elsewhere(self, request: str, start: int) -> None:
        """Learn that tokens from ``start`` on were written without the seat."""

    def leads(self, layer: int) -> bool:
        """Whether a layer selects for itself."""

    def plan(self, layer: int, topk: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor) -> None:
        """Find the rows of a selection and send for those that are missing."""

    def arrive(self, layer: int) -> ArenaView:
        """Return the layer's slots once its rows are there."""


class EngineSelection:
    """The selection cache through the eyes of the model runner.

    Args:
        cache: seats, residency and rows on the device.
        most_queries: tokens that a decoding request computes per step at most (1, or 1 + draft tokens).

    Attributes:
        seated: whether the pass at work is served from the cache.
    """

    def __init__(self, cache: Cache, most_queries: int) -> None:
        self.cache = cache
        self.seated = False
        self._most = most_queries

    @property
    def requests(self) -> int:
        """Requests that have seats."""
        return len(self.cache.seats.seated())

    def layer(self, at: int) -> LayerSelection:
        """Return what an attention layer needs, by its place among the latent caches in the pool."""
        return LayerSelection(self, at)

    def begin(self, output: SchedulerOutput) -> None:
        """Take what vLLM scheduled, before its worker acts on it: seats of requests that ended or lost their pages."""
        cached = output.scheduled_cached_reqs
        for request in (*output.finished_req_ids, *(output.preempted_req_ids or ()), *cached.resumed_req_ids):
            self.cache.release(request)

    def arm(self, requests: Sequence[str], queries: Sequence[int], computed: Sequence[int], padded: int) -> None:
        """Prepare the pass of a step.

        A pass in which every request computes few tokens is served from the cache. Any other (prefill, or decode beside
        it) attends from the pool, and the seats learn from where on they no longer know all rows.

        Args:
            requests: in the order of the batch.
            queries: tokens that each computes.
            computed: tokens that each had before, at most: with draft tokens in flight fewer may turn out to count.
            padded: requests of the batch, padding included.
        """
        most = max(queries)
        self.seated = most <= self._most
        if self.seated:
            self.cache.begin(requests, queries, padded_requests=padded, most_queries=most)
            return
        for request, start in zip(requests, computed, strict=True):
            self.cache.elsewhere(request, max(0, start - (self._most - 1)))

    def idle(self, padded: int, queries: int) -> None:
        """Prepare a pass that serves nobody: a warm-up, a capture, or the step of an idle rank beside busy ones.

        Args:
            padded: requests of the batch, all of them padding.
            queries: tokens of each.
        """
        self.seated = queries <= self._most
        if self.seated:
            self.cache.begin((), (), padded_requests=padded, most_queries=queries)


class LayerSelection:
    """The selection cache as one attention layer sees it."""

    def __init__(self, engine: EngineSelection, at: int) -> None:
        self._engine = engine
        self._at = at
        self.leads = engine.cache.leads(at)

    @property
    def seated(self) -> bool:
        """Whether the pass at work is served from the cache."""
        return self._engine.seated

    def plan(self, selected: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor) -> None:
        """Take the final selection; the layer leads.

        Args:
            selected: int32 ``[tokens, (1,) k]``, positions, -1 for none.
            lengths: int32 ``[requests]``, tokens of each request at the end of the step.
            pages: int32 ``[requests, w]``, pages of each in order of position.
        """
        self._engine.cache.plan(self._at, selected, lengths, pages)

    def arrive(self) -> ArenaView:
        """Return the layer's slots and the slot table, once all that it names is there."""
        return self._engine.cache.arrive(self._at)
