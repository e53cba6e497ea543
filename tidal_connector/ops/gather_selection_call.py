# SPDX-License-Identifier: Apache-2.0
"""What a call of ``gather_selection_kv_cache`` looks like once its arguments have been checked.

Takes the ten arguments of the operator as numpy arrays, refuses what does not fit, and hands on one value in which rows
are bytes and both layouts of the batch (BSND and TND) are the same list of rows. Reads the arrays; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]

DEFAULT_BLOCK = 64
MAX_TOPK = 2048
MAX_TOPK_OF_BLOCKS = 32  # more ids than this come only as single tokens
MAX_QUERIES = 7
MAX_KV_DIM = 656
BFLOAT16 = "bfloat16"  # numpy has no such type; the arrays come as int16
RowType = np.dtype[Any] | str
_ROW_TYPES: dict[RowType, str] = {
    **{np.dtype(name): name for name in ("float16", "int16", "uint16", "int8", "uint8")},
    BFLOAT16: BFLOAT16,
}


@dataclass(frozen=True)
class SelectionCall:
    """Checked arguments. R = requests * queries rows; row r is query r % queries of request r // queries.

    Attributes:
        requests: B.
        queries: S, tokens that each request computes in this step.
        topk: K, ids in a row.
        block: tokens that one id stands for.
        selection_kv: uint8 ``[selection blocks, selection block size, row bytes]``, written.
        selection_rope: the same for the rope part; without ropes its rows have no bytes.
        selection_table: int32 ``[at least R, pages]``, the pages of each row's slots.
        status: int32 ``[R, K + 1]``, written.
        ids: int32 ``[R, K]``.
        full_kv: uint8 ``[blocks, block size, row bytes]``.
        full_rope: the same for the rope part.
        full_table: int32 ``[B, pages]``.
        lengths: int32 ``[B]``, tokens of each request with those of this step.
        actual: int32, one number for each row of selection_table; zeros, to be written.
    """

    requests: int
    queries: int
    topk: int
    block: int
    selection_kv: Bytes
    selection_rope: Bytes
    selection_table: Ints
    status: Ints
    ids: Ints
    full_kv: Bytes
    full_rope: Bytes
    full_table: Ints
    lengths: Ints
    actual: Ints

    @property
    def rows(self) -> int:
        """R."""
        return self.requests * self.queries

    @property
    def by_blocks(self) -> bool:
        """Whether the rules for few ids hold (K <= 32), not those for many single tokens."""
        return self.topk <= MAX_TOPK_OF_BLOCKS

    @property
    def row_bytes(self) -> int:
        """Bytes of a token, rope included."""
        return int(self.full_kv.shape[2] + self.full_rope.shape[2])

    def page_error(self, row: int, x: int) -> IndexError:
        """Return the error that id x of a row lies in a page outside the full pool."""
        request, column = row // self.queries, x * self.block // self.full_kv.shape[1]
        return IndexError(
            f"full_kv_block_table[{request}, {column}] = {self.full_table[request, column]}: expected a page in "
            f"[0, {self.full_kv.shape[0]}) for id {x} of row {row}"
        )


@dataclass
class SelectionTraffic:
    """What calls moved; one object may collect several calls.

    Attributes:
        hits: ids that were in the selection cache, moved ones included.
        moved: ids that changed their slot inside the selection cache.
        fetched: ids read from the full pool.
        fetched_rows: tokens read from the full pool.
        fetched_bytes: bytes read from the full pool, rope included.
    """

    hits: int = 0
    moved: int = 0
    fetched: int = 0
    fetched_rows: int = 0
    fetched_bytes: int = 0

    def add(self, other: SelectionTraffic) -> None:
        """Add what another call moved."""
        self.hits += other.hits
        self.moved += other.moved
        self.fetched += other.fetched
        self.fetched_rows += other.fetched_rows
        self.fetched_bytes += other.fetched_bytes


def checked(arrays: dict[str, Array], row_types: dict[str, RowType], block: int | None) -> SelectionCall:
    """Return the checked call.

    Args:
        arrays: the ten arguments by name.
        row_types: the dtype of each cache and rope by name, or BFLOAT16.
        block: ``selection_topk_block_size``; None and what is below 1 stand for 64.

    Raises:
        TypeError: an array has a wrong dtype.
        ValueError: shapes, strides or lengths do not fit one another.
        IndexError: a page of a selection block table is outside the cache, or stands in two places.
    """
    block = DEFAULT_BLOCK if block is None or block < 1 else block
    _check_row_types(row_types)
    selection_kv, selection_rope = _caches(arrays, "selection")
    full_kv, full_rope = _caches(arrays, "full")
    for name, part, whole in (("kv_cache", selection_kv, full_kv), ("k_rope", selection_rope, full_rope)):
        if part.shape[2] != whole.shape[2]:
            raise ValueError(
                f"selection_{name}: rows of {part.shape[2]} bytes: expected {whole.shape[2]}, those of full_{name}"
            )
    for name, cache in (("selection_kv_cache", selection_kv), ("full_kv_cache", full_kv)):
        if cache.shape[1] % block or not cache.shape[1]:
            raise ValueError(f"{name}: block size {cache.shape[1]}: expected a multiple of {block} tokens")
    requests, queries, topk = _batch(arrays, block)
    rows = requests * queries
    call = SelectionCall(
        requests=requests,
        queries=queries,
        topk=topk,
        block=block,
        selection_kv=selection_kv,
        selection_rope=selection_rope,
        selection_table=_ints(arrays, "selection_kv_block_table", 2),
        status=arrays["selection_kv_block_status"].reshape(rows, topk + 1),
        ids=arrays["selection_topk_indices"].reshape(rows, topk),
        full_kv=full_kv,
        full_rope=full_rope,
        full_table=arrays["full_kv_block_table"],
        lengths=arrays["full_kv_actual_seq"],
        actual=np.zeros(arrays["selection_kv_block_table"].shape[0], np.int32),
    )
    _check_pages(call)
    return call


def _check_row_types(row_types: dict[str, RowType]) -> None:
    wanted = row_types["full_kv_cache"]
    if wanted not in _ROW_TYPES:
        raise TypeError(f"full_kv_cache: dtype {wanted}: expected one of {', '.join(_ROW_TYPES.values())}")
    for name in ("selection_kv_cache", "selection_k_rope", "full_k_rope"):
        if row_types[name] != wanted:
            raise TypeError(f"{name}: dtype {row_types[name]}: expected {wanted}, that of full_kv_cache")


def _caches(arrays: dict[str, Array], side: str) -> tuple[Bytes, Bytes]:
    """Return the kv and rope rows of one side as bytes."""
    kv_name, rope_name = f"{side}_kv_cache", f"{side}_k_rope"
    kv, rope = arrays[kv_name], arrays[rope_name]
    if kv.ndim != 3 or not 1 <= kv.shape[2] <= MAX_KV_DIM:
        raise ValueError(f"{kv_name}: shape {kv.shape}: expected [blocks, block size, 1 to {MAX_KV_DIM} elements]")
    if rope.shape == (0,):
        rope = np.empty((*kv.shape[:2], 0), kv.dtype)
    if rope.ndim != 3 or rope.shape[:2] != kv.shape[:2]:
        raise ValueError(f"{rope_name}: shape {rope.shape}: expected {[*kv.shape[:2]]} and elements, or (0,) for none")
    for name, array in ((kv_name, kv), (rope_name, rope)):
        if array.size and array.strides[2] != array.itemsize:
            raise ValueError(f"{name}: strides {array.strides}: expected rows of contiguous elements")
        if side == "selection" and not array.flags.writeable:
            raise ValueError(f"{name}: read-only: expected an array that can be written in place")
    return _bytes(kv), _bytes(rope)


def _bytes(array: Array) -> Bytes:
    if not array.size:  # numpy cannot reinterpret rows that have no elements
        return np.empty((*array.shape[:2], array.shape[2] * array.itemsize), np.uint8)
    return array.view(np.uint8)


def _ints(arrays: dict[str, Array], name: str, *ranks: int) -> Ints:
    array = arrays[name]
    if array.dtype != np.int32:
        raise TypeError(f"{name}: dtype {array.dtype}: expected int32")
    if array.ndim not in ranks:
        raise ValueError(f"{name}: shape {array.shape}: expected rank {' or '.join(map(str, ranks))}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: strides {array.strides}: expected a contiguous array")
    return array


def _batch(arrays: dict[str, Array], block: int) -> tuple[int, int, int]:
    """Return B, S and K; check the shapes of all index arrays."""
    ids = _ints(arrays, "selection_topk_indices", 3, 4)
    status = _ints(arrays, "selection_kv_block_status", 3, 4)
    full_table = _ints(arrays, "full_kv_block_table", 2)
    requests, topk = full_table.shape[0], ids.shape[-1]
    if ids.ndim == 4 and ids.shape[0] != requests:
        raise ValueError(f"full_kv_block_table: {requests} rows: expected {ids.shape[0]}, one for each request")
    tokens = ids.shape[0] * ids.shape[1] if ids.ndim == 4 else ids.shape[0]
    if tokens % max(requests, 1) or (tokens and not requests):
        raise ValueError(
            f"selection_topk_indices: {tokens} tokens: expected a multiple of {requests}, the rows of "
            "full_kv_block_table"
        )
    queries = tokens // requests if requests else 0
    if queries > MAX_QUERIES:
        raise ValueError(f"selection_topk_indices: {queries} tokens for each request: expected at most {MAX_QUERIES}")
    if ids.shape[-2] != 1:
        raise ValueError(f"selection_topk_indices: {ids.shape[-2]} heads: expected 1")
    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"selection_topk_indices: {topk} ids in a row: expected 1 to {MAX_TOPK}")
    if topk > MAX_TOPK_OF_BLOCKS and block != 1:
        raise ValueError(
            f"selection_topk_block_size = {block}: expected 1 for more than {MAX_TOPK_OF_BLOCKS} ids in a row ({topk})"
        )
    if status.shape != (*ids.shape[:-1], topk + 1):
        raise ValueError(f"selection_kv_block_status: shape {status.shape}: expected {(*ids.shape[:-1], topk + 1)}")
    if not status.flags.writeable:
        raise ValueError("selection_kv_block_status: read-only: expected an array that can be written in place")
    for name in ("full_kv_actual_seq", "full_q_actual_seq"):
        if _ints(arrays, name, 1).shape[0] != requests:
            raise ValueError(f"{name}: length {arrays[name].shape[0]}: expected {requests}, one for each request")
    return requests, queries, topk


def _check_pages(call: SelectionCall) -> None:
    """Check the selection block table and the lengths; pages of the full pool are checked where they are used."""
    blocks, size = call.selection_kv.shape[:2]
    table = call.selection_table
    pages = -(-call.topk * call.block // size)
    if table.shape[0] < call.rows or table.shape[1] < pages:
        raise ValueError(
            f"selection_kv_block_table: shape {table.shape}: expected at least {(call.rows, pages)} for {call.rows} "
            f"rows of {call.topk} ids"
        )
    if blocks < call.rows * table.shape[1]:
        raise ValueError(
            f"selection_kv_cache: {blocks} blocks: expected at least {call.rows * table.shape[1]}, "
            f"{table.shape[1]} for each of {call.rows} rows"
        )
    room = call.full_table.shape[1] * call.full_kv.shape[1]
    if call.requests and int(call.lengths.max()) > room:
        longest = int(call.lengths.argmax())
        raise ValueError(
            f"full_kv_actual_seq[{longest}] = {call.lengths[longest]}: expected at most {room}, the tokens in a row "
            "of full_kv_block_table"
        )
    back = np.arange(call.queries - 1, -1, -1, dtype=np.int64)
    active = np.flatnonzero((call.lengths[:, np.newaxis] - back).reshape(-1) > 0)
    used = table[active, :pages]
    wrong = np.argwhere((used < 0) | (used >= blocks))
    if wrong.size:
        at, column = wrong[0]
        raise IndexError(
            f"selection_kv_block_table[{active[at]}, {column}] = {used[at, column]}: expected a page in [0, {blocks})"
        )
    flat = used.reshape(-1)
    places = np.argsort(flat, kind="stable")
    twice = np.flatnonzero(flat[places[1:]] == flat[places[:-1]])
    if twice.size:
        first, second = (divmod(int(places[twice[0] + step]), pages) for step in (0, 1))
        raise IndexError(
            f"selection_kv_block_table[{active[second[0]]}, {second[1]}] = {used[second]}: expected a page of its own; "
            f"[{active[first[0]]}, {first[1]}] has it too"
        )
