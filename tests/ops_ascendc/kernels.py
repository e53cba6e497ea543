# SPDX-License-Identifier: Apache-2.0
"""The simulated kernels as Python functions on numpy arrays, with the signature of ``tidal_connector.ops``.

Takes the library that ``build`` made. Any thread; calls on different caches may overlap.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tidal_connector.ops.npu.arguments import GATHER_MISS_ROWS, GATHER_SELECTION_KV_CACHE

Array = npt.NDArray[Any]

SELECTION = (*GATHER_SELECTION_KV_CACHE, "selection_kv_actual_seq")
FLOAT16, BFLOAT16, INT8, INT32, OTHER = range(5)
_ELEMENTS = {"uint16": FLOAT16, "float16": FLOAT16, "int16": BFLOAT16, "int8": INT8, "uint8": INT8, "int32": INT32}
GARBAGE = -1431655766  # what an output that nobody wrote holds


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("element", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * 4),
    )


class _Machine(ctypes.Structure):
    _fields_ = (
        ("cores", ctypes.c_int64),
        ("ub_bytes", ctypes.c_int64),
        ("lazy_dma", ctypes.c_int32),
        ("scalar_cache", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
    )


class _Traffic(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("dma_read", "dma_written", "scalar_read", "scalar_written"))


class _Report(ctypes.Structure):
    _fields_ = (
        ("error", ctypes.c_char * 1024),
        ("tiling_key", ctypes.c_uint64),
        ("cores", ctypes.c_int64),
        ("workspace_bytes", ctypes.c_int64),
        ("barriers", ctypes.c_uint64),
        ("traffic", _Traffic * 11),
    )


class RefusedByHost(Exception):
    """The host tiling refuses the arguments."""


class Stopped(Exception):
    """The kernel, or the machine that it runs on, found a fault."""


@dataclass(frozen=True)
class Machine:
    """A simulated device; see the harness's header."""

    cores: int = 4
    ub_bytes: int = 0
    lazy_dma: bool = False
    scalar_cache: bool = False
    seed: int = 0


@dataclass
class Report:
    """What the last call did."""

    tiling_key: int = 0
    cores: int = 0
    workspace_bytes: int = 0
    barriers: int = 0
    read: dict[str, int] = field(default_factory=dict)  # bytes by DMA, by tensor
    written: dict[str, int] = field(default_factory=dict)
    scalar_read: dict[str, int] = field(default_factory=dict)

    @property
    def pool_bytes(self) -> int:
        """Bytes read from the full pool."""
        return self.read["full_kv_cache"] + self.read["full_k_rope"]


class Kernels:
    """The two operators on one machine; ``report`` tells about the last call."""

    def __init__(self, library: Path, machine: Machine | None = None) -> None:
        self._library = ctypes.CDLL(str(library))
        self.machine = machine or Machine()
        self.report = Report()

    def gather_selection_kv_cache(
        self, *, selection_topk_block_size: int = 64, elements: dict[str, int] | None = None, **arrays: Array
    ) -> Array:
        """Run the operator; return selection_kv_actual_seq.

        Args:
            selection_topk_block_size: as in the operator.
            elements: element codes that the dtypes of the arrays do not say.
            arrays: the ten inputs by name, and the output if it is to have another shape than the right one.

        Raises:
            RefusedByHost: the host tiling refuses.
            Stopped: the kernel stops.
        """
        table = arrays["selection_kv_block_table"]
        actual = arrays.setdefault("selection_kv_actual_seq", np.full(table.shape[:1], GARBAGE, np.int32))
        tensors = _tensors(SELECTION, arrays, elements or {})
        call = self._library.tidal_gather_selection_kv_cache
        self._run(SELECTION, call, tensors, ctypes.c_int64(selection_topk_block_size))
        return actual

    def gather_miss_rows(self, *, elements: dict[str, int] | None = None, **arrays: Array) -> None:
        """Run the operator on its seven arguments by name; raises as the other one."""
        self._run(
            GATHER_MISS_ROWS, self._library.tidal_gather_miss_rows, _tensors(GATHER_MISS_ROWS, arrays, elements or {})
        )

    def _run(self, names: tuple[str, ...], call: Any, tensors: Any, *more: Any) -> None:
        machine = _Machine(
            self.machine.cores,
            self.machine.ub_bytes,
            self.machine.lazy_dma,
            self.machine.scalar_cache,
            self.machine.seed,
        )
        report = _Report()
        outcome = call(tensors, *more, ctypes.byref(machine), ctypes.byref(report))
        seen = dict(zip(names, report.traffic, strict=False))
        self.report = Report(
            report.tiling_key,
            report.cores,
            report.workspace_bytes,
            report.barriers,
            {name: traffic.dma_read for name, traffic in seen.items()},
            {name: traffic.dma_written for name, traffic in seen.items()},
            {name: traffic.scalar_read for name, traffic in seen.items()},
        )
        if outcome:
            raise (None, RefusedByHost, Stopped)[outcome](report.error.decode())


def _tensors(names: tuple[str, ...], arrays: dict[str, Array], elements: dict[str, int]) -> Any:
    tensors = (_Tensor * len(names))()
    for tensor, name in zip(tensors, names, strict=True):
        array = arrays[name]
        assert array.flags.c_contiguous or 0 in array.strides, name  # a shape without memory is refused, not read
        tensor.data = array.ctypes.data
        tensor.element = elements.get(name, _ELEMENTS.get(str(array.dtype), OTHER))
        tensor.rank = array.ndim
        tensor.dims[: array.ndim] = array.shape
    return tensors
