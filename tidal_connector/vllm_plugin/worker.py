# SPDX-License-Identifier: Apache-2.0
"""The warehouse half of the connector: lives in vLLM's worker, owns the bytes, carries out what the scheduler decided.

Everything with a thread, a socket or a registration is opened in :meth:`TidalWorker.register` through one ``ExitStack``
and closed in :meth:`TidalWorker.close` in reverse order. vLLM's thread only hands intents to the rooms and reads their
outcomes; it never waits for a peer, with one bounded exception: a preemption, whose pages vLLM is about to give to
somebody else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tidal_connector.control.handshake import Capacity
from tidal_connector.control.loop import ControlLoop
from tidal_connector.control.messages import Identity
from tidal_connector.decode.receiver import Receiver
from tidal_connector.errors import ConfigError, LayoutMismatch
from tidal_connector.ids import DevicePageId, EngineId, HostPageId, RequestId, TransferId, new_incarnation
from tidal_connector.layout import Home, Region
from tidal_connector.log import get_logger
from tidal_connector.memory.region import MemoryRegion
from tidal_connector.metrics import Counters
from tidal_connector.prefill.sender import Sender
from tidal_connector.transfer.plane import TransferPlane, open_plane
from tidal_connector.vllm_plugin.metadata import Receive, TidalHandshake, TidalMetadata
from tidal_connector.vllm_plugin.npu_transport import check_control_port, npus
from tidal_connector.vllm_plugin.ranks import exchange, tensor_rank
from tidal_connector.vllm_plugin.sabotage import corrupt_row
from tidal_connector.vllm_plugin.startup import announce
from tidal_connector.vllm_plugin.stats import Gains, TidalStats
from tidal_connector.vllm_plugin.step_sends import StepSends
from tidal_connector.vllm_plugin.timeline import timeline_of
from tidal_connector.vllm_plugin.translate import (
    EngineFacts,
    cache_parts,
    layer_index,
    model_layout,
    place_caches,
    placement_of,
    storages,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from tidal_connector.transfer.ascend import Npu
    from tidal_connector.vllm_plugin.translate import Cache

logger = get_logger(__name__)

IDLE_WAIT_S = 0.01
"""How long a step without tokens waits for an outcome. An engine with an outstanding transfer steps in a
closed loop; without the wait it takes a core from the engine that sends (seen: 100 % of one of two cores)."""


def _nothing() -> None:
    """Wake nobody: receipts before the loop exists concern nobody."""


class Outcomes:
    """What one poll hands to vLLM."""

    __slots__ = ("failed", "failed_blocks", "received", "sent")

    def __init__(self) -> None:
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.failed_blocks: set[int] = set()


class TidalWorker:
    """Worker half of one engine.

    Args:
        vllm_config: vLLM's configuration, for the model's layout.
        facts: the translated settings.
    """

    def __init__(self, vllm_config: VllmConfig, facts: EngineFacts) -> None:
        self._vllm_config = vllm_config
        self._facts = facts
        self._stack = contextlib.ExitStack()
        self._counters = Counters()
        self._gains = Gains()
        self._pool: MemoryRegion | None = None
        self._pool_shared = False
        self._host_layers: frozenset[str] = frozenset()
        self._host_addresses: Mapping[str, Sequence[int]] = {}
        self._regions: tuple[Region, ...] = ()
        self._sender: Sender | None = None
        self._sends: StepSends | None = None
        self._receiver: Receiver | None = None
        self._handshake: TidalHandshake | None = None
        self._latent_bytes = 0
        self._on_cpu = True
        self._wake: Callable[[], None] = _nothing
        self._step = TidalMetadata()
        self._receives: dict[str, Receive] = {}
        self._failed_blocks: set[int] = set()

    @property
    def counters(self) -> Counters:
        """What this worker counts into; the attention layers that read the host pool do so too."""
        return self._counters

    # --- start and end

    def adopt_pool(
        self,
        pool: MemoryRegion,
        latent_layers: Iterable[str],
        *,
        shared: bool = False,
        addresses: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Take the host pool over from the model runner; it is closed after everything that reads or writes
        it.

        Args:
            pool: the host pool.
            latent_layers: names of the layers whose latents are views of it.
            shared: the pools of all ranks of this engine are the same pages.
            addresses: where these views go through a device's alias, the addresses of their parts in host memory.
        """
        self._pool_shared = shared
        self._pool = self._stack.enter_context(pool)
        self._host_layers = frozenset(latent_layers)
        self._host_addresses = dict(addresses or {})

    def before_pool_closes(self, close: Callable[[], None]) -> None:
        """Call something at the end, before the host pool goes: what still copies rows into it."""
        self._stack.callback(close)

    def register(self, caches: Mapping[str, Cache]) -> None:
        """Learn where the caches lie, register them with the transport, and start to listen.

        Args:
            caches: vLLM's views by layer name.

        Raises:
            LayoutMismatch: a cache is of no known kind, or offload is on and no pool was adopted.
            ConfigError: the ranks of the engine have a host pool each.
            TransferFailed: the transport cannot start or refuses the memory.
        """
        facts, config = self._facts, self._facts.config
        if facts.offload and self._pool is None:
            raise LayoutMismatch(
                'offload = "on", but this platform keeps the latents on the device; set offload = "off"'
            )
        if facts.ranks > 1 and self._pool is not None and not self._pool_shared:
            # Each row of the pool is delivered once for all ranks, so the others would read rows that never came.
            raise ConfigError(
                f"tensor_parallel_size = {facts.ranks} with a host pool for each rank: expected one that all ranks "
                'map; this platform has none, so set offload = "off" or tensor_parallel_size = 1'
            )
        rank = tensor_rank(facts.ranks)
        control = config.control.for_rank(facts.replica * facts.ranks + rank)
        placed = place_caches(caches, self._host_layers, self._host_addresses)
        self._regions = tuple(region for _, region in placed)
        latent = next(
            tensor for name, cache in caches.items() for kind, tensor in cache_parts(name, cache) if kind.latent
        )
        self._latent_bytes, self._on_cpu = latent.element_size(), latent.device.type == "cpu"
        layout = model_layout(self._vllm_config, caches, placed, config.weights)
        placement = placement_of(placed)
        placement.check(layout)
        npu = npus(config)
        plane = self._open_plane(caches, npu)
        identity = Identity(facts.engine, new_incarnation(), rank, facts.ranks)
        if facts.producer:
            self._sender = Sender(
                layout,
                placement,
                plane,
                self._counters,
                control,
                config.transfer.descriptor_bytes,
                rank=rank,
                size=facts.ranks,
            )
        if facts.consumer:
            self._receiver = Receiver(
                layout, placement, plane, self._counters, control, config.quarantine_s, rank=rank, size=facts.ranks
            )
        loop = ControlLoop(
            identity,
            control,
            layout,
            placement,
            plane.endpoint(),
            self._counters,
            sender=self._sender,
            receiver=self._receiver,
            capacity=Capacity(
                self._vllm_config.scheduler_config.max_num_seqs,
                min(region.pages * region.page_tokens for region in placement.regions),
            ),
            meet=lambda address: exchange(address, facts.ranks),
        )
        self._wake = loop.wake
        self._stack.enter_context(loop)
        check_control_port(loop.address, npu)
        if self._sender is not None:
            timeline = timeline_of(latent.device)
            self._stack.callback(timeline.close)
            layers = [region.layer for region in self._regions]
            self._sends = StepSends(self._sender, layers, timeline, config.control.stall_s)
        self._handshake = TidalHandshake(control=loop.address, incarnation=identity.incarnation)
        announce(identity, loop.address, layout, self._pool, self._counters)

    def _open_plane(self, caches: Mapping[str, Cache], npu: Npu | None) -> TransferPlane:
        config = self._facts.config
        host = config.transfer_host
        plane = self._stack.enter_context(open_plane(config, host, self._woken, npu))
        pool = self._pool
        if pool is not None:
            plane.register(pool.address, pool.length, Home.HOST)
        on_device = int(self._counters.snapshot()["selection_cache_bytes"])
        for address, length in storages(caches, self._host_layers):
            on_device += length
            # Nobody writes into an engine that only prefills, so its memory is not offered to the network.
            plane.register(address, length, Home.DEVICE, target=self._facts.consumer)
        self._counters.set("device_kv_bytes", on_device)
        return plane

    def _woken(self) -> None:
        self._wake()

    def handshake(self) -> TidalHandshake | None:
        """Return what the scheduler half must know: the control address that was really bound."""
        return self._handshake

    def close(self) -> None:
        """Say goodbye to the peers and close everything, last opened first. Idempotent."""
        self._stack.close()

    # --- one step

    def preempted(self, metadata: TidalMetadata) -> None:
        """Stop reading the pages that vLLM has just taken back, before the forward pass that may write
        them.
        """
        if self._sends is not None:
            self._sends.preempted(metadata.preempted)

    def bind(self, metadata: TidalMetadata) -> None:
        """Take the step's intents. Called first in each step on both host versions."""
        self._step = metadata
        if self._receiver is not None:
            self._bind_receives(metadata, self._receiver)
        if self._sends is not None:
            self._sends.bind(metadata)

    def _bind_receives(self, metadata: TidalMetadata, receiver: Receiver) -> None:
        for decline in metadata.declines:
            receiver.decline(TransferId(decline.transfer), EngineId(decline.engine), decline.control, decline.reason)
        for item in metadata.receives:
            self._receives[item.request] = item
            receiver.reserve(
                RequestId(item.request),
                TransferId(item.transfer),
                EngineId(item.engine),
                item.control,
                item.first,
                item.end,
                [HostPageId(page) for page in item.pages],
                [DevicePageId(page) for page in item.pages],
                item.prompt,
            )
        for request, reason in metadata.aborts:
            receiver.abort(RequestId(request), reason)

    def layer_saved(self, layer_name: str) -> None:
        """Announce that a layer's rows of this step are written, latents and index keys."""
        if self._sends is not None:
            self._sends.layer_saved(layer_index(layer_name))

    def step_saved(self) -> None:
        """Announce the layers that no hook announced, and note which prompts are now complete."""
        if self._sends is not None:
            self._sends.step_saved()

    def poll(self) -> Outcomes:
        """Collect what ended since the last poll; a step without tokens waits a moment for it."""
        if not self._step.scheduled and self._step.waiting:
            self._wait(IDLE_WAIT_S)
        found = Outcomes()
        if self._sender is not None:
            found.sent = {outcome.request for outcome in self._sender.outcomes()}
        if self._receiver is not None:
            for outcome in self._receiver.outcomes():
                self._received(outcome.request, outcome.ok, outcome.reason, found)
        self._failed_blocks = found.failed_blocks
        return found

    def _wait(self, seconds: float) -> None:
        # An engine of both roles waits on the receiver only: what it awaits delays a request, what it sends
        # delays none.
        if self._receiver is not None:
            self._receiver.wait(seconds)
        elif self._sender is not None:
            self._sender.wait(seconds)

    def _received(self, request: RequestId, ok: bool, reason: str, found: Outcomes) -> None:
        item = self._receives.pop(request, None)
        if item is None:
            return
        found.received.add(request)
        if not ok:
            logger.warning("request %s: its KV did not arrive: %s", request, reason)
            found.failed.add(request)
            found.failed_blocks.update(item.pages)
        elif item.sabotage is not None:
            # The host cannot reach into a device's memory, only into its own.
            corrupt_row([r for r in self._regions if self._on_cpu or r.home is Home.HOST], item, self._latent_bytes)

    def failed_blocks(self) -> set[int]:
        """Return the blocks of the receives that failed in the last poll (for hosts that take blocks, not
        requests).
        """
        return self._failed_blocks

    def stats(self) -> TidalStats | None:
        """Return what the counters gained since the last call."""
        return self._gains.since_last(self._counters.snapshot())
