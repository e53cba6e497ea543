# SPDX-License-Identifier: Apache-2.0
"""What the self-test asks of a device, as far as torch can do it alike on any device.

``npu`` adds what is an NPU's own: opening it, its pool, and waiting for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tidal_connector.cli.selftest.device import Array, EngineNeeds

_INTEGER = {torch.bfloat16: torch.int16, torch.float16: torch.int16}


class TorchDevice:
    """Tensors on one device.

    Args:
        device: as torch names it.
        name: what reports call it.
        engine: what an engine on it wants.
    """

    def __init__(self, device: torch.device, name: str, engine: EngineNeeds) -> None:
        self.device = device
        self.name = name
        self.engine = engine

    def put(self, array: Array, dtype: str) -> Any:
        """Return a tensor in device memory with the array's bytes, as elements of that type."""
        wanted: torch.dtype = getattr(torch, dtype)
        return torch.from_numpy(np.ascontiguousarray(array)).view(wanted).to(self.device, copy=True)

    def take(self, tensor: Any) -> Array:
        """Return a tensor's bytes on the host, once all that was queued is done."""
        self.finish()
        host = tensor.to("cpu", copy=True)
        array: Array = host.view(_INTEGER.get(host.dtype, host.dtype)).numpy()
        return array

    def finish(self) -> None:
        """Wait until all that was queued is done: nothing to wait for where calls are not queued."""

    def staged(self, size: int) -> Any:
        """Return a tensor of so many bytes in pinned host memory, the source of a plain copy."""
        return torch.zeros(size, dtype=torch.int8, pin_memory=self.device.type != "cpu")
