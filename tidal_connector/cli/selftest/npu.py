# SPDX-License-Identifier: Apache-2.0
"""The self-test's device on an NPU: torch_npu, the installed operator package, a pool registered with ACL.

Opened, used and left on one thread; torch_npu keeps the current device per thread. Without an NPU, CANN or the operator
package :func:`open_npu` says which of them it looked for, where, and how to get it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from tidal_connector.cli.selftest.device import Array, EngineNeeds, Pool
from tidal_connector.cli.selftest.torch_device import TorchDevice
from tidal_connector.config import PoolConfig, child_environment
from tidal_connector.errors import DeviceMissing
from tidal_connector.memory.acl import AclRuntime, DevicePool, open_device_pool
from tidal_connector.ops.npu.alias import alias_tensor
from tidal_connector.ops.npu.library import load_operators

_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


def engine_needs(index: int, environment: Mapping[str, str]) -> EngineNeeds:
    """Return what an engine wants that is to run on the same NPU as this process.

    Args:
        index: of the NPU, among those that this process sees.
        environment: of this process.
    """
    visible = [part.strip() for part in environment.get(_VISIBLE, "").split(",") if part.strip()]
    return EngineNeeds(
        dtype="bfloat16",
        block_size=128,  # the only one of vllm-ascend's sparse attention
        topk=2048,  # which its indexer always selects
        vllm_args=("--gpu-memory-utilization", "0.6"),
        environment={_VISIBLE: visible[index] if index < len(visible) else str(index)},
    )


def open_npu(index: int) -> NpuDevice:
    """Make an NPU the calling thread's device and load the operator package.

    Args:
        index: among those that ASCEND_RT_VISIBLE_DEVICES leaves.

    Raises:
        DeviceMissing: torch_npu, an NPU, CANN or libascendcl is not there, or the NPU cannot be opened.
        NativeOpMissing: the operator package is not.
    """
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:  # OSError: a library of CANN that the loader does not find
        raise DeviceMissing(
            f"torch_npu cannot be imported: {error}; install vllm-ascend and source the set_env.sh of CANN; "
            "what can be tried without an NPU is in make sim-test"
        ) from None
    module: Any = torch.get_device_module("npu")
    try:
        count = module.device_count() if module.is_available() else 0
        if index >= count:
            raise DeviceMissing(
                f"NPU {index}: torch_npu sees {count}; look at npu-smi info, /dev/davinci* and {_VISIBLE}"
            )
        module.set_device(index)
        name = str(module.get_device_name(index))
    except RuntimeError as error:  # torch_npu's own, of whatever the driver said
        text = " ".join(str(error).split())
        raise DeviceMissing(
            f"NPU {index} cannot be opened: {text}; look at npu-smi info: whether it is well, and who holds it"
        ) from None
    load_operators()
    return NpuDevice(index, name, module, AclRuntime.open())


class NpuDevice(TorchDevice):
    """One NPU."""

    def __init__(self, index: int, name: str, module: Any, runtime: AclRuntime) -> None:
        needs = engine_needs(index, child_environment())
        super().__init__(torch.device("npu", index), f"NPU {index}, {name}", needs)
        self._module, self._runtime = module, runtime

    def finish(self) -> None:
        """Wait until all that was queued is done."""
        self._module.synchronize(self.device)

    @contextlib.contextmanager
    def open_pool(self, size: int) -> Iterator[Pool]:
        """Open a pool of the best pages to be had, as an engine does, and register it."""
        with open_device_pool(size, PoolConfig(), self._runtime, self.device.index) as opened:
            pool = _NpuPool(opened, self.device)
            try:
                yield pool
            finally:
                pool.host = np.empty(0, np.uint8)  # a view would keep the memory mapped

    def gather_selection(self, arguments: dict[str, Any], block: int) -> Any:
        """Queue GatherSelectionKvCache; return ``selection_kv_actual_seq``."""
        return torch.ops.tidal.gather_selection_kv_cache(**arguments, selection_topk_block_size=block)

    def gather_miss_rows(self, *tensors: Any) -> None:
        """Queue GatherMissRows."""
        torch.ops.tidal.gather_miss_rows(*tensors)


class _NpuPool:
    def __init__(self, pool: DevicePool, device: torch.device) -> None:
        if pool.registration is None:
            raise DeviceMissing("the pool is not registered; expected pool.register other than off")
        self._registration, self._device = pool.registration, device
        self.host: Array = np.frombuffer(pool.region.buffer, np.uint8)
        self.report = f"{pool.region.report.line()}; {pool.registration.report().line()}"

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a device tensor over the pool's alias."""
        kind: torch.dtype = getattr(torch, dtype)
        length = int(np.prod(shape)) * kind.itemsize
        return alias_tensor(self._registration.alias(offset, length), shape, kind, self._device)
