# SPDX-License-Identifier: Apache-2.0
"""The connector that vLLM loads: a facade that forwards, nothing else.

Launch line::

    --kv-transfer-config '{"kv_connector": "TidalConnector",
                           "kv_connector_module_path": "tidal_connector.vllm_plugin.connector",
                           "kv_role": "kv_consumer", "engine_id": "decode-0",
                           "kv_connector_extra_config": {"pool": {"bytes": "2GiB"}}}'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from tidal_connector import log
from tidal_connector.config import log_level
from tidal_connector.vllm_plugin import compat
from tidal_connector.vllm_plugin.metadata import TidalHandshake, TidalMetadata
from tidal_connector.vllm_plugin.scheduler import TidalScheduler
from tidal_connector.vllm_plugin.stats import TidalPromMetrics, TidalStats
from tidal_connector.vllm_plugin.translate import engine_facts, say_aliases
from tidal_connector.vllm_plugin.worker import TidalWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from tidal_connector.memory.region import MemoryRegion


class TidalConnector(KVConnectorBase_V1, SupportsHMA):
    """Pushes the KV of sparse-attention models from prefill straight into the decode engine's host pool."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        facts = engine_facts(vllm_config)
        log.configure(log_level() or facts.config.log.level, facts.config.log.file)
        say_aliases(vllm_config)
        self._facts = facts
        self._scheduler: TidalScheduler | None = None
        self._worker: TidalWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = TidalScheduler(
                facts.config, facts.engine, facts.block_size, producer=facts.producer, consumer=facts.consumer
            )
        else:
            self._worker = TidalWorker(vllm_config, facts)

    @property
    def scheduler(self) -> TidalScheduler:
        """The ledger half; exists in the scheduler's process only."""
        assert self._scheduler is not None, "scheduler half asked for in a worker"
        return self._scheduler

    @property
    def worker(self) -> TidalWorker:
        """The warehouse half; exists in a worker's process only."""
        assert self._worker is not None, "worker half asked for in a scheduler"
        return self._worker

    # --- worker

    def adopt_pool(
        self,
        pool: MemoryRegion,
        latent_layers: Iterable[str],
        *,
        shared: bool = False,
        addresses: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Take over the host pool that the model runner's latents are views of; before
        ``register_kv_caches``. ``shared``: all ranks of this engine map the same pages. ``addresses``: of the parts of
        latents in host memory, where the views go through a device's alias.
        """
        self.worker.adopt_pool(pool, latent_layers, shared=shared, addresses=addresses)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take vLLM's cache tensors by layer name."""
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return the worker's control address for the scheduler half."""
        return self.worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Stop reading the pages of preempted requests before the forward pass."""
        assert isinstance(kv_connector_metadata, TidalMetadata)
        self.worker.preempted(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Arm the step."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, TidalMetadata)
        self.worker.bind(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: loads are writes by the peer, armed in ``bind_connector_metadata``."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: vLLM schedules a request only after all its KV has landed."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """A layer of this step is written: hand it on without waiting."""
        self.worker.layer_saved(layer_name)

    def on_kv_cache_written(self, layer_name: str) -> None:
        """A layer's rows of this step were written just now (vllm-ascend says so before it attends)."""
        self.worker.layer_saved(layer_name)

    def wait_for_save(self) -> None:
        """Sweep the layers that no hook announced. Waits for nothing: pages stay with their request until
        sent.
        """
        self.worker.step_saved()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report sends and receives that ended (vLLM 0.23)."""
        found = self.worker.poll()
        return found.sent or None, found.received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Report sends and receives that ended, failed receives among them (vLLM 0.32)."""
        found = self.worker.poll()
        return compat.transfer_results(found.sent, found.received, found.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report the blocks of failed receives to a host that knows no failed requests."""
        return set() if compat.REPORTS_FAILED_REQUESTS else self.worker.failed_blocks()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Report what the counters gained in this step; vLLM asks both halves, and only workers count."""
        return self._worker.stats() if self._worker is not None else None

    def shutdown(self) -> None:
        """Close sockets, threads and registrations."""
        if self._worker is not None:
            self._worker.close()

    # --- scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Learn the control address that rank 0 bound; it tells peers those of the others."""
        if metadata:
            first = metadata[min(metadata)]
            assert isinstance(first, TidalHandshake)
            self.scheduler.control_bound(first.control)

    def on_new_request(self, request: Request) -> None:
        """Start to track a request that this engine prefills for another."""
        self.scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Say how many prompt tokens will be delivered from outside."""
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Reserve the blocks with the prefill side."""
        self.scheduler.blocks_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the step's intents."""
        return self.scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Keep from vLLM what it no longer tracks."""
        self.scheduler.filter_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Say whether the blocks must stay for a peer (one cache group)."""
        aborted = request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
        return self.scheduler.finished(request, aborted=aborted)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Say whether the blocks must stay for a peer."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping for a transfer."""
        return self.scheduler.pending()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Rebuild statistics that crossed a process border."""
        return TidalStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Register our Prometheus series."""
        return TidalPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
