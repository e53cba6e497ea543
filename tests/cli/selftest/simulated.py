# SPDX-License-Identifier: Apache-2.0
"""A device for the self-test that is none: the AscendC kernels in simulation, and the stand-in for libascendcl.

What the real device adds is torch_npu alone. The pool is opened and registered by the package's own code, and the
kernels read it through the stand-in's alias, which is another address than the host's.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tests.ops_ascendc.kernels import BFLOAT16, FLOAT16, INT8, MISSES, SELECTION, Kernels
from tidal_connector.cli.selftest.device import Array, EngineNeeds, Pool
from tidal_connector.cli.selftest.torch_device import TorchDevice
from tidal_connector.config import PoolConfig
from tidal_connector.memory.acl import AclRuntime, DevicePool, device_number, open_device_pool

ENGINE = EngineNeeds(dtype="float32", block_size=16, topk=64)
_ELEMENTS = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.int8: INT8}


class SimulatedDevice(TorchDevice):
    """Kernels on the CPU.

    Args:
        kernels: the simulated operators.
        runtime: the stand-in for libascendcl, loaded.
    """

    def __init__(self, kernels: Kernels, runtime: AclRuntime) -> None:
        super().__init__(torch.device("cpu"), "a simulated NPU", ENGINE)
        self.kernels = kernels
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
        arrays, elements = _arrays(arguments)
        return torch.from_numpy(
            self.kernels.gather_selection_kv_cache(selection_topk_block_size=block, elements=elements, **arrays)
        )

    def gather_miss_rows(self, *tensors: Any) -> None:
        arrays, elements = _arrays(dict(zip(MISSES, tensors, strict=True)))
        self.kernels.gather_miss_rows(elements=elements, **arrays)


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


def _arrays(tensors: dict[str, Any]) -> tuple[dict[str, Array], dict[str, int]]:
    """Return the tensors' memory as arrays, and the elements that numpy has no name for."""
    names = [name for name in (*SELECTION, *MISSES) if name in tensors]
    wide = {torch.bfloat16: torch.int16, torch.float16: torch.int16}
    arrays = {name: tensors[name].view(wide.get(tensors[name].dtype, tensors[name].dtype)).numpy() for name in names}
    elements = {name: _ELEMENTS[tensors[name].dtype] for name in names if tensors[name].dtype in _ELEMENTS}
    return arrays, elements
