# SPDX-License-Identifier: Apache-2.0
"""The two AscendC operators as calls on torch tensors: arguments described, workspace found, task put on the stream.

On an NPU ``torch.ops.tidal.*`` ends here. What is particular to torch_npu is the number of the current stream, which is
a function given from outside; so tests drive the same path with tensors of the CPU. Forward thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tidal_connector.ops.npu.aclnn import DataType, OperatorLibrary, TensorArgument

_TYPES = {
    torch.float32: DataType.FLOAT,
    torch.float16: DataType.FLOAT16,
    torch.bfloat16: DataType.BFLOAT16,
    torch.int8: DataType.INT8,
    torch.uint8: DataType.UINT8,
    torch.int16: DataType.INT16,
    torch.int32: DataType.INT32,
    torch.int64: DataType.INT64,
}


class Workspaces:
    """Device memory that tasks need while they run: a piece for each stream, since tasks of one stream take turns.

    A captured graph remembers addresses. So a piece that has become too small is kept when a larger one takes its
    place; operators need the same few sizes again and again, so there are few of them.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, int], list[torch.Tensor]] = {}

    def address(self, size: int, device: torch.device, stream: int) -> int:
        """Return the address of at least so many bytes for the tasks of a stream."""
        pieces = self._kept.setdefault((device, stream), [])
        if not pieces or pieces[-1].numel() < size:
            pieces.append(torch.empty(size, dtype=torch.uint8, device=device))
        return pieces[-1].data_ptr()


class AscendOperators:
    """Calls of the operators in one library.

    Args:
        library: has both operators.
        stream_of: returns the handle of a device's current stream. With torch_npu, asking for it also hands everything
            that torch has queued to the runtime, so that a direct call cannot overtake it.
    """

    def __init__(self, library: OperatorLibrary, stream_of: Callable[[torch.device], int]) -> None:
        self._library = library
        self._stream_of = stream_of
        self._workspaces = Workspaces()

    def gather_selection_kv_cache(
        self, tensors: Mapping[str, torch.Tensor], selection_topk_block_size: int
    ) -> torch.Tensor:
        """Call GatherSelectionKvCache.

        Args:
            tensors: its ten arguments by name, in their order.
            selection_topk_block_size: tokens of an id; what is below 1 stands for 64.

        Returns:
            int32 ``[rows of selection_kv_block_table]``: valid tokens of each row.

        Raises:
            TypeError, ValueError: a tensor cannot be described to CANN.
            DeviceFailed, NativeOpMissing: as ``OperatorLibrary.run``.
        """
        table = tensors["selection_kv_block_table"]
        actual = table.new_empty(table.shape[:-1])
        arguments = [*_described(tensors), selection_topk_block_size, _describe("selection_kv_actual_seq", actual)]
        self._run("GatherSelectionKvCache", arguments, table.device)
        return actual

    def gather_miss_rows(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Call GatherMissRows.

        Args:
            tensors: its seven arguments by name, in their order.

        Raises:
            TypeError, ValueError: a tensor cannot be described to CANN.
            DeviceFailed, NativeOpMissing: as ``OperatorLibrary.run``.
        """
        self._run("GatherMissRows", _described(tensors), tensors["selection_kv_cache"].device)

    def _run(self, operator: str, arguments: list[TensorArgument | int], device: torch.device) -> None:
        stream = self._stream_of(device)
        self._library.run(operator, arguments, stream, lambda size: self._workspaces.address(size, device, stream))


def npu_stream(device: torch.device) -> int:
    """Return the handle of the current stream of an NPU."""
    stream: int = torch.get_device_module(device).current_stream(device).npu_stream
    return stream


def _described(tensors: Mapping[str, torch.Tensor]) -> list[TensorArgument | int]:
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        where = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"{where}: expected one device")
    return [_describe(name, tensor) for name, tensor in tensors.items()]


def _describe(name: str, tensor: torch.Tensor) -> TensorArgument:
    if tensor.dtype not in _TYPES:
        raise TypeError(f"{name}: dtype {tensor.dtype}: expected one of {', '.join(map(str, _TYPES))}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, strides {tensor.stride()}: expected it contiguous")
    address = tensor.data_ptr() if tensor.numel() else 0
    return TensorArgument(name, address, tuple(tensor.shape), _TYPES[tensor.dtype])
