# SPDX-License-Identifier: Apache-2.0
"""``alias_tensor``: a tensor over memory that a device reaches at an address of its own, such as the host pool.

Nothing is copied and nothing is owned: who registered the memory keeps it until no kernel and no tensor uses it. The
host must not read such a tensor through torch; kernels may, at the speed of the bus. Worker thread, at start.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from math import prod
from typing import Any, Protocol

import torch

from tidal_connector.errors import DeviceMissing


class Alias(Protocol):
    """Where a device finds a range of host memory (``memory.acl.DeviceAlias``; a host address is none)."""

    @property
    def pointer(self) -> int:
        """The address, as kernels see it."""

    @property
    def length(self) -> int:
        """Bytes that may be reached from there."""


def alias_tensor(alias: Alias, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a contiguous tensor that begins where an alias does.

    Args:
        alias: the memory.
        shape: dimensions of the tensor.
        dtype: its elements.
        device: whose alias it is.

    Raises:
        ValueError: the tensor is larger than the memory, or is empty.
        DeviceMissing: this torch_npu cannot make a tensor over memory that it did not allocate.
    """
    size = prod(shape) * dtype.itemsize
    if not 0 < size <= alias.length:
        raise ValueError(f"shape = {tuple(shape)}: {size} bytes of {dtype}: expected 1 to {alias.length} bytes")
    module, storage_over, tensor_over = _torch_npu_makers()
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    facts = {
        "data_ptr": alias.pointer,
        "device": device,
        "nbytes": size,
        "dtype": dtype,
        "size": tuple(shape),
        "stride": tuple(strides),
        "storage_offset": 0,
    }
    tensor: torch.Tensor = tensor_over(facts, storage_over(alias.pointer, device, size))
    if tensor.data_ptr() != alias.pointer or tuple(tensor.shape) != tuple(shape):
        raise DeviceMissing(
            f"torch_npu {module.__version__}: made a tensor {tuple(tensor.shape)} at {tensor.data_ptr():#x}: expected "
            f"{tuple(shape)} at {alias.pointer:#x}, no copy; take the torch_npu that vllm-ascend names"
        )
    return tensor


def _torch_npu_makers() -> tuple[Any, Any, Any]:
    """Return torch_npu and its functions that make a storage over an address and a tensor over a storage.

    They are private, and the only way without a compiler; graph trees of torch_npu itself use them.
    """
    wanted = ("_construct_storage_from_data_pointer", "_construct_NPU_Tensor_From_Storage_And_Metadata")
    try:
        module = importlib.import_module("torch_npu")
    except ImportError as error:
        raise DeviceMissing(f"torch_npu cannot be imported: {error}; it comes with vllm-ascend") from error
    makers = [getattr(module._C, name, None) for name in wanted]
    missing = [name for name, maker in zip(wanted, makers, strict=True) if maker is None]
    if missing:
        raise DeviceMissing(
            f"torch_npu {module.__version__}: has no _C.{' and no _C.'.join(missing)}; take the torch_npu that "
            "vllm-ascend names"
        )
    return module, makers[0], makers[1]
