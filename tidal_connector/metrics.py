# SPDX-License-Identifier: Apache-2.0
"""Plain counters and gauges, without a metrics library.

A worker counts into one :class:`Counters`; ``vllm_plugin`` takes a snapshot each step and hands it to vLLM's
own stats and Prometheus hooks. Counting never raises: an unknown name is a programming error that a test
finds, not a reason to fail a request.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

COUNTERS: Mapping[str, str] = {
    "transfers_started": "transfers opened on this side",
    "transfers_completed": "transfers whose bytes were all acknowledged",
    "transfers_failed": "transfers that ended otherwise",
    "transfers_quarantined": "transfers whose pages went through quarantine",
    "bytes_pushed": "bytes acknowledged by the peer's transport",
    "bytes_landed_before_prefill_end": "bytes acknowledged before their prefill ended",
    "bytes_received": "bytes that landed here in completed transfers",
    "descriptors_submitted": "descriptors handed to the transport",
    "transfer_seconds": "seconds from first submit to last acknowledgement, summed over transfers",
    "messages_refused": "control messages refused: malformed, of another version or for nobody",
    "handshakes_refused": "sessions that one side refused, such as for another layout; their requests get no KV",
    "inquiries_answered": "times that this engine said who it is and how its KV is laid out",
    "notices_stale": "control messages of another generation or incarnation, dropped",
    "aborts_sent": "aborts told to a peer",
    "aborts_received": "aborts told by a peer",
    "leases_expired": "peers whose lease ended",
    "rows_gathered": "latent rows gathered from the host pool for attention, over all layers",
    "bytes_gathered": "bytes gathered from the host pool for attention, over all layers",
    "bytes_written_back": "bytes of decoded rows written to the host pool, over all layers",
    "selection_hits": "selected rows that were in the selection cache already, once per group of layers",
    "selection_misses": "selected rows that had to be fetched into the selection cache, once per group of layers",
    "selection_evictions": "rows that lost their slot of the selection cache to another, once per group of layers",
    "selection_invalid": "selected positions outside their request's context, which attention was kept from",
    "selection_spills": "requests that lost their full residency because others needed the room",
    "selection_without_slots": "steps of a request for which the selection cache had no room",
    "resolve_seconds": "seconds spent on finding hits, misses and victims",
    "gather_seconds": "seconds spent on copying rows between host pool and selection cache, by whichever thread",
    "prefetch_wait_seconds": "seconds for which attention waited for rows that were still on their way",
    "prefetches": "layers whose rows were fetched ahead of need",
    "prefetches_late": "layers whose rows were not there yet when attention needed them",
    "prefetch_bytes": "bytes that were fetched ahead of need and in time",
}
"""Every counter and what it counts. All only rise."""

GAUGES: Mapping[str, str] = {
    "transfers_in_flight": "transfers open on this side",
    "pages_held": "source pages held for a peer after their request ended",
    "pages_quarantined": "destination pages out of use until no late write can arrive",
    "pool_bytes": "bytes of the host pool",
    "pool_hugepage_bytes": "bytes of the host pool that lie on hugepages",
    "pool_pages": "pages of the host pool, one per KV block",
    "pool_pages_used": "pages of the host pool that running requests hold",
    "selection_slots": "slots of the selection cache in each layer",
    "selection_slots_used": "slots of the selection cache that requests hold",
    "selection_cache_bytes": "device bytes of the selection cache over all layers",
    "device_kv_bytes": "device bytes that were allocated for KV: the caches on the device and the selection cache",
    "index_cache_bytes": "device bytes of the index keys over all layers",
    "peers": "peers with a live session",
    "device_bytes_per_token": "bytes that one token's KV takes on the device, over all layers",
    "kv_bytes_per_token": "bytes of one token's KV, latents and index keys, over all layers",
    "kv_layers": "decoder layers with KV",
}
"""Every gauge and what it shows."""


class Counters:
    """Thread-safe counters and gauges of one worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = dict.fromkeys((*COUNTERS, *GAUGES), 0.0)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Raise a counter; a negative amount is ignored, so that no counter ever falls."""
        if amount > 0:
            with self._lock:
                self._values[name] += amount

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[name] = value

    def snapshot(self) -> dict[str, float]:
        """Return all values at this moment."""
        with self._lock:
            return dict(self._values)
