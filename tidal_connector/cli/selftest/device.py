# SPDX-License-Identifier: Apache-2.0
"""All that the self-test asks of a device, so that it runs as well on a stand-in for one.

Every method is called from the one thread that opened the device. Caches are integers of their elements' width on the
host (``int16`` for bfloat16 and float16), because they are only moved and compared.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec
import numpy.typing as npt

Array = npt.NDArray[Any]


class EngineNeeds(msgspec.Struct, frozen=True):
    """What an engine on this device wants of its command line.

    Attributes:
        dtype: of checkpoint and KV.
        block_size: tokens per block.
        topk: rows that the model's attention selects.
        vllm_args: further arguments.
        environment: further variables.
    """

    dtype: str
    block_size: int
    topk: int
    vllm_args: tuple[str, ...] = ()
    environment: dict[str, str] = {}


class Pool(Protocol):
    """Host memory that kernels on the device can read.

    Attributes:
        host: its bytes on the host, writable.
        report: one line: which pages, how registered.
    """

    host: Array
    report: str

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a device tensor over bytes of the pool, without a copy."""
        ...


class TestDevice(Protocol):
    """A device with both operators.

    Attributes:
        name: what reports call it.
        engine: what an engine on it wants.
    """

    name: str
    engine: EngineNeeds

    def put(self, array: Array, dtype: str) -> Any:
        """Return a tensor in device memory with the array's bytes, as elements of that type."""
        ...

    def take(self, tensor: Any) -> Array:
        """Return a tensor's bytes on the host, once all that was queued is done."""
        ...

    def finish(self) -> None:
        """Wait until all that was queued is done."""
        ...

    def open_pool(self, size: int) -> AbstractContextManager[Pool]:
        """Open a pool of so many bytes and register it."""
        ...

    def staged(self, size: int) -> Any:
        """Return a tensor of so many bytes in pinned host memory, the source of a plain copy."""
        ...

    def gather_selection(self, arguments: dict[str, Any], block: int) -> Any:
        """Queue GatherSelectionKvCache on tensors of the device; return ``selection_kv_actual_seq``."""
        ...

    def gather_miss_rows(self, *tensors: Any) -> None:
        """Queue GatherMissRows; the seven tensors in the operator's order."""
        ...
