# SPDX-License-Identifier: Apache-2.0
"""What the slots of an index group hold, kept on the device, and the fixed buffers through which steps reach it.

Buffers are made once, at their largest; a step uses the front of each. So addresses never change, and a graph that was
captured with one step replays with the next. The forward thread owns all of it.
"""

from __future__ import annotations

import torch

POSITIONS = 1 << 24
"""Positions are below this, because float32, in which they are sorted, tells neighbours apart up to here. As a position
it stands for none.
"""

FOREVER = (1 << 31) - 1
"""``DeviceBatch.stable`` of a request whose rows were all written through its seat."""

_ALIGN = 16  # int32 per field: CANN wants tensors to begin at 32 bytes, and 64 is a cache line


class DeviceSlotState:
    """Which position sits in which slot, for each seat of one index group: 8 bytes per slot, whatever the context.

    Every seat has ``capacity`` slots and one list of them, empty slots first, then from the longest unused to the last
    used. One more seat than asked for takes what padding rows of a batch write.

    Attributes:
        slots: int32 ``[seats + 1, capacity]``, the slots of each seat in the order of that list.
        positions: float32 ``[seats + 1, capacity]``, the position whose row is in the slot at the same place;
            :data:`POSITIONS` where there is none.
    """

    def __init__(self, seats: int, capacity: int, device: torch.device | str) -> None:
        if seats < 1 or capacity < 1:
            raise ValueError(f"seats = {seats}, capacity = {capacity}: expected at least 1 of each")
        self.seats, self.capacity = seats, capacity
        order = torch.arange(capacity, dtype=torch.int32, device=device)
        self.slots = order.repeat(seats + 1, 1)
        self.positions = torch.full((seats + 1, capacity), POSITIONS, dtype=torch.float32, device=device)

    def held(self) -> torch.Tensor:
        """Return int32 ``[seats, capacity]``, the position in each slot or -1, in the order of the slots (tests)."""
        listed = torch.where(self.positions < POSITIONS, self.positions, -1).int()
        return torch.full_like(listed, -1).scatter_(1, self.slots.long(), listed)[: self.seats]

    def check(self) -> None:
        """Verify the invariants of all seats. Reads the device; for tests and the doctor.

        Raises:
            AssertionError: one is broken; the message names the seat.
        """
        slots, positions = self.slots.cpu(), self.positions.cpu()
        for seat in range(self.seats):
            listed, held = slots[seat].tolist(), positions[seat].tolist()
            live = [position for position in held if position < POSITIONS]
            assert sorted(listed) == list(range(self.capacity)), f"seat {seat}: its list does not name each slot once"
            assert len(set(live)) == len(live), f"seat {seat}: holds a position twice"
            assert all(0 <= position <= POSITIONS for position in held), f"seat {seat}: holds what is no position"


class DeviceBatch:
    """The requests of a step, in fixed buffers that one copy fills.

    ``requests`` and ``queries`` are the padded sizes of the current step, and thus those of a captured graph.

    Attributes:
        seat: int32 ``[most requests]``, -1 for padding.
        count: int32 ``[most requests]``, tokens that the request computes in this step, 1 to ``queries``; 0: padding.
        owner: int32 ``[most requests]``, generation of the request (see ``owners``).
        stable: int32 ``[most requests]``; positions from here on count as not held, besides those of the step itself:
            their rows were written past the seat.
        rows: int32 ``[most requests * most queries]``; entry ``i * queries + q`` is the row of the selection that
            belongs to query ``q`` of request ``i``.
        place: int32 ``[most tokens]``, the way back: the entry of ``rows`` of each row; for padding the number of
            entries that there are at most.
        steps: int32 ``[most queries]``: 0, 1, 2...
        owners: int32 ``[seats + 1]``, the generation that each seat was last used by. A step of another generation
            finds the seat empty, so nobody has to clear a seat that changes hands.
    """

    def __init__(self, seats: int, requests: int, queries: int, tokens: int, device: torch.device | str) -> None:
        if min(seats, requests, queries, tokens) < 1:
            raise ValueError(
                f"seats = {seats}, requests = {requests}, queries = {queries}, tokens = {tokens}: expected at least 1 "
                "of each"
            )
        self.seats, self.most_requests, self.most_queries, self.most_tokens = seats, requests, queries, tokens
        self.requests, self.queries = requests, queries
        lengths = (requests, requests, requests, requests, requests * queries, tokens)
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + -(-length // _ALIGN) * _ALIGN)
        self.memory = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        self._parts = [slice(start, start + length) for start, length in zip(starts[:-1], lengths, strict=True)]
        self.seat, self.count, self.owner, self.stable, self.rows, self.place = self.parts(self.memory)
        self.steps = torch.arange(queries, dtype=torch.int32, device=device)
        self.owners = torch.full((seats + 1,), -1, dtype=torch.int32, device=device)
        self.seat.fill_(-1)
        self.place.fill_(self.no_place)

    @property
    def no_place(self) -> int:
        """What ``place`` says of padding."""
        return self.most_requests * self.most_queries

    def parts(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return seat, count, owner, stable, rows and place of another memory of the same size (staging)."""
        return tuple(memory[part] for part in self._parts)


class DeviceResolved:
    """The plan of one group in a step, in fixed buffers, and the memory that making it needs. The next overwrites it.

    Of each request the *fetch list* names the rows to bring into its seat: first ``queries`` entries for the step's own
    new rows (a pool row of -1 where there are fewer), then the misses. What is at or past its count means nothing.

    Attributes:
        count: int32 ``[most requests]``, entries of each fetch list; 0 for padding.
        statistics: int32 ``[groups, most requests, 3]``, of each group's last plan and each request: rows of the
            selection that were there or are written in the step; these and those that were not; rows that are new to
            the seat beyond its empty slots.
    """

    def __init__(self, batch: DeviceBatch, top_k: int, capacity: int, groups: int, device: torch.device | str) -> None:
        if capacity < batch.most_queries * (top_k + 1):
            raise ValueError(
                f"capacity = {capacity}: {batch.most_queries} queries that select {top_k} rows each need "
                f"{batch.most_queries * (top_k + 1)} slots; raise selection.slots"
            )
        self.top_k, self.capacity = top_k, capacity
        self._found = torch.full((batch.most_tokens, top_k), -1, dtype=torch.int32, device=device)
        requests, entries = batch.most_requests, batch.most_queries * top_k
        self._width = batch.most_queries + entries
        self.count = torch.zeros(requests, dtype=torch.int32, device=device)
        self.statistics = torch.zeros((groups, requests, 3), dtype=torch.int32, device=device)
        self._table = torch.full((batch.no_place + 1, top_k), -1, dtype=torch.int32, device=device)
        fetched, sorted_ = requests * (self._width + 1), requests * (capacity + self._width + 1)
        self._rows, self._slots, self._places = (
            torch.zeros(fetched, dtype=torch.int32, device=device) for _ in range(3)
        )
        self._incoming = torch.zeros(fetched, dtype=torch.float32, device=device)
        self._begins, self._first, self._run_of, self._marks = (
            torch.zeros(sorted_, dtype=torch.int32, device=device) for _ in range(4)
        )

    def table(self, entries: int) -> torch.Tensor:
        """Return int32 ``[entries, k]``: slot within the seat of each selected entry, -1 for none.

        Its rows are the entries of ``DeviceBatch.rows``. What ``DeviceBatch.place`` says of padding is a row of -1
        behind all of them.
        """
        return self._table[:entries]

    @property
    def whole_table(self) -> torch.Tensor:
        """The table with the row of padding."""
        return self._table

    def slots(self, tokens: int) -> torch.Tensor:
        """Return int32 ``[tokens, k]``: slot within the seat of each selected entry, in the order of the selection."""
        return self._found[:tokens]

    def fetch(self, requests: int, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the fetch lists, int32 ``[requests, queries * (k + 1) + 1]`` each: pool rows, arena rows.

        The last column takes what has no place in a list.
        """
        return self._fetched(self._rows, requests, queries), self._fetched(self._slots, requests, queries)

    def places(self, requests: int, queries: int) -> torch.Tensor:
        """Return working memory like a fetch list: slots within the seat."""
        return self._fetched(self._places, requests, queries)

    def incoming(self, requests: int, queries: int) -> torch.Tensor:
        """Return working memory like a fetch list: positions, float32."""
        return self._fetched(self._incoming, requests, queries)

    def _fetched(self, buffer: torch.Tensor, requests: int, queries: int) -> torch.Tensor:
        width = queries * (self.top_k + 1) + 1
        return buffer[: requests * width].view(requests, width)

    def matching(self, requests: int, queries: int) -> tuple[torch.Tensor, ...]:
        """Return working memory for slots, new rows and selection side by side: where positions begin (a column less),
        first of each position, position of each, marks.
        """
        width = self.capacity + queries * (self.top_k + 1)
        wide = [buffer[: requests * (width + 1)].view(requests, width + 1) for buffer in (self._first, self._marks)]
        narrow = [buffer[: requests * width].view(requests, width) for buffer in (self._begins, self._run_of)]
        return narrow[0], wide[0], narrow[1], wide[1]
