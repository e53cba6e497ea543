# SPDX-License-Identifier: Apache-2.0
"""What a worker says of itself once it listens: one log line, and the gauges that never change."""

from __future__ import annotations

from tidal_connector.control.messages import Identity
from tidal_connector.layout import KVLayout
from tidal_connector.log import get_logger
from tidal_connector.memory.region import MemoryRegion
from tidal_connector.metrics import Counters

logger = get_logger(__name__)


def announce(who: Identity, address: str, layout: KVLayout, pool: MemoryRegion | None, counters: Counters) -> None:
    """Log where the engine listens and what its KV costs, and set the gauges.

    Args:
        who: the engine's name, and which rank of it this is.
        address: the control address that was bound.
        layout: what its KV is.
        pool: the host pool; None where the latents live on the device.
        counters: whose gauges are set.
    """
    latent, index = layout.latent_bytes, layout.index_bytes
    layers = len({region.layer for region in layout.regions})
    on_device = index if pool is not None else latent + index
    counters.set("pool_bytes", pool.length if pool else 0)
    counters.set("pool_hugepage_bytes", pool.report.hugepage_bytes if pool else 0)
    counters.set("device_bytes_per_token", on_device)
    counters.set("kv_bytes_per_token", latent + index)
    counters.set("kv_layers", layers)
    logger.info(
        "engine %s%s listens on %s: %d layers, %d latent + %d index bytes per token, %.1f device bytes per token and "
        "layer%s, layout %s",
        who.engine,
        f", rank {who.rank} of {who.size}," if who.size > 1 else "",
        address,
        layers,
        latent,
        index,
        on_device / layers,
        f", {pool.report.line()}" if pool else "",
        layout.fingerprint(),
    )
