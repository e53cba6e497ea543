# SPDX-License-Identifier: Apache-2.0
"""Types of the native module; csrc/bindings/ is its source."""

import numpy as np
import numpy.typing as npt

def version() -> str: ...
def best_path() -> int: ...
def has_path(path: int) -> bool: ...
def copy_rows(
    source: npt.NDArray[np.uint8],
    source_rows: npt.NDArray[np.int64],
    destination: npt.NDArray[np.uint8],
    destination_rows: npt.NDArray[np.int64] | None,
    threads: int,
    path: int,
) -> int: ...

class MoveSet:
    def __init__(self, sources: list[npt.NDArray[np.uint8]], destinations: list[npt.NDArray[np.uint8]]) -> None: ...

class CopyStream:
    def __init__(self, threads: int, path: int) -> None: ...
    def submit(
        self,
        moves: MoveSet,
        first: int,
        count: int,
        source_rows: npt.NDArray[np.int64],
        destination_rows: npt.NDArray[np.int64],
        after: int,
    ) -> int: ...
    def wait(self, ticket: int, seconds: float) -> int: ...
    def settle(self, ticket: int, seconds: float) -> int: ...
    def done(self, ticket: int) -> bool: ...
    def statistics(self) -> tuple[int, int, float, float, float, int]: ...
    def close(self) -> None: ...

class SeatsView:
    def __init__(self, capacity: npt.NDArray[np.int32], extents: npt.NDArray[np.int32], extent_rows: int) -> None: ...

class SlotStateView:
    def __init__(
        self,
        held: npt.NDArray[np.int32],
        order: npt.NDArray[np.int32],
        listed: npt.NDArray[np.uint8],
        filled: npt.NDArray[np.int32],
        length: npt.NDArray[np.int32],
    ) -> None: ...

class ResolveBuffersView:
    def __init__(
        self,
        slots: npt.NDArray[np.int32],
        written: npt.NDArray[np.int32],
        miss_start: npt.NDArray[np.int32],
        miss_rows: npt.NDArray[np.int64],
        miss_slots: npt.NDArray[np.int64],
    ) -> None: ...

def resolve(
    state: SlotStateView,
    seats: SeatsView,
    buffers: ResolveBuffersView,
    selected: npt.NDArray[np.int32],
    query_start: npt.NDArray[np.int32],
    seat: npt.NDArray[np.int32],
    start: npt.NDArray[np.int32],
    pages: npt.NDArray[np.int32],
    page_tokens: int,
    eager_rows: int,
    threads: int,
) -> tuple[int, int, int, int, int, int, int]: ...
def gather_selection_kv_cache(
    selection_kv: npt.NDArray[np.uint8],
    selection_rope: npt.NDArray[np.uint8],
    selection_table: npt.NDArray[np.int32],
    status: npt.NDArray[np.int32],
    ids: npt.NDArray[np.int32],
    full_kv: npt.NDArray[np.uint8],
    full_rope: npt.NDArray[np.uint8],
    full_table: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int32],
    actual: npt.NDArray[np.int32],
    queries: int,
    block: int,
    by_blocks: bool,
    threads: int,
) -> tuple[int, int, int, int, int, int]: ...
