# SPDX-License-Identifier: Apache-2.0
"""A prefill worker and a decode worker in one process: real threads, real sockets, real bytes, no model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from tidal_connector.config import ControlConfig
from tidal_connector.control.loop import ControlLoop
from tidal_connector.control.messages import Identity
from tidal_connector.decode.receiver import ReceiveOutcome, Receiver
from tidal_connector.ids import DevicePageId, EngineId, HostPageId, RequestId, TransferId, new_incarnation
from tidal_connector.layout import Home, KVLayout, Placement, Region, RegionKind, RegionSpec
from tidal_connector.metrics import Counters
from tidal_connector.prefill.sender import Sender, SendOutcome
from tidal_connector.transfer.loopback import LoopbackFabric, LoopbackPlane

FAST = ControlConfig(lease_s=0.6, accept_s=2.0, park_s=1.0, hold_s=1.0, stall_s=1.0, quarantine_s=0.4)
LAYERS = 3
LATENT, INDEX = 40, 12  # bytes of a row


def layout(weights: str = "w0", layers: int = LAYERS) -> KVLayout:
    """Latents in every layer, index keys in all but the last: followers have none."""
    regions: list[RegionSpec] = []
    for layer in range(layers):
        regions.append(RegionSpec(RegionKind.LATENT, layer, LATENT, "float16", "float16", 8))
        if layer < layers - 1:
            regions.append(RegionSpec(RegionKind.INDEX, layer, INDEX, "uint8"))
    return KVLayout("deepseek_v32", tuple(regions), 64, tuple(range(layers)), "yarn", weights, "auto")


Meet = Callable[[str], tuple[str, ...]]


def _alone(address: str) -> tuple[str, ...]:
    return (address,)


class Memory:
    """One worker's caches as numpy arrays: latents at ``home``, index keys on the device.

    What is on the host is the same memory for all ranks of an engine: that of ``first``, if there is one.
    """

    def __init__(
        self, kv: KVLayout, home: Home, page_tokens: int, pages: int, fill: int, first: Memory | None = None
    ) -> None:
        self.page_tokens = page_tokens
        self.arrays: list[NDArray[np.uint8]] = []
        regions: list[Region] = []
        for place, spec in enumerate(kv.regions):
            where = home if spec.kind is RegionKind.LATENT else Home.DEVICE
            if first is not None and where is Home.HOST:
                array = first.arrays[place]
            else:
                array = np.full((pages, page_tokens, spec.row_bytes), fill, np.uint8)
            self.arrays.append(array)
            stride = page_tokens * spec.row_bytes
            regions.append(
                Region(spec.kind, spec.layer, spec.row_bytes, where, array.ctypes.data, stride, page_tokens, pages)
            )
        self.placement = Placement(tuple(regions))

    def register(self, plane: LoopbackPlane) -> None:
        """Register every array."""
        for array, region in zip(self.arrays, self.placement.regions, strict=True):
            plane.register(array.ctypes.data, array.nbytes, region.home)

    def rows(self, region: int, pages: Sequence[int], first: int, end: int) -> NDArray[np.uint8]:
        """Rows of tokens [first, end) through a page list from token 0 on, as a copy."""
        array = self.arrays[region]
        flat = array[list(pages)].reshape(-1, array.shape[2])
        return flat[first:end].copy()

    def write(self, region: int, pages: Sequence[int], first: int, rows: NDArray[np.uint8]) -> None:
        """Write rows from token ``first`` on."""
        for offset, row in enumerate(rows):
            page, slot = divmod(first + offset, self.page_tokens)
            self.arrays[region][pages[page], slot] = row


class Prefill:
    """A sending worker."""

    def __init__(
        self,
        stack: ExitStack,
        fabric: LoopbackFabric,
        *,
        page_tokens: int = 16,
        pages: int = 256,
        settings: ControlConfig = FAST,
        kv: KVLayout | None = None,
        engine: str = "prefill-0",
        rank: int = 0,
        size: int = 1,
        meet: Meet = _alone,
    ) -> None:
        kv = kv or layout()
        self.counters = Counters()
        self.memory = Memory(kv, Home.DEVICE, page_tokens, pages, 0x11)
        self.plane = LoopbackPlane(fabric, self._receipts, window=4, descriptor_bytes=4096)
        stack.enter_context(self.plane)
        self.memory.register(self.plane)
        placement = self.memory.placement
        self.sender = Sender(
            kv, placement, self.plane, self.counters, settings, descriptor_bytes=4096, rank=rank, size=size
        )
        self.loop = ControlLoop(
            Identity(EngineId(engine), new_incarnation(), rank, size),
            settings,
            kv,
            placement,
            self.plane.endpoint(),
            self.counters,
            sender=self.sender,
            meet=meet,
        )
        stack.enter_context(self.loop)

    def _receipts(self) -> None:
        self.loop.wake()

    def outcome(self, timeout_s: float = 10.0) -> SendOutcome:
        """Wait for the next single outcome."""
        assert self.sender.wait(timeout_s), "no outcome of the sender"
        (found,) = self.sender.outcomes()
        return found


class Decode:
    """A receiving worker: latents on the host, index keys on the device."""

    def __init__(
        self,
        stack: ExitStack,
        fabric: LoopbackFabric,
        *,
        page_tokens: int = 16,
        pages: int = 256,
        settings: ControlConfig = FAST,
        kv: KVLayout | None = None,
        engine: str = "decode-0",
        rank: int = 0,
        size: int = 1,
        meet: Meet = _alone,
        first: Memory | None = None,
    ) -> None:
        kv = kv or layout()
        self.counters = Counters()
        self.memory = Memory(kv, Home.HOST, page_tokens, pages, 0x7E, first)
        self.plane = LoopbackPlane(fabric, self._receipts)
        stack.enter_context(self.plane)
        self.memory.register(self.plane)
        placement = self.memory.placement
        assert settings.quarantine_s is not None
        self.receiver = Receiver(
            kv, placement, self.plane, self.counters, settings, settings.quarantine_s, rank=rank, size=size
        )
        self.loop = ControlLoop(
            Identity(EngineId(engine), new_incarnation(), rank, size),
            settings,
            kv,
            placement,
            self.plane.endpoint(),
            self.counters,
            receiver=self.receiver,
            meet=meet,
        )
        stack.enter_context(self.loop)

    def _receipts(self) -> None:
        self.loop.wake()

    def outcome(self, timeout_s: float = 10.0) -> ReceiveOutcome:
        """Wait for the next single outcome."""
        assert self.receiver.wait(timeout_s), "no outcome of the receiver"
        (found,) = self.receiver.outcomes()
        return found


class Handover:
    """One request on both sides, with random rows and shuffled pages that differ between host, device and prefill."""

    def __init__(
        self, name: str, prefill: Prefill, decode: Decode, tokens: int, first: int = 0, seed: int = 0, slot: int = 0
    ) -> None:
        self.name = name
        self.prefill = prefill
        self.decode = decode
        self.tokens = tokens
        self.first = first
        random = np.random.default_rng(seed + tokens)
        size, there = prefill.memory.page_tokens, decode.memory.page_tokens
        here_pages, there_pages = -(-tokens // size), -(-tokens // there)
        self.pages = [int(p) for p in random.permutation(here_pages) + slot * here_pages]
        self.host = [int(p) for p in random.permutation(there_pages) + slot * there_pages]
        self.device = [int(p) for p in random.permutation(there_pages) + slot * there_pages]
        self.rows = [
            random.integers(0, 256, (tokens, region.row_bytes), dtype=np.uint8)
            for region in prefill.memory.placement.regions
        ]

    @property
    def request(self) -> RequestId:
        """P's request id; D's differs."""
        return RequestId(f"p-{self.name}")

    @property
    def transfer(self) -> TransferId:
        """The transfer."""
        return TransferId(f"xfer-{self.name}")

    def open(self, hold_s: float | None = None, prompt: str = "") -> None:
        """P schedules the request."""
        self.prefill.sender.open(self.request, self.transfer, hold_s, prompt)
        self.prefill.sender.pages(self.request, [DevicePageId(page) for page in self.pages])

    def compute(self, first: int, end: int) -> None:
        """P computes one chunk, layer by layer."""
        regions = self.prefill.memory.placement.regions
        for layer in range(LAYERS):
            for index, region in enumerate(regions):
                if region.layer == layer:
                    self.prefill.memory.write(index, self.pages, first, self.rows[index][first:end])
            self.prefill.sender.ready_many((layer,), [(self.request, first, end)])

    def done(self) -> None:
        """P's prompt is complete and vLLM ends the request."""
        self.prefill.sender.prefill_done(self.request, time.monotonic())
        self.prefill.sender.finish(self.request, self.tokens)

    def reserve(self, engine: str = "prefill-0", address: str | None = None, prompt: str = "") -> None:
        """D asks for what it lacks."""
        skip = self.first // self.decode.memory.page_tokens
        self.decode.receiver.reserve(
            RequestId(f"d-{self.name}"),
            self.transfer,
            EngineId(engine),
            address or self.prefill.loop.address,
            self.first,
            self.tokens,
            [HostPageId(page) for page in self.host[skip:]],
            [DevicePageId(page) for page in self.device[skip:]],
            prompt,
        )

    def assert_equal(self) -> None:
        """Every row that D asked for is P's; every other row of its pages is untouched."""
        for index, region in enumerate(self.decode.memory.placement.regions):
            pages = self.host if region.home is Home.HOST else self.device
            got = self.decode.memory.rows(index, pages, 0, len(pages) * self.decode.memory.page_tokens)
            np.testing.assert_array_equal(got[self.first : self.tokens], self.rows[index][self.first :])
            assert (got[: self.first] == 0x7E).all()
            assert (got[self.tokens :] == 0x7E).all()

    def expected_bytes(self) -> int:
        """Bytes that must move, to the byte."""
        return layout().transfer_bytes(self.tokens - self.first)


def eventually(check: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until something holds."""
    until = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < until, "it never came to be"
        time.sleep(0.005)
