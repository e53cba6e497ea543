# SPDX-License-Identifier: Apache-2.0
"""``gather_selection_kv_cache``: the CANN operator GatherSelectionKvCache on the CPU.

Takes the operator's ten arguments as numpy arrays or as torch tensors on the CPU, checks them, and hands them to one
implementation. Keeps nothing between calls: what a row holds is in its status, which belongs to the caller. Any thread,
but one call at a time for the same selection cache. The native implementation releases the interpreter.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from tidal_connector.ops import gather_selection_reference, native
from tidal_connector.ops.gather_selection_call import BFLOAT16, RowType, SelectionCall, SelectionTraffic, checked
from tidal_connector.ops.implementation import Implementation, default_implementation

_CACHES = ("selection_k_rope", "selection_kv_cache", "full_k_rope", "full_kv_cache")


def gather_selection_kv_cache(
    selection_k_rope: Any,
    selection_kv_cache: Any,
    selection_kv_block_table: Any,
    selection_kv_block_status: Any,
    selection_topk_indices: Any,
    full_k_rope: Any,
    full_kv_cache: Any,
    full_kv_block_table: Any,
    full_kv_actual_seq: Any,
    full_q_actual_seq: Any,
    *,
    selection_topk_block_size: int | None = 64,
    threads: int = 1,
    implementation: Implementation | None = None,
    traffic: SelectionTraffic | None = None,
) -> Any:
    """Bring the selected entries of each row into its selection cache, reading only those that are not there yet.

    B requests compute S tokens each (at most 7), and each of these R = B * S rows selects K ids (at most 2,048). Id x
    is the tokens ``[x * block, (x + 1) * block)`` of its request; K > 32 demands blocks of one token. Slot i of a row
    holds one id. After the call the slots ``0 .. n-1`` hold the n valid ids of the row, in an order that depends on the
    history, and status says which. Ids below 0 and ids past the row's end do not count, and for K <= 32 the first
    negative id ends the row. The row of query s sees ``full_kv_actual_seq[b] - (S - 1 - s)`` tokens; a row that sees
    none is left as it is. A copy is used again unless it may be older than the pool: if it has a position of this step
    (``>= full_kv_actual_seq[b] - S``, thus also a rejected draft), or was a block that had not all its tokens.

    The caller fills status with -1 at the start and whenever a row gets another request, gives each id once, and has
    the KV of this step in the pool before the call. Rows of the tables and of status may be permuted together.

    Args:
        selection_k_rope: ``[selection blocks, selection block size, rope dim]``, or shape ``(0,)`` if the rows of
            kv_cache carry all bytes; written in place. 16-bit or 8-bit elements, as all caches.
        selection_kv_cache: ``[selection blocks, selection block size, kv dim]``, written in place.
        selection_kv_block_table: int32 ``[at least R, pages]``, the pages of each row's slots; only read.
        selection_kv_block_status: int32 ``[B, S, 1, K + 1]`` or ``[B * S, 1, K + 1]``: the id in each slot or -1, then
            the number of valid tokens; written in place.
        selection_topk_indices: int32 ``[B, S, 1, K]`` or ``[B * S, 1, K]``, as status.
        full_k_rope: ``[blocks, block size, rope dim]``, or shape ``(0,)``.
        full_kv_cache: ``[blocks, block size, kv dim]``.
        full_kv_block_table: int32 ``[B, pages]``.
        full_kv_actual_seq: int32 ``[B]``, tokens of each request with the S of this step; 0 or less skips the request.
        full_q_actual_seq: int32 ``[B]``; without effect, as in the operator it stands for.
        selection_topk_block_size: tokens of an id; None and what is below 1 stand for 64.
        threads: workers at most (native only).
        implementation: None takes native where it was built, else the reference.
        traffic: what this call moved is added to it.

    Returns:
        int32 ``[rows of selection_kv_block_table]``: valid tokens of each row, 0 where it was skipped. A torch tensor
        if selection_topk_indices is one.

    Raises:
        TypeError: an argument is neither an array nor a CPU tensor, or has a wrong dtype.
        ValueError: shapes, strides or lengths do not fit.
        IndexError: a page that has to be read or written is outside its cache, or belongs to two slots.
        NativeOpMissing: native was asked for and is not there.
        After each of them nothing was written.
    """
    given = {
        "selection_k_rope": selection_k_rope,
        "selection_kv_cache": selection_kv_cache,
        "selection_kv_block_table": selection_kv_block_table,
        "selection_kv_block_status": selection_kv_block_status,
        "selection_topk_indices": selection_topk_indices,
        "full_k_rope": full_k_rope,
        "full_kv_cache": full_kv_cache,
        "full_kv_block_table": full_kv_block_table,
        "full_kv_actual_seq": full_kv_actual_seq,
        "full_q_actual_seq": full_q_actual_seq,
    }
    if threads < 1:
        raise ValueError(f"threads = {threads}: expected at least 1")
    arrays = {name: _array(name, value) for name, value in given.items()}
    call = checked(arrays, {name: _row_type(given[name]) for name in _CACHES}, selection_topk_block_size)
    if (implementation or default_implementation("gathering selections")) is Implementation.NATIVE:
        moved = _native(call, threads)
    else:
        moved = gather_selection_reference.gather_selection_kv_cache(call)
    if traffic is not None:
        traffic.add(moved)
    if isinstance(selection_topk_indices, np.ndarray):
        return call.actual
    return sys.modules["torch"].from_numpy(call.actual)


def _native(call: SelectionCall, threads: int) -> SelectionTraffic:
    counts = native.load().gather_selection_kv_cache(
        call.selection_kv,
        call.selection_rope,
        call.selection_table,
        call.status,
        call.ids,
        call.full_kv,
        call.full_rope,
        call.full_table,
        call.lengths,
        call.actual,
        call.queries,
        call.block,
        call.by_blocks,
        threads,
    )
    hits, moved, fetched, rows, wrong_row, wrong_id = counts
    if wrong_row >= 0:
        raise call.page_error(wrong_row, wrong_id)
    return SelectionTraffic(hits, moved, fetched, rows, rows * call.row_bytes)


def _array(name: str, value: Any) -> npt.NDArray[Any]:
    """Return the memory of an argument as an array; torch is used only if the caller has imported it."""
    if isinstance(value, np.ndarray):
        return value
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: {type(value).__name__}: expected a numpy array or a torch tensor on the CPU")
    if value.device.type != "cpu":
        raise TypeError(f"{name}: a tensor on {value.device}: expected one on the CPU")
    plain = value.detach()
    try:
        array: npt.NDArray[Any] = (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()
    except TypeError as error:  # float8 and others that numpy lacks
        raise TypeError(f"{name}: dtype {value.dtype}: expected one that numpy has, or a view as int8") from error
    return array


def _row_type(value: Any) -> RowType:
    """Return the dtype of a cache, which has become an array already."""
    torch: Any = sys.modules.get("torch")
    if isinstance(value, np.ndarray):
        dtype: np.dtype[Any] = value.dtype
        return dtype
    return BFLOAT16 if value.dtype == torch.bfloat16 else np.dtype(str(value.dtype).removeprefix("torch."))
