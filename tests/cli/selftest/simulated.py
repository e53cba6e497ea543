# SPDX-License-Identifier: Apache-2.0
"""A device for the self-test that is none: stand-ins for CANN's libraries, of which one runs the simulated kernels.

What the real device adds is torch_npu alone. Operators are called, and the pool is opened and registered, by the
package's own code. The kernels read the pool through the stand-in's alias, which is another address than the host's.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tests.standins.aclnn import StandIns
from tidal_connector.cli.selftest.device import Array, EngineNeeds, Pool
from tidal_connector.cli.selftest.torch_device import TorchDevice
from tidal_connector.config import PoolConfig
from tidal_connector.memory.acl import AclRuntime, DevicePool, device_number, open_device_pool
from tidal_connector.ops.npu.arguments import GATHER_MISS_ROWS
from tidal_connector.ops.npu.calls import AscendOperators

ENGINE = EngineNeeds(dtype="float32", block_size=16, topk=64)


class SimulatedDevice(TorchDevice):
    """Kernels on the CPU.

    Args:
        operators: the stand-ins for CANN's operator libraries, opened.
        runtime: the stand-in for libascendcl, loaded.
    """

    def __init__(self, operators: StandIns, runtime: AclRuntime) -> None:
        super().__init__(torch.device("cpu"), "a simulated NPU", ENGINE)
        self._operators = AscendOperators(operators.library, lambda _: 0)
        self._runtime = runtime

    @contextlib.contextmanager
    def open_pool(self, size: int) -> Iterator[Pool]:
        with open_device_pool(size, PoolConfig(), self._runtime, 0) as opened:
            pool = _SimulatedPool(opened)
            try:
                yield pool
            finally:
                pool.host = np.empty(0, np.uint8)

    def gather_selection(self, arguments: dict[str, Any], block: int) -> Any:
        return self._operators.gather_selection_kv_cache(arguments, block)

    def gather_miss_rows(self, *tensors: Any) -> None:
        self._operators.gather_miss_rows(dict(zip(GATHER_MISS_ROWS, tensors, strict=True)))


class _SimulatedPool:
    def __init__(self, pool: DevicePool) -> None:
        assert pool.registration is not None
        self._registration = pool.registration
        self.host: Array = np.frombuffer(pool.region.buffer, np.uint8)
        self.report = pool.registration.report().line()

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: str) -> Any:
        kind: torch.dtype = getattr(torch, dtype)
        length = int(np.prod(shape)) * kind.itemsize
        at = device_number(self._registration.alias(offset, length))
        memory = (ctypes.c_uint8 * length).from_address(at)
        return torch.frombuffer(memory, dtype=torch.uint8).view(kind).view(shape)
