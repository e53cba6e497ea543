# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.tidal``: GatherSelectionKvCache and GatherMissRows as operators of torch. Importing this defines them.

Each has three implementations: for NPUs (dispatch key PrivateUse1) the AscendC kernel, for CPUs the definition that the
kernels are held to, and a fake one, which knows shapes only and lets ``torch.compile`` and graph capture trace a call.
The NPU's libraries are loaded at the first call there; ``load_operators`` does it ahead, and fails early. Any thread
may import this; calls belong to the forward thread.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tidal_connector import ops
from tidal_connector.ops.npu.aclnn import OperatorLibrary, runtime_message
from tidal_connector.ops.npu.arguments import GATHER_MISS_ROWS, GATHER_SELECTION_KV_CACHE
from tidal_connector.ops.npu.calls import AscendOperators, npu_stream
from tidal_connector.ops.npu.miss_rows import copy_miss_rows

_torch_library: Any = torch.library  # whose constructor and methods have no types
_library = _torch_library.Library("tidal", "DEF")
_library.define(
    "gather_selection_kv_cache(Tensor(a!) selection_k_rope, Tensor(b!) selection_kv_cache, "
    "Tensor(c!) selection_kv_block_table, Tensor(d!) selection_kv_block_status, Tensor selection_topk_indices, "
    "Tensor full_k_rope, Tensor full_kv_cache, Tensor full_kv_block_table, Tensor full_kv_actual_seq, "
    "Tensor full_q_actual_seq, *, int selection_topk_block_size=64) -> Tensor"
)
_library.define(
    "gather_miss_rows(Tensor(a!) selection_k_rope, Tensor(b!) selection_kv_cache, Tensor full_k_rope, "
    "Tensor full_kv_cache, Tensor miss_rows, Tensor miss_slots, Tensor miss_count) -> ()"
)


@cache
def load_operators() -> AscendOperators:
    """Load the operator package and return its operators.

    Raises:
        DeviceMissing: the CANN toolkit cannot be loaded.
        NativeOpMissing: no operator package can.
    """
    return AscendOperators(OperatorLibrary.open(recent_message=runtime_message()), npu_stream)


def gather_miss_rows(
    selection_k_rope: torch.Tensor,
    selection_kv_cache: torch.Tensor,
    full_k_rope: torch.Tensor,
    full_kv_cache: torch.Tensor,
    miss_rows: torch.Tensor,
    miss_slots: torch.Tensor,
    miss_count: torch.Tensor,
) -> None:
    """Copy rows of a pool to slots of a selection cache, where lists say so.

    Args:
        selection_k_rope: ``[blocks, block size, rope dim]``, written in place; shape ``(0,)`` if there is no rope part.
        selection_kv_cache: ``[blocks, block size, kv dim]``, written in place.
        full_k_rope: as selection_k_rope, of the pool.
        full_kv_cache: as selection_kv_cache, of the pool.
        miss_rows: int32 ``[r, m]``, rows of the pool: page * block size + offset.
        miss_slots: int32 ``[r, m]``, rows of the selection cache; no slot twice.
        miss_count: int32 ``[r]``; of each list the entries below it count, except those with a row or slot below 0.
    """
    torch.ops.tidal.gather_miss_rows(
        selection_k_rope, selection_kv_cache, full_k_rope, full_kv_cache, miss_rows, miss_slots, miss_count
    )


def _selection_npu(*tensors: torch.Tensor, selection_topk_block_size: int = 64) -> torch.Tensor:
    named = dict(zip(GATHER_SELECTION_KV_CACHE, tensors, strict=True))
    return load_operators().gather_selection_kv_cache(named, selection_topk_block_size)


def _miss_rows_npu(*tensors: torch.Tensor) -> None:
    load_operators().gather_miss_rows(dict(zip(GATHER_MISS_ROWS, tensors, strict=True)))


def _selection_cpu(*tensors: torch.Tensor, selection_topk_block_size: int = 64) -> torch.Tensor:
    actual: torch.Tensor = ops.gather_selection_kv_cache(*tensors, selection_topk_block_size=selection_topk_block_size)
    return actual


def _selection_fake(*tensors: torch.Tensor, selection_topk_block_size: int = 64) -> torch.Tensor:
    del selection_topk_block_size
    table = tensors[GATHER_SELECTION_KV_CACHE.index("selection_kv_block_table")]
    return table.new_empty(table.shape[:-1])


def _miss_rows_fake(*tensors: torch.Tensor) -> None:
    del tensors


_library.impl("gather_selection_kv_cache", _selection_npu, "PrivateUse1")
_library.impl("gather_miss_rows", _miss_rows_npu, "PrivateUse1")
_library.impl("gather_selection_kv_cache", _selection_cpu, "CPU")
_library.impl("gather_miss_rows", copy_miss_rows, "CPU")
torch.library.register_fake("tidal::gather_selection_kv_cache", _selection_fake, lib=_library)
torch.library.register_fake("tidal::gather_miss_rows", _miss_rows_fake, lib=_library)
