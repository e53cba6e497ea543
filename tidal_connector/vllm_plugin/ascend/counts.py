# SPDX-License-Identifier: Apache-2.0
"""From the counts that a step leaves on the device to the connector's counters, without waiting for the device.

A copy of a step's counts is enqueued before the next pass overwrites them, and read once it has been made. Where the
device is so far behind that all places are taken, a step is not counted. Forward thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tidal_connector.metrics import Counters

PLACES = 4
"""Steps whose counts may be on their way: more than vLLM runs ahead of the device."""

NAMES = ("selection_hits", "selection_misses", "selection_evictions")


class SelectionCounts:
    """Adds up what the selection cache counted.

    Args:
        read: enqueues, and returns, int32 ``[groups, 3]`` on the device: hits, misses and evictions of the last pass.
        members: layers of each group.
        row_bytes: bytes of a latent row.
        slots: of a seat.
        counters: what is counted into.
        device: where the counts are.
    """

    def __init__(
        self,
        read: Callable[[], torch.Tensor],
        members: Sequence[int],
        row_bytes: int,
        slots: int,
        counters: Counters,
        device: torch.device,
    ) -> None:
        self._read = read
        self._members = torch.tensor(members)
        self._row_bytes = row_bytes
        self._slots = slots
        self._counters = counters
        on_cpu = device.type == "cpu"
        self._module: Any = None if on_cpu else torch.get_device_module(device)
        shape = (len(members), len(NAMES))
        self._free = [torch.empty(shape, dtype=torch.int32, pin_memory=not on_cpu) for _ in range(PLACES)]
        self._coming: deque[tuple[torch.Tensor, Any]] = deque()
        self._due = False

    def expect(self, seated: bool, seats: int, pages: int) -> None:
        """Note what pass is about to run.

        Args:
            seated: it is served from the cache, and so will leave counts.
            seats: how many requests have one.
            pages: of the pool, that the requests of the pass hold.
        """
        self._due = seated
        self._counters.set("selection_slots_used", seats * self._slots)
        self._counters.set("pool_pages_used", pages)

    def collect(self) -> None:
        """Send for the counts of the last pass, if it left any, and add up those that have come."""
        if self._due and self._free:
            place = self._free.pop()
            place.copy_(self._read(), non_blocking=True)
            event = None if self._module is None else self._module.current_stream().record_event()
            self._coming.append((place, event))
        self._due = False
        while self._coming and (self._coming[0][1] is None or self._coming[0][1].query()):
            place, _ = self._coming.popleft()
            self._add(place)
            self._free.append(place)

    def _add(self, counts: torch.Tensor) -> None:
        for name, value in zip(NAMES, counts.sum(dim=0).tolist(), strict=True):
            self._counters.add(name, value)
        rows = int((counts[:, 1].long() * self._members).sum())
        self._counters.add("rows_gathered", rows)
        self._counters.add("bytes_gathered", rows * self._row_bytes)
