# SPDX-License-Identifier: Apache-2.0
"""Counts come from the device one step late, in order, and nothing waits for them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tidal_connector.metrics import Counters  # noqa: E402
from tidal_connector.vllm_plugin.ascend.counts import PLACES, SelectionCounts  # noqa: E402


class Event:
    """Passes when it is told to."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


class Slow:
    """A device whose copies end late."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def current_stream(self) -> Slow:
        return self

    def record_event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]


def test_what_a_pass_left_is_added_at_the_next_one_and_rows_count_for_each_layer_of_a_group() -> None:
    left, counters = torch.zeros(2, 3, dtype=torch.int32), Counters()
    counts = SelectionCounts(lambda: left, [4, 1], 1152, 128, counters, torch.device("cpu"))
    counts.collect()
    left[:] = torch.tensor([[10, 3, 1], [20, 2, 0]])
    assert counters.snapshot()["selection_hits"] == 0  # nobody announced a pass
    counts.expect(True, 3, 40)
    counts.collect()
    counts.collect()  # a pass that was not served leaves nothing to count
    found = counters.snapshot()
    assert (found["selection_hits"], found["selection_misses"], found["selection_evictions"]) == (30, 5, 1)
    assert found["rows_gathered"] == 3 * 4 + 2
    assert found["bytes_gathered"] == 14 * 1152
    assert (found["selection_slots_used"], found["pool_pages_used"]) == (3 * 128, 40)
    counts.expect(False, 0, 0)
    counts.collect()
    assert counters.snapshot()["selection_hits"] == 30


def test_a_slow_device_holds_up_nobody_and_its_counts_come_in_order() -> None:
    left, counters, slow = torch.zeros(1, 3, dtype=torch.int32), Counters(), Slow()
    counts = SelectionCounts(lambda: left, [1], 1152, 128, counters, torch.device("cpu"))
    counts._module = slow
    for step in range(PLACES + 2):  # the last two find no place
        left[:] = 10**step
        counts.expect(True, 3, 40)
        counts.collect()
    assert len(slow.events) == PLACES
    assert counters.snapshot()["selection_hits"] == 0
    slow.events[1].passed = True
    counts.collect()
    assert counters.snapshot()["selection_hits"] == 0
    slow.events[0].passed = True
    counts.collect()
    assert counters.snapshot()["selection_hits"] == 1 + 10
