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
    "rows_gathered": "latent rows gathered from the host pool for attention",
    "bytes_gathered": "bytes gathered from the host pool for attention",
}
"""Every counter and what it counts. All only rise."""

GAUGES: Mapping[str, str] = {
    "transfers_in_flight": "transfers open on this side",
    "pages_held": "source pages held for a peer after their request ended",
    "pages_quarantined": "destination pages out of use until no late write can arrive",
    "pool_bytes": "bytes of the host pool",
    "pool_hugepage_bytes": "bytes of the host pool that lie on hugepages",
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
