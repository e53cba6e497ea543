# SPDX-License-Identifier: Apache-2.0
"""What every host with offload shares: whether the latents live in the host pool, what that costs, and what is said of
it at start.

Reads vLLM's configuration; knows no cache spec and no device (see ``cpu/offload.py`` and ``ascend/offload.py``).
Called while the configuration is built, in the front end, and again in the worker at start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidal_connector.config import TidalConfig, log_level, offload_asked
from tidal_connector.errors import ConfigError
from tidal_connector.log import configure, get_logger
from tidal_connector.selection.budget import MemoryPlan, ModelCosts, slot_bytes
from tidal_connector.vllm_plugin.plugins import CONNECTOR
from tidal_connector.vllm_plugin.translate import settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = get_logger(__name__)


def resolve(vllm_config: VllmConfig) -> TidalConfig | None:
    """Return our settings if the latents of this engine live in the host pool, else None.

    Raises:
        ConfigError: the settings cannot be read, or offload is on for a model that selects no tokens.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        return None
    config = settings(vllm_config)
    if not config.offloads(str(transfer.kv_role)):
        return None
    if getattr(vllm_config.model_config.hf_config, "index_topk", None) is None:
        raise ConfigError(
            f'kv_connector_extra_config: offload = "{config.offload}" with kv_role {transfer.kv_role} keeps '
            f"the latents in host memory, which needs sparse attention; {vllm_config.model_config.model} has no "
            'index_topk: set "offload": "off"'
        )
    return config


def adopt_switch(vllm_config: VllmConfig) -> None:
    """Load the connector for a single engine with offload where the environment asks for it and nothing else does.

    ``VLLM_DSA_KV_OFFLOAD=1`` without ``--kv-transfer-config`` is how TidalCache was switched on.
    """
    from vllm.config import KVTransferConfig

    if vllm_config.kv_transfer_config is None and offload_asked() and vllm_config.model_config is not None:
        configure(log_level() or "INFO")  # the settings that say where to log exist only from here on
        _log.info("VLLM_DSA_KV_OFFLOAD=1 without --kv-transfer-config: TidalConnector is loaded with kv_role kv_both")
        vllm_config.kv_transfer_config = KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both")


@dataclass(frozen=True, slots=True)
class CacheSplit:
    """A model's caches by what they hold.

    Attributes:
        latent: layer names of the latent caches, in the model's order.
        index: layer names of the index-key caches, in the model's order.
        latent_block_bytes: bytes of one block over all latent caches.
        index_block_bytes: bytes of one block over all index-key caches, and over all else that stays on the device.
        block_size: tokens per block.
    """

    latent: tuple[str, ...]
    index: tuple[str, ...]
    latent_block_bytes: int
    index_block_bytes: int
    block_size: int

    @property
    def latent_row_bytes(self) -> int:
        """Bytes of one token's row in one latent cache."""
        return self.latent_block_bytes // len(self.latent) // self.block_size


def costs(vllm_config: VllmConfig, parts: CacheSplit) -> ModelCosts:
    """Read from vLLM's configuration what a block, a row and a request cost."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    speculative = vllm_config.speculative_config
    return ModelCosts(
        top_k=int(model.hf_config.index_topk),
        queries=1 + (speculative.num_speculative_tokens or 0 if speculative is not None else 0),
        requests=scheduler.max_num_seqs,
        context=model.max_model_len,
        block_size=parts.block_size,
        latent_block_bytes=parts.latent_block_bytes,
        index_block_bytes=parts.index_block_bytes,
        slot_bytes=len(parts.latent) * slot_bytes(parts.latent_row_bytes),
    )


def say_division(
    log: logging.Logger, config: TidalConfig, parts: CacheSplit, model: ModelCosts, plan: MemoryPlan, device_bytes: int
) -> None:
    """Log how the host pool and the device's KV budget were divided.

    Args:
        log: the logger of the host at work.
        config: our settings.
        parts: the model's caches.
        model: what they cost.
        plan: the division.
        device_bytes: bytes that vLLM grants to KV on the device.
    """
    blocks, rows = plan.blocks, parts.block_size * len(parts.latent)
    log.info(
        "latents in host memory: device KV is %.1f bytes per token and layer, %.1f without offload",
        parts.index_block_bytes / rows,
        (parts.index_block_bytes + parts.latent_block_bytes) / rows,
    )
    log.info(
        "KV blocks of %d tokens: the host pool of %d bytes holds %d, what the selection cache leaves of the device "
        "budget of %d bytes holds %d; %d are used, the %s binds",
        parts.block_size,
        config.pool.size,
        blocks.pool_blocks,
        device_bytes,
        blocks.device_blocks,
        blocks.blocks,
        blocks.limit,
    )
    log.info(
        "selection cache: %d bytes on the device, %d rows in each layer, %d slots for a request of %s; "
        "requests at once: %s",
        plan.arena_bytes,
        plan.arena_rows,
        plan.slots,
        "any length" if plan.most_rows == plan.base_rows else f"any length, up to {plan.most_rows} while there is room",
        ", ".join(f"{plan.concurrent(n)} of {n} tokens" for n in _examples(plan.slots, model.context)),
    )


def _examples(slots: int, context: int) -> list[int]:
    """Return contexts for which the log says how many requests fit: 16 times the slots, and the longest."""
    return sorted({min(16 * slots, context), context})


def quarters(length: int) -> Callable[[int, int], None]:
    """Return a callback that logs each further quarter of a pool of so many bytes while it is prepared."""
    logged = [0]

    def report(done: int, total: int) -> None:
        quarter = 4 * done // max(1, total)
        if quarter > logged[0]:
            logged[0] = quarter
            _log.info("host pool: %d %% of %d bytes prepared", 25 * quarter, length)

    return report
