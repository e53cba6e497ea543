# SPDX-License-Identifier: Apache-2.0
"""Between vLLM's steps and the selection cache: which requests decode, which layer is at work, when a step ends.

One :class:`EngineSelection` per engine, made when its caches are; one :class:`LayerSelection` per attention layer.
Forward thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.forward_context import get_forward_context

from tidal_connector import ops
from tidal_connector.config import TidalConfig
from tidal_connector.decode.writeback import WriteBack
from tidal_connector.metrics import Counters
from tidal_connector.selection.budget import EXTENT_ROWS, MemoryPlan, ModelCosts
from tidal_connector.selection.cache import DecodeBatch, SelectionCache
from tidal_connector.selection.groups import index_groups
from tidal_connector.selection.seats import NO_SEAT
from tidal_connector.vllm_plugin.cpu.kv_allocation import KvPlacement
from tidal_connector.vllm_plugin.cpu.metadata import RequestSpan, TidalMLAMetadata
from tidal_connector.vllm_plugin.metadata import TidalMetadata
from tidal_connector.vllm_plugin.translate import layer_index

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(slots=True)
class PassSelection:
    """One forward pass, divided.

    Attributes:
        seated: the requests that are served from their seats.
        tokens: their query tokens, as positions in the batch: a slice where that is all of them.
        spans: their query tokens counted from 0, as ``(start, stop)`` per request.
        width: leading columns of a slot table in which anything can be selected.
        others: runs of adjoining requests that read the pool: prefill, and requests without a seat.
        staged: the rows of the pass go to the pool at its end, all at once; otherwise at once, layer by layer.
        tables: what the layers of a group read of its plan, by its leader: the slots that they write to, ``[queries]``
            int64, and the slot table, ``[queries, k]`` int64.
    """

    seated: DecodeBatch
    tokens: slice | torch.Tensor
    spans: list[tuple[int, int]]
    width: int
    others: list[list[RequestSpan]]
    staged: bool
    tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class EngineSelection:
    """Seats, residency and write-back of one engine.

    Args:
        config: our settings.
        plan: how the memory is divided.
        model: what the model and vLLM's settings say.
        placement: the caches.
        counters: what is counted into.
    """

    def __init__(
        self, config: TidalConfig, plan: MemoryPlan, model: ModelCosts, placement: KvPlacement, counters: Counters
    ) -> None:
        self._model = model
        self._counters = counters
        self._requests: Sequence[str] = ()
        self._admitting = False
        self._busy_seconds = 0.0
        self._last: tuple[object, PassSelection | None] = (None, None)
        self._dtype = placement.kv_caches[placement.parts.latent[0]].dtype
        pools = [_rows(placement.kv_caches[name]) for name in placement.parts.latent]
        slots = placement.arena[:, :, : placement.parts.latent_row_bytes]
        self._stream = ops.CopyStream(threads=1)
        self.cache = SelectionCache(
            arena=slots.numpy(),
            pools=pools,
            groups=index_groups(
                [layer_index(name) for name in placement.parts.latent],
                {layer_index(name) for name in placement.parts.index},
            ),
            extent_rows=EXTENT_ROWS,
            requests=plan.requests,
            top_k=model.top_k,
            base_rows=plan.base_rows,
            most_rows=plan.most_rows,
            eager_rows=plan.slots,
            page_tokens=model.block_size,
            stream=self._stream,
            counters=counters,
            threads=config.selection.threads,
            prefetch=config.selection.prefetch,
        )
        self.writeback = WriteBack(pools, plan.requests * model.queries, self._stream, counters)
        self._arena: list[torch.Tensor] = [layer.view(self._dtype) for layer in slots]
        self._staging = [torch.from_numpy(layer).view(self._dtype) for layer in self.writeback.staging]
        counters.set("selection_slots", plan.arena_rows)
        counters.set("selection_cache_bytes", placement.arena.nbytes)

    def layers(self, names: Sequence[str]) -> list[LayerSelection]:
        """Return what each attention layer needs, in the order of the latent caches."""
        return [LayerSelection(self, name, at) for at, name in enumerate(names)]

    # --- steps

    def begin(self, output: SchedulerOutput) -> None:
        """Take what vLLM scheduled, before its worker acts on it.

        From here on pages may be read by others, written by peers, and belong to somebody else: the rows of the last
        step are in the pool when this returns.
        """
        self.writeback.submit()
        self.writeback.settle()
        self._last = (None, None)
        cached = output.scheduled_cached_reqs
        for request in (*output.finished_req_ids, *(output.preempted_req_ids or ()), *cached.resumed_req_ids):
            self.cache.book.release(request)
        connector = output.kv_connector_metadata
        # A request that is only now admitted may read pages that others write in this very step (vLLM shares a block as
        # soon as its last token is scheduled), and so may a peer to which chunks of this step are pushed.
        self._admitting = bool(
            output.scheduled_new_reqs
            or cached.resumed_req_ids
            or (isinstance(connector, TidalMetadata) and connector.chunks)
        )

    def batch(self, requests: Sequence[str], pages: int) -> None:
        """Take the requests of the step in the order of the batch's rows, and how many pages they hold."""
        self._requests = list(requests)
        self._counters.set("selection_slots_used", self.cache.book.rows_used)
        self._counters.set("pool_pages_used", pages)

    def end(self) -> None:
        """Send the rows of the step to the pool."""
        self.writeback.submit()
        statistics = self._stream.statistics()
        spent = statistics.busy_seconds + statistics.stolen_seconds
        self._counters.add("gather_seconds", spent - self._busy_seconds)
        self._busy_seconds = spent

    def divide(self, forward: object, metadata: TidalMLAMetadata) -> PassSelection | None:
        """Say which requests of a forward pass are served from their seats; None where none is.

        Args:
            forward: what tells this pass from others. Layers with and without an indexer have metadata of their own,
                which say the same.
            metadata: that of any layer.
        """
        known, passed = self._last
        if known is forward:
            return passed
        book, most = self.cache.book, self._model.queries
        spills = book.spills
        seated: list[tuple[RequestSpan, int]] = []
        others: list[list[RequestSpan]] = []
        end = -1
        for span in metadata.spans:
            request, queries = self._requests[span.row], span.stop - span.start
            seat = book.hold(request, span.length, queries) if queries <= most else NO_SEAT
            if seat != NO_SEAT:
                seated.append((span, seat))
                continue
            if queries <= most:
                self._counters.add("selection_without_slots")
            book.release(request)
            if span.start == end:
                others[-1].append(span)
            else:
                others.append([span])
            end = span.stop
        self._counters.add("selection_spills", book.spills - spills)
        passed = self._passed(metadata, seated, others) if seated else None
        self._last = (forward, passed)
        if passed is not None and passed.staged:
            self.writeback.begin(metadata.slot_mapping.numpy())
        return passed

    def _passed(
        self, metadata: TidalMLAMetadata, seated: list[tuple[RequestSpan, int]], others: list[list[RequestSpan]]
    ) -> PassSelection:
        counts = [span.stop - span.start for span, _ in seated]
        bounds = np.zeros(len(seated) + 1, np.int32)
        np.cumsum(counts, out=bounds[1:])
        rows = [span.row for span, _ in seated]
        table = metadata.block_table
        first, last = seated[0][0].start, seated[-1][0].stop
        tokens: slice | torch.Tensor = slice(first, last)
        if bounds[-1] != last - first:
            tokens = torch.cat([torch.arange(span.start, span.stop) for span, _ in seated])
        batch = DecodeBatch(
            requests=tuple(self._requests[row] for row in rows),
            query_start=bounds,
            seat=np.asarray([seat for _, seat in seated], np.int32),
            start=np.asarray([span.length - n for (span, _), n in zip(seated, counts, strict=True)], np.int32),
            pages=(table[rows[0] : rows[-1] + 1] if rows[-1] - rows[0] + 1 == len(rows) else table[rows]).numpy(),
        )
        edges = bounds.tolist()
        return PassSelection(
            seated=batch,
            tokens=tokens,
            spans=list(itertools.pairwise(edges)),
            width=min(self._model.top_k, max(span.length for span, _ in seated)),
            others=others,
            staged=not self._admitting and not others and bool(bounds[-1] == metadata.num_actual_tokens),
        )

    def slots(self, layer: int) -> torch.Tensor:
        """Return a layer's slots, ``[rows, width]`` of the cache's dtype."""
        return self._arena[layer]

    def staging(self, layer: int) -> torch.Tensor:
        """Return where a layer's rows wait for the end of the pass, ``[tokens, width]`` of the cache's dtype."""
        return self._staging[layer]

    def close(self) -> None:
        """Finish all copies and end the copy stream; before the pool goes."""
        self._stream.close()


class LayerSelection:
    """The selection cache as one attention layer sees it."""

    def __init__(self, engine: EngineSelection, name: str, layer: int) -> None:
        self._engine = engine
        self._name = name
        self._layer = layer
        self._leads = engine.cache.leads(layer)
        self._leader = engine.cache.leader(layer)

    def current(self) -> PassSelection | None:
        """Return the pass that is at work, None where it has no seated requests (or is a dummy run without caches)."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return None
        mine = metadata.get(self._name)
        return self._engine.divide(metadata, mine) if isinstance(mine, TidalMLAMetadata) else None

    def selected(self, indices: torch.Tensor) -> None:
        """Take the final selection ``[tokens, top_k]`` int32: a leader plans and sends for its group's rows."""
        passed = self.current() if self._leads else None
        if passed is not None:
            resolved = self._engine.cache.plan(self._layer, passed.seated, indices[passed.tokens].numpy())
            slots = torch.from_numpy(resolved.slots)[:, : passed.width]
            passed.tables[self._leader] = (torch.from_numpy(resolved.written).long(), slots.long())

    def write(self, passed: PassSelection, rows: torch.Tensor) -> bool:
        """Write the pass's new rows ``[tokens, width]`` to their slots.

        Returns:
            Whether they also go to the pool from here; otherwise the caller writes them there.
        """
        engine, layer = self._engine, self._layer
        held = engine.slots(layer)
        mine = rows[passed.tokens].to(held.dtype)
        held.index_copy_(0, passed.tables[self._leader][0], mine)
        if passed.staged:
            engine.staging(layer)[: mine.shape[0]] = mine
            engine.writeback.staged(layer)
        return passed.staged

    def read(self, passed: PassSelection) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's slots ``[rows, width]`` and the slot table ``[queries, k]`` int64, once all is there."""
        self._engine.cache.arrive(self._layer, passed.seated)
        return self._engine.slots(self._layer), passed.tables[self._leader][1]


def _rows(cache: torch.Tensor) -> np.ndarray:
    """View a latent cache ``[blocks, 1, block_size, width]`` as rows of bytes."""
    return cache.view(-1, cache.shape[-1]).view(torch.uint8).numpy()
