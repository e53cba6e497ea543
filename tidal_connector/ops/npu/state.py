# SPDX-License-Identifier: Apache-2.0
"""What the slots of an index group hold, kept on the device, and the fixed buffers through which steps reach it.

Buffers are made once, at their largest; a step uses the front of each. So addresses never change, and a graph that was
captured with one step replays with the next. The forward thread owns all of it.
"""

from __future__ import annotations

import torch

FOREVER = (1 << 31) - 1
"""``DeviceBatch.stable`` of a request whose rows were all written through its seat."""

_ALIGN = 16  # int32 per field: CANN wants tensors to begin at 32 bytes, and 64 is a cache line


class DeviceSlotState:
    """Which position sits in which slot, for each seat of one index group: 8 bytes per slot, whatever the context.

    Every seat has ``capacity`` slots and one list of them, empty slots first, then from the longest unused to the last
    used. One more seat than asked for takes what padding rows of a batch write.

    Attributes:
        slots: int32 ``[seats + 1, capacity]``, the slots of each seat in the order of that list.
        positions: int32 ``[seats + 1, capacity]``, the position whose row is in the slot at the same place; -1: none.
        owner: int32 ``[seats + 1]``, generation of the request whose rows these are. A step of another generation
            finds the seat empty, so nobody has to clear a seat that changes hands.
    """

    def __init__(self, seats: int, capacity: int, device: torch.device | str) -> None:
        if seats < 1 or capacity < 1:
            raise ValueError(f"seats = {seats}, capacity = {capacity}: expected at least 1 of each")
        self.seats, self.capacity = seats, capacity
        order = torch.arange(capacity, dtype=torch.int32, device=device)
        self.slots = order.repeat(seats + 1, 1)
        self.positions = torch.full((seats + 1, capacity), -1, dtype=torch.int32, device=device)
        self.owner = torch.full((seats + 1,), -1, dtype=torch.int32, device=device)

    def held(self) -> torch.Tensor:
        """Return int32 ``[seats, capacity]``, the position in each slot or -1, in the order of the slots (tests)."""
        held = torch.full_like(self.positions, -1)
        return held.scatter_(1, self.slots.long(), self.positions)[: self.seats]

    def check(self) -> None:
        """Verify the invariants of all seats. Reads the device; for tests and the doctor.

        Raises:
            AssertionError: one is broken; the message names the seat.
        """
        slots, positions = self.slots.cpu(), self.positions.cpu()
        for seat in range(self.seats):
            listed, held = slots[seat].tolist(), positions[seat].tolist()
            live = [position for position in held if position >= 0]
            assert sorted(listed) == list(range(self.capacity)), f"seat {seat}: its list does not name each slot once"
            assert len(set(live)) == len(live), f"seat {seat}: holds a position twice"
            assert min(held) >= -1, f"seat {seat}: holds position {min(held)}"


class DeviceBatch:
    """The requests of a step, in fixed buffers that one copy fills.

    ``requests`` and ``queries`` are the padded sizes of the current step, and thus those of a captured graph.

    Attributes:
        seat: int32 ``[most requests]``, -1 for padding.
        count: int32 ``[most requests]``, tokens that the request computes in this step, at most ``queries``.
        owner: int32 ``[most requests]``, generation of the request (see ``DeviceSlotState``).
        stable: int32 ``[most requests]``; positions from here on count as not held, besides those of the step itself:
            their rows were written past the seat.
        rows: int32 ``[most requests * most queries]``; entry ``i * queries + q`` is the row of the selection that
            belongs to query ``q`` of request ``i``.
        place: int32 ``[most tokens]``, the way back: the entry of ``rows`` of each row; -1 for padding.
        steps: int32 ``[most queries]``: 0, 1, 2...
    """

    def __init__(self, requests: int, queries: int, tokens: int, device: torch.device | str) -> None:
        if requests < 1 or queries < 1 or tokens < 1:
            raise ValueError(f"requests = {requests}, queries = {queries}, tokens = {tokens}: expected at least 1 each")
        self.most_requests, self.most_queries, self.most_tokens = requests, queries, tokens
        self.requests, self.queries = requests, queries
        lengths = (requests, requests, requests, requests, requests * queries, tokens)
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + -(-length // _ALIGN) * _ALIGN)
        self.memory = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        self._parts = [slice(start, start + length) for start, length in zip(starts[:-1], lengths, strict=True)]
        self.seat, self.count, self.owner, self.stable, self.rows, self.place = self.parts(self.memory)
        self.steps = torch.arange(queries, dtype=torch.int32, device=device)
        self.seat.fill_(-1)
        self.place.fill_(-1)

    def parts(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return seat, count, owner, stable, rows and place of another memory of the same size (staging)."""
        return tuple(memory[part] for part in self._parts)


class DeviceResolved:
    """The plan of one step, in fixed buffers. The next ``resolve`` into it overwrites it.

    Of each request the *fetch list* names the rows to bring into its seat: first the step's own new rows, then the
    misses. What is at or past its count means nothing.

    Attributes:
        slots: int32 ``[most tokens, k]``, slot within the seat of each selected entry; -1: none.
        count: int32 ``[most requests]``, entries of each fetch list.
    """

    def __init__(self, batch: DeviceBatch, top_k: int, device: torch.device | str) -> None:
        self.top_k = top_k
        entries = batch.most_requests * batch.most_queries
        self.slots = torch.full((batch.most_tokens, top_k), -1, dtype=torch.int32, device=device)
        self.count = torch.zeros(batch.most_requests, dtype=torch.int32, device=device)
        self._rows = torch.zeros(entries * (top_k + 1), dtype=torch.int32, device=device)
        self._slots = torch.zeros_like(self._rows)
        self._new_rows = torch.zeros(entries, dtype=torch.int32, device=device)
        self._new_slots = torch.zeros_like(self._new_rows)

    def fetch(self, requests: int, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the fetch lists, int32 ``[requests, queries * (k + 1)]`` each: pool rows, arena rows."""
        return self._front(self._rows, requests, queries * (self.top_k + 1)), self._front(
            self._slots, requests, queries * (self.top_k + 1)
        )

    def new(self, requests: int, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new rows alone, int32 ``[requests, queries]`` each; ``DeviceBatch.count`` counts them."""
        return self._front(self._new_rows, requests, queries), self._front(self._new_slots, requests, queries)

    @staticmethod
    def _front(buffer: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return buffer[: rows * columns].view(rows, columns)
