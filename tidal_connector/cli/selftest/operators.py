# SPDX-License-Identifier: Apache-2.0
"""Both operators on the device against their definition: every call of a random sequence, every byte that it may touch.

The definition is the reference of ``ops.gather_selection_kv_cache`` in plain Python; GatherMissRows is defined by three
lines of numpy. Called from the command's thread; what touches the device goes through the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tidal_connector.cli.selftest.device import Array, TestDevice
from tidal_connector.cli.selftest.report import OperatorCase
from tidal_connector.cli.selftest.sequences import (
    Case,
    MissCase,
    Session,
    apply_misses,
    miss_arguments,
    miss_cases,
    selection_cases,
)
from tidal_connector.cli.selftest.worker import Worker
from tidal_connector.ops import Implementation, SelectionTraffic, gather_selection_kv_cache

CALL_S = 120.0
"""Bound of one call, its copies to the device and back included; the first of all loads kernels."""

_CACHES = ("selection_k_rope", "selection_kv_cache", "full_k_rope", "full_kv_cache")
_WRITTEN = ("selection_k_rope", "selection_kv_cache", "selection_kv_block_status")


def check_operators(
    device: TestDevice, worker: Worker, seed: int, quick: bool, tell: Callable[[str], None]
) -> Iterator[OperatorCase]:
    """Run every case; one result each, also where it is wrong.

    Args:
        device: has the operators; used on the worker's thread only.
        worker: that thread.
        seed: of all sequences.
        quick: fewer calls.
        tell: what is being done.

    Raises:
        Stuck: the device did not answer.
        TidalError: it refused a call.
    """
    for number, case in enumerate(selection_cases(quick)):
        tell(f"GatherSelectionKvCache: {case.name}")
        yield _selection(device, worker, case, seed + number)
    for number, miss in enumerate(miss_cases(quick)):
        tell(f"GatherMissRows: {miss.name}")
        yield _misses(device, worker, miss, seed + number)


def _selection(device: TestDevice, worker: Worker, case: Case, seed: int) -> OperatorCase:
    session = Session(case, seed)
    traffic, calls, wrong = SelectionTraffic(), 0, ""
    while calls < case.steps and not wrong:
        session.step()
        given = {name: array.copy() for name, array in session.arguments.items()}
        what = f"{case.name}, call {calls + 1}"
        found = worker.run(what, CALL_S, lambda given=given: _call(device, case, given))
        actual = gather_selection_kv_cache(
            **session.arguments,
            selection_topk_block_size=case.block,
            implementation=Implementation.REFERENCE,
            traffic=traffic,
        )
        wrong = _first_difference({**session.arguments, "selection_kv_actual_seq": actual}, found)
        calls += 1
    return OperatorCase(
        operator="GatherSelectionKvCache",
        case=case.name,
        calls=calls,
        hits=traffic.hits,
        misses=traffic.fetched,
        moved=traffic.moved,
        bytes=traffic.fetched_bytes,
        wrong=wrong and f"call {calls}: {wrong}",
    )


def _call(device: TestDevice, case: Case, given: dict[str, Array]) -> dict[str, Array]:
    tensors = {name: device.put(array, case.dtype if name in _CACHES else "int32") for name, array in given.items()}
    actual = device.gather_selection(tensors, case.block)
    return {**{name: device.take(tensors[name]) for name in tensors}, "selection_kv_actual_seq": device.take(actual)}


def _misses(device: TestDevice, worker: Worker, case: MissCase, seed: int) -> OperatorCase:
    given = miss_arguments(case, seed)

    def call() -> dict[str, Array]:
        tensors = {name: device.put(array, case.dtype if name in _CACHES else "int32") for name, array in given.items()}
        device.gather_miss_rows(*tensors.values())
        return {name: device.take(tensor) for name, tensor in tensors.items()}

    found = worker.run(case.name, CALL_S, call)
    moved = apply_misses(given)
    row = (case.kv_dim + case.rope_dim) * np.dtype(case.element).itemsize
    wrong = _first_difference(given, found)
    return OperatorCase("GatherMissRows", case.name, 1, 0, moved, 0, moved * row, wrong)


def _first_difference(wanted: dict[str, Array], found: dict[str, Array]) -> str:
    """Say in which argument, and where in it, the device differs from the definition; nothing where it does not."""
    for name, array in wanted.items():
        mine = found[name].reshape(array.shape)
        if np.array_equal(array, mine):
            continue
        at = np.argwhere(array != mine)
        place = tuple(int(i) for i in at[0])
        changed = "" if name in _WRITTEN or name.endswith("actual_seq") else ", which is only read"
        return (
            f"{name}{list(place)} is {mine[place]}, expected {array[place]} ({len(at):,} of {array.size:,} elements "
            f"differ{changed})"
        )
    return ""
