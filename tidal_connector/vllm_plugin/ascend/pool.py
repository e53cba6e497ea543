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
from tidal_connector.log import get_logger
from tidal_connector.memory.region import MemoryRegion, open_region

if TYPE_CHECKING:
    from tidal_connector.config import PoolConfig
    from tidal_connector.memory.builder import Progress

_log = get_logger(__name__)


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
    length: int, settings: PoolConfig, device: torch.device, cuts: Sequence[int], progress: Progress | None = None
) -> HostPool:
    """Open the pool of an engine of one rank.

    Args:
        length: bytes wanted.
        settings: pages of the pool, and how it is registered.
        device: whose kernels read and write it.
        cuts: offsets at which the tensors over it begin, multiples of 4 KiB: no border of a registration lies within
            one of them.
        progress: called while pages are faulted in.

    Raises:
        PoolExhausted: the memory cannot be had.
        DeviceFailed: it cannot be registered with the device.
        ConfigError: ``pool.register`` is off, so that kernels cannot reach it.
    """
    if device.type == "cpu":
        return on_cpu(open_region(length, settings, progress))
    from tidal_connector.memory.acl import AclRuntime, open_device_pool

    opened = open_device_pool(length, settings, AclRuntime.open(), _number(device), cuts=cuts, progress=progress)
    registration = opened.registration
    if registration is None:
        opened.close()
        raise ConfigError(
            'pool.register = "off" with latents in host memory: kernels read them there; set it to "auto", or '
            '"offload": "off"'
        )
    return HostPool(opened.region, shared=False, view=_aliases(registration.alias, device))


def on_cpu(region: MemoryRegion, *, shared: bool = False) -> HostPool:
    """Hand out a region whose readers run on the CPU: tensors are plain views."""
    memory = torch.frombuffer(region.buffer, dtype=torch.int8)
    return HostPool(region, shared, lambda offset, length: memory[offset : offset + length])


def _aliases(alias: Callable[[int, int], object], device: torch.device) -> Callable[[int, int], torch.Tensor]:
    from tidal_connector.ops.npu.alias import Alias, alias_tensor

    def view(offset: int, length: int) -> torch.Tensor:
        found = alias(offset, length)
        assert isinstance(found, Alias)
        return alias_tensor(found, (length,), torch.int8, device)

    return view


def _number(device: torch.device) -> int:
    """Return the device's number in this process; vllm-ascend sets the current one before it builds a worker."""
    if device.index is not None:
        return device.index
    return int(torch.get_device_module(device).current_device())
