# SPDX-License-Identifier: Apache-2.0
"""The host pool as kernels see it: opened, registered with the NPU, shared by the ranks of a node, cut into tensors.

Takes the length and the borders of layers; hands on a region and tensors over parts of it. On an NPU these are tensors
over the device's alias, which no host code may read; on the CPU, where tests run, plain views. Worker's main thread, at
start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tidal_connector.errors import ConfigError
from tidal_connector.memory import MemoryRegion, Share, open_region, open_shared

if TYPE_CHECKING:
    from tidal_connector.config import PoolConfig
    from tidal_connector.memory.acl import DeviceAlias
    from tidal_connector.memory.builder import Progress


@dataclass(frozen=True, slots=True)
class HostPool:
    """An open pool.

    Attributes:
        region: the memory; closing it ends its registration first.
        shared: all ranks of the engine map the same pages.
        view: returns int8 ``[length]`` over ``length`` bytes of the pool from an offset on.
    """

    region: MemoryRegion
    shared: bool
    view: Callable[[int, int], torch.Tensor]


def open_pool(
    length: int,
    settings: PoolConfig,
    device: torch.device,
    cuts: Sequence[int],
    share: Share | None = None,
    progress: Progress | None = None,
) -> HostPool:
    """Open the pool of an engine. With several ranks each calls this, and all return together or all raise.

    Args:
        length: bytes wanted, the same on all ranks.
        settings: pages of the pool, and how it is registered.
        device: whose kernels read and write it.
        cuts: offsets at which the tensors over it begin, multiples of 4 KiB: no border of a registration lies within
            one of them.
        share: the ranks that share it, and how long they wait for one another; None: there is one.
        progress: called while pages are faulted in.

    Raises:
        PoolExhausted: the memory cannot be had.
        DeviceFailed: it cannot be registered with the device.
        PeerLost: another rank ended, or did not come in time.
        ConfigError: ``pool.register`` is off, so that kernels cannot reach it, or a setting names nothing that exists.
    """
    if device.type == "cpu":
        if share is not None:
            return on_cpu(open_shared(length, settings, share, progress), shared=True)
        return on_cpu(open_region(length, settings, progress))
    from tidal_connector.memory.acl import AclRuntime, open_device_pool

    opened = open_device_pool(
        length, settings, AclRuntime.open(), _number(device), cuts=cuts, share=share, progress=progress
    )
    registration = opened.registration
    if registration is None:
        opened.close()
        raise ConfigError(
            'pool.register = "off" with latents in host memory: kernels read them there; set it to "auto", or '
            '"offload": "off"'
        )
    return HostPool(opened.region, share is not None, _aliases(registration.alias, device))


def on_cpu(region: MemoryRegion, *, shared: bool = False) -> HostPool:
    """Hand out a region whose readers run on the CPU: tensors are plain views."""
    memory = torch.frombuffer(region.buffer, dtype=torch.int8)
    return HostPool(region, shared, lambda offset, length: memory[offset : offset + length])


def _aliases(alias: Callable[[int, int], DeviceAlias], device: torch.device) -> Callable[[int, int], torch.Tensor]:
    from tidal_connector.ops.npu.alias import alias_tensor

    return lambda offset, length: alias_tensor(alias(offset, length), (length,), torch.int8, device)


def _number(device: torch.device) -> int:
    """Return the device's number in this process; vllm-ascend sets the current one before it builds a worker."""
    return int(torch.get_device_module(device).current_device())
