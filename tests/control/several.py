# SPDX-License-Identifier: Apache-2.0
"""Engines of several ranks in one process: each rank has threads, sockets and caches of its own, the pool is shared."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

import numpy as np

from tests.control.pair import LAYERS, Decode, Prefill
from tidal_connector.decode.receiver import ReceiveOutcome
from tidal_connector.ids import DevicePageId, EngineId, HostPageId, RequestId, TransferId
from tidal_connector.layout import Home
from tidal_connector.prefill.sender import SendOutcome
from tidal_connector.transfer.loopback import LoopbackFabric

T = TypeVar("T")


class Meeting:
    """Ranks that start at once and learn one another's addresses, as vLLM's process groups let them."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._known: dict[int, str] = {}

    def of(self, rank: int) -> Callable[[str], tuple[str, ...]]:
        """Return what a rank calls with its address."""

        def meet(address: str) -> tuple[str, ...]:
            self._known[rank] = address
            self._barrier.wait(10)
            return tuple(self._known[each] for each in sorted(self._known))

        return meet


def _at_once(size: int, start: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(start, range(size)))


def prefill_engine(stack: ExitStack, fabric: LoopbackFabric, size: int) -> list[Prefill]:
    """Start the ranks of a prefill engine."""
    meeting = Meeting(size)
    return _at_once(size, lambda rank: Prefill(stack, fabric, rank=rank, size=size, meet=meeting.of(rank)))


def decode_engine(stack: ExitStack, fabric: LoopbackFabric, size: int) -> list[Decode]:
    """Start the ranks of a decode engine, which share the host pool of rank 0."""
    first = Decode(stack, fabric, rank=0, size=size)
    others = (Decode(stack, fabric, rank=rank, size=size, first=first.memory) for rank in range(1, size))
    return [first, *others]


class Handover:
    """One request on all ranks of both engines: the ids of its pages are the same on each rank, as vLLM's are."""

    def __init__(self, name: str, prefill: Sequence[Prefill], decode: Sequence[Decode], tokens: int) -> None:
        self.prefill, self.decode = prefill, decode
        self.tokens = tokens
        self.p_request, self.d_request = RequestId(f"p-{name}"), RequestId(f"d-{name}")
        self.transfer = TransferId(f"xfer-{name}")
        random = np.random.default_rng(tokens)
        self.pages, self.host, self.device = (
            [int(page) for page in random.permutation(-(-tokens // 16) + 3)] for _ in range(3)
        )
        regions = prefill[0].memory.placement.regions
        self.rows = [random.integers(0, 256, (tokens, r.row_bytes), dtype=np.uint8) for r in regions]

    def open(self) -> None:
        """P schedules the request."""
        for rank in self.prefill:
            rank.sender.open(self.p_request, self.transfer, None)
            rank.sender.pages(self.p_request, [DevicePageId(page) for page in self.pages])

    def compute(self, *, ranks: Sequence[int] | None = None) -> None:
        """P's ranks compute the whole prompt, layer by layer, and vLLM ends the request."""
        for rank in [self.prefill[k] for k in ranks] if ranks is not None else self.prefill:
            for layer in range(LAYERS):
                for index, region in enumerate(rank.memory.placement.regions):
                    if region.layer == layer:
                        rank.memory.write(index, self.pages, 0, self.rows[index])
                rank.sender.ready_many((layer,), [(self.p_request, 0, self.tokens)])
            rank.sender.prefill_done(self.p_request, time.monotonic())
            rank.sender.finish(self.p_request, self.tokens)

    def reserve(self, address: str | None = None) -> None:
        """Every rank of D asks for what it lacks."""
        for rank in self.decode:
            rank.receiver.reserve(
                self.d_request,
                self.transfer,
                EngineId("prefill-0"),
                address or self.prefill[0].loop.address,
                0,
                self.tokens,
                [HostPageId(page) for page in self.host],
                [DevicePageId(page) for page in self.device],
            )

    def received(self) -> list[ReceiveOutcome]:
        """Wait for the outcome of each rank of D."""
        return [rank.outcome() for rank in self.decode]

    def sent(self) -> list[SendOutcome]:
        """Wait for the outcome of each rank of P."""
        return [rank.outcome() for rank in self.prefill]

    def assert_equal(self) -> None:
        """Every rank of D reads P's rows."""
        for rank in self.decode:
            for index, region in enumerate(rank.memory.placement.regions):
                pages = self.host if region.home is Home.HOST else self.device
                np.testing.assert_array_equal(rank.memory.rows(index, pages, 0, self.tokens), self.rows[index])
