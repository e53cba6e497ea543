# SPDX-License-Identifier: Apache-2.0
"""All eight rooms in one process: one prompt goes from prefill to decode over the loopback plane, and is attended to.

    python examples/walk.py [--sabotage]

Read it from the bottom up: ``main`` walks through the rooms. There is no thread but the plane's own, no engine and no
model: each room's real piece is called by hand, and what it was given and handed on is printed. In an engine the same
pieces are driven by ``prefill/sender.py``, ``decode/receiver.py`` and ``vllm_plugin/``.

The case: three layers, of which layer 1 uses the selection of layer 0 and layer 2 shares nothing; rows of 512 + 64
float16 elements; prefill keeps pages of 16 tokens, decode pages of 128. The prompt of request B, 300 tokens, is
computed in two chunks. Decode has its first 128 tokens already: request A, which starts with the same text, runs there.
The exit status is 0 only if decode's memory and its attention are the same as prefill's, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.table import Table

from tidal_connector.config import PageKind, PoolConfig
from tidal_connector.control.messages import (
    Accepted,
    Landed,
    Message,
    Notice,
    Reserve,
    encode,
    open_envelope,
    read_body,
)
from tidal_connector.control.party import SessionKey
from tidal_connector.decode import reservations as receiving
from tidal_connector.ids import DevicePageId, Generation, HostPageId, Incarnation, new_incarnation, new_transfer_id
from tidal_connector.layout import Home, KVLayout, Placement, Region, RegionKind, RegionSpec
from tidal_connector.memory import open_region
from tidal_connector.prefill import requests, sends
from tidal_connector.selection.fetch import fetch
from tidal_connector.selection.plan import GatherPlan, choose, pool_rows
from tidal_connector.selection.residency import StepBuffer
from tidal_connector.transfer.loopback import LoopbackFabric, LoopbackPlane
from tidal_connector.transfer.runs import Run, plan_runs

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

PROMPT, CHUNKS, PREFIX, A_TOKENS = 300, ((0, 160), (160, 300)), 128, 140
TOPK, HEADS, WIDTH, VALUES, INDEX_WIDTH = 64, 4, 576, 512, 128
P_PAGE, P_PAGE_COUNT = 16, 40
P_PAGES = (*range(8, 20), 3, 2, 30, 31, 32, 33, 25)  # of request B; where they are neighbours, runs are merged
D_PAGE, D_PAGE_COUNT = 128, 8
A_PAGES, B_PAGES = (5, 2), (5, 0, 6)  # page 5 holds the text that both start with
SENT_PAGES = B_PAGES[PREFIX // D_PAGE :]
LEADER_OF = (0, 0, 2)
UNTOUCHED = 0xA5


def _regions() -> tuple[RegionSpec, ...]:
    found = []
    for layer, leader in enumerate(LEADER_OF):
        found.append(RegionSpec(RegionKind.LATENT, layer, 2 * WIDTH, "float16", "float16", 2 * (WIDTH - VALUES)))
        if leader == layer:  # a follower selects nothing itself, so it has no index keys
            found.append(RegionSpec(RegionKind.INDEX, layer, INDEX_WIDTH + 4, "int8"))
    return tuple(found)


LAYOUT = KVLayout("walk", _regions(), TOPK, LEADER_OF, rope="none", weights="none", kv_dtype="float16")


class Memory:
    """The caches of one side: for each region of the layout, bytes ``[pages, page_tokens, row_bytes]``."""

    def __init__(self, page_tokens: int, pages: int, pool: Bytes | None) -> None:
        """Latents go into ``pool``; None keeps them on the device."""
        self.caches: list[Bytes] = []
        regions, used = [], 0
        for spec in LAYOUT.regions:
            size = pages * page_tokens * spec.row_bytes
            home = Home.HOST if pool is not None and spec.kind is RegionKind.LATENT else Home.DEVICE
            if pool is not None and home is Home.HOST:
                flat, used = pool[used : used + size], used + size
            else:
                flat = np.empty(size, np.uint8)
            flat.fill(UNTOUCHED)
            self.caches.append(flat.reshape(pages, page_tokens, spec.row_bytes))
            base, stride = flat.ctypes.data, page_tokens * spec.row_bytes
            regions.append(Region(spec.kind, spec.layer, spec.row_bytes, home, base, stride, page_tokens, pages))
        self.placement = Placement(tuple(regions))
        self.placement.check(LAYOUT)

    def write(self, region: int, pages: Sequence[int], first: int, rows: Bytes) -> None:
        """Write the rows of tokens ``first`` and following of a request."""
        cache = self.caches[region]
        for token, row in enumerate(rows, start=first):
            cache[pages[token // cache.shape[1]], token % cache.shape[1]] = row

    def read(self, region: int, pages: Sequence[int], tokens: int) -> Bytes:
        """Copy the rows of the first tokens of a request: ``[tokens, row_bytes]``."""
        cache = self.caches[region]
        return cache[list(pages)].reshape(-1, cache.shape[2])[:tokens]


class Tale:
    """Prints what each room was given and what it handed on."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)

    def part(self, title: str) -> None:
        """Start a part of the walk."""
        self._table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
        for name, ratio in (("room", 3), ("was given", 8), ("handed on", 10)):
            self._table.add_column(name, ratio=ratio)

    def tell(self, room: str, given: str, handed_on: str) -> None:
        """Add a line."""
        self._table.add_row(f"[cyan]{room}[/]", given, handed_on)

    def end(self) -> None:
        """Print the part."""
        self.console.print(self._table)


def plural(count: int, noun: str) -> str:
    """Return ``1 run`` or ``2 runs``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def region_of(kind: RegionKind, layer: int) -> int:
    """Return the position of a region in the layout."""
    return next(at for at, spec in enumerate(LAYOUT.regions) if (spec.kind, spec.layer) == (kind, layer))


def regions_of(layer: int) -> list[int]:
    """Return the positions of a layer's regions."""
    return [at for at, spec in enumerate(LAYOUT.regions) if spec.layer == layer]


def model_rows(region: int, text: int, tokens: range) -> Bytes:
    """Stand in for the model: the rows that it writes for tokens of a text. All texts share their first 128 tokens."""
    rows = []
    for token in tokens:
        draw = np.random.default_rng((region, token, text if token >= PREFIX else 0))
        if LAYOUT.regions[region].kind is RegionKind.LATENT:
            parts = [draw.standard_normal(WIDTH).astype(np.float16)]
        else:
            parts = [draw.integers(-127, 128, INDEX_WIDTH, np.int8), draw.uniform(0.5, 1.5, 1).astype(np.float32)]
        rows.append(np.concatenate([part.view(np.uint8) for part in parts]))
    return np.stack(rows)


def model_selects(keys: Bytes, layer: int) -> npt.NDArray[np.int32]:
    """Stand in for the indexer: the 64 best positions of one request for its last token, ascending."""
    query = np.random.default_rng(layer).standard_normal(INDEX_WIDTH).astype(np.float32)
    scales = keys[:, INDEX_WIDTH:].copy().view(np.float32)[:, 0]
    scores = (keys[:, :INDEX_WIDTH].view(np.int8).astype(np.float32) @ query) * scales
    return np.sort(np.argsort(-scores, kind="stable")[:TOPK]).astype(np.int32)


def attention(query: Floats, rows: Bytes) -> Floats:
    """One query ``[heads, 576]`` over rows of bytes ``[k, 1152]``: ``[heads, 512]``."""
    keys = np.ascontiguousarray(rows).view(np.float16).astype(np.float32)
    scores = query @ keys.T * np.float32(WIDTH**-0.5)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    result: Floats = (weights / weights.sum(axis=1, keepdims=True)) @ keys[:, :VALUES]
    return result


class HandOver:
    """Rooms 1 to 4: the send machine, the plane, the receive machine, and the words between them."""

    def __init__(self, tale: Tale, p: Memory, d: Memory, carry: Callable[[Sequence[Run]], sends.PartEnded]) -> None:
        self.tale, self.p, self.d, self.carry = tale, p, d, carry
        self.names: tuple[Incarnation, Incarnation] = (new_incarnation(), new_incarnation())
        row_bytes = tuple(sum(LAYOUT.regions[at].row_bytes for at in regions_of(n)) for n in range(len(LEADER_OF)))
        self.send = sends.new(new_transfer_id(), row_bytes)
        self.wanted = LAYOUT.transfer_bytes(PROMPT - 1 - PREFIX)
        timers = receiving.Timers(60, 30, 10, 120, 900, 9, 3)
        self.receive = receiving.new(self.send.transfer, Generation(1), self.wanted, timers, time.monotonic())

    def step(self, event: sends.Event) -> list[sends.Part]:
        """Step the send machine: its words go to decode at once, its parts are returned."""
        self.send, effects = requests.step(self.send, event, time.monotonic())
        for effect in effects:
            if isinstance(effect, sends.Tell):
                self.land(effect.notice)
        return [effect.part for effect in effects if isinstance(effect, sends.Submit)]

    def wire(self, message: Message) -> tuple[Message, int]:
        """Write and read a message as two workers would; return it with its bytes."""
        frame = encode(*self.names, 1, message)
        return read_body(open_envelope(frame)), len(frame)

    def reserve(self) -> list[sends.Part]:
        """Foyer: decode says which tokens it lacks, and where they go."""
        self.receive, effects = receiving.step(self.receive, receiving.SessionUp(), time.monotonic())
        assert effects == [receiving.Effect.RESERVE]
        host, device = tuple(map(HostPageId, SENT_PAGES)), tuple(map(DevicePageId, SENT_PAGES))
        words, size = self.wire(Reserve(self.send.transfer, Generation(1), PREFIX, PROMPT - 1, host, device, 900, 10))
        assert isinstance(words, Reserve)
        self.tale.tell(
            "foyer: reserve",
            f"B has {PROMPT} tokens: {PREFIX} are here by A's prefix, the last one is computed here",
            f"Reserve ({size} bytes on the wire): tokens [{words.first}, {words.end}) to host pages "
            f"{words.host_pages} and device pages {words.device_pages} of {D_PAGE}",
        )
        return self.step(sends.Reserved(SessionKey("decode"), words, 30))

    def save(self, layer: int, first: int, end: int) -> list[sends.Part]:
        """Room 1: the model has written a chunk of one layer."""
        for region in regions_of(layer):
            self.p.write(region, P_PAGES, first, model_rows(region, 1, range(first, end)))
        parts = self.step(sends.Wrote((layer,), first, end))
        todo = ", ".join(f"[{part.first}, {part.end})" for part in parts)
        handed_on = f"to be sent: tokens {todo}" if parts else "remembered: nothing is reserved yet"
        self.tale.tell("1 save", f"layer {layer}: tokens [{first}, {end}) are written", handed_on)
        return parts

    def push(self, part: sends.Part) -> None:
        """Rooms 2 and 3: pages become runs, and the plane carries them."""
        runs: list[Run] = []
        handed_on = []
        for at in regions_of(part.layer):
            here, there = self.p.placement.regions[at], self.d.placement.regions[at]
            found = plan_runs(here, there, P_PAGES, SENT_PAGES, part.first, part.end, PREFIX)
            runs += found
            size, largest = sum(run.length for run in found), max(run.length for run in found)
            handed_on.append(f"{here.kind}: {plural(len(found), 'run')}, {size:,} bytes, the largest {largest:,}")
        pages = -(-part.end // P_PAGE) - part.first // P_PAGE
        given = f"layer {part.layer}, tokens [{part.first}, {part.end}): {pages} pages of {P_PAGE} here"
        self.tale.tell("2 address", given, "; ".join(handed_on))
        ended = self.carry(runs)
        self.step(sends.PartEnded(part.number, ended.ok, ended.drained, ended.reason))

    def land(self, notice: Notice) -> None:
        """Room 4: prefill's words move the receive machine."""
        words, size = self.wire(notice)
        if not isinstance(words, Accepted | Landed):
            sys.exit(f"FAILED: prefill says {words}")
        was = self.receive.phase
        self.receive, _ = receiving.step(self.receive, receiving.Heard(words), time.monotonic())
        given = f"{type(words).__name__} ({size} bytes on the wire): {words.bytes:,} of {self.wanted:,} bytes"
        self.tale.tell("4 land", given, f"B is {self.receive.phase}, was {was}")


def carrier(tale: Tale, plane: LoopbackPlane, peer: str, news: threading.Event) -> Callable[..., sends.PartEnded]:
    """Room 3: submit runs and wait for their receipt, which in an engine comes back to the control thread."""

    def carry(runs: Sequence[Run]) -> sends.PartEnded:
        ticket = plane.submit(peer, runs)
        while not (receipts := plane.poll()):
            if not news.wait(timeout=5):
                sys.exit(f"FAILED: no receipt for ticket {ticket} within 5 s")
            news.clear()
        (receipt,) = receipts
        spent = (receipt.finished - receipt.started) * 1e6
        handed_on = f"receipt: {receipt.bytes:,} bytes acknowledged in {spent:.0f} us"
        tale.tell("3 carry", f"ticket {ticket}: {plural(len(runs), 'run')} for {peer}", handed_on)
        return sends.PartEnded(0, receipt.ok, receipt.drained, receipt.reason)

    return carry


def decode_step(tale: Tale, d: Memory) -> list[Floats]:
    """Rooms 5 to 8: one token of A and one of B, in every layer. Returns the attention of each layer."""
    table = np.array([(*A_PAGES, 0), B_PAGES], np.int64)
    buffer = StepBuffer(2 * TOPK)
    slots = np.empty((2 * TOPK, 2 * WIDTH), np.uint8)  # the device's buffer
    plans: dict[int, GatherPlan] = {}
    outputs = []
    for layer, leader in enumerate(LEADER_OF):
        if leader == layer:
            index = region_of(RegionKind.INDEX, layer)
            both = (A_PAGES, A_TOKENS), (B_PAGES, PROMPT)
            chosen = np.stack([model_selects(d.read(index, pages, tokens), layer) for pages, tokens in both])
            rows = pool_rows(chosen, table, np.array([0, 1]), D_PAGE)
            buffer.release()
            plans[layer] = choose(rows, buffer)
            count = len(plans[layer].misses)
            tale.tell(
                "5 choose",
                f"layer {layer}: the {TOPK} best positions for 1 token of A and of B, {buffer.resident} rows resident",
                f"plan: {count} pool rows to fetch, {chosen.size - count} fewer than selected, as A and B share a page",
            )
        plan = plans[leader]
        latent = d.caches[region_of(RegionKind.LATENT, layer)]
        moved = fetch(latent.reshape(-1, 2 * WIDTH), plan, slots, buffer)
        buffer.check()
        whose = "its plan" if leader == layer else f"the plan of layer {leader}"
        tale.tell("6 fetch", f"layer {layer}: {whose}, {len(plan.misses)} rows", f"{moved:,} bytes in the buffer")
        tale.tell("7 hold", f"slots {plan.first_slot} to {buffer.resident - 1}", f"{buffer.resident} slots resident")
        heads = model_query(layer)
        outputs.append(np.stack([attention(heads[row], slots[plan.slots[row]]) for row in range(2)]))
        given = f"{len(slots)} slots of {2 * WIDTH} bytes, slot table {plan.slots.shape}"
        tale.tell("8 attend", given, f"output {outputs[-1].shape}, norm {np.linalg.norm(outputs[-1]):.4f}")
    return outputs


def model_query(layer: int) -> Floats:
    """Stand in for the model: absorbed queries of A's and B's token, ``[2, heads, 576]``."""
    return np.random.default_rng((layer, 7)).standard_normal((2, HEADS, WIDTH)).astype(np.float32)


def judge(p: Memory, d: Memory, outputs: Sequence[Floats]) -> list[str]:
    """Compare every byte of decode's memory, and its attention, with what prefill has; return what differs."""
    wrong = []
    for region, spec in enumerate(LAYOUT.regions):
        expected = Memory(D_PAGE, D_PAGE_COUNT, None)
        expected.write(region, A_PAGES, 0, model_rows(region, 0, range(A_TOKENS)))
        expected.write(region, B_PAGES, 0, p.read(region, P_PAGES, PROMPT))
        for page, row in np.argwhere((expected.caches[region] != d.caches[region]).any(axis=2)):
            wrong.append(f"{spec.kind} of layer {spec.layer}: page {page} row {row} is not what prefill wrote")
    for layer, output in enumerate(outputs):
        index, latent = region_of(RegionKind.INDEX, LEADER_OF[layer]), region_of(RegionKind.LATENT, layer)
        chosen = model_selects(p.read(index, P_PAGES, PROMPT), LEADER_OF[layer])
        truth = attention(model_query(layer)[1], p.read(latent, P_PAGES, PROMPT)[chosen])
        if not np.array_equal(truth, output[1]):
            wrong.append(f"attention of layer {layer} differs by up to {np.abs(truth - output[1]).max():.3g}")
    return wrong


def flip_bit(d: Memory) -> str:
    """Spoil one landed row that attention in layer 0 will select; return which."""
    chosen = model_selects(d.read(region_of(RegionKind.INDEX, 0), B_PAGES, PROMPT), 0)
    token = int(chosen[(chosen >= PREFIX) & (chosen < PROMPT - 1)][0])
    page, row = B_PAGES[token // D_PAGE], token % D_PAGE
    d.caches[region_of(RegionKind.LATENT, 0)][page, row, 3] ^= 0x80
    return f"one bit of latent of layer 0, token {token} of B (page {page} row {row}) is flipped"


def walk(tale: Tale, memory: Bytes, sabotage: bool) -> list[str]:
    """Go through all rooms; return what is wrong in the end."""
    fabric, news = LoopbackFabric(), threading.Event()
    p, d = Memory(P_PAGE, P_PAGE_COUNT, None), Memory(D_PAGE, D_PAGE_COUNT, memory)
    every_region = range(len(LAYOUT.regions))
    for region in every_region:
        d.write(region, A_PAGES, 0, model_rows(region, 0, range(A_TOKENS)))
    with LoopbackPlane(fabric, news.set) as here, LoopbackPlane(fabric, news.set) as there:
        for at in every_region:
            source, target = p.placement.regions[at], d.placement.regions[at]
            here.register(source.base, source.extent, source.home, target=False)
            there.register(target.base, target.extent, target.home)
        hand_over = HandOver(tale, p, d, carrier(tale, here, there.endpoint(), news))
        hand_over.step(sends.Opened())
        for number, (first, end) in enumerate(CHUNKS):
            tale.part(f"Prefill computes tokens [{first}, {end}) of B")
            for layer in range(len(LEADER_OF)):
                for part in hand_over.save(layer, first, end):
                    hand_over.push(part)
            if number == 0:  # the reservation comes late: what is written already is caught up
                for part in hand_over.reserve():
                    hand_over.push(part)
            tale.end()
    if hand_over.receive.phase is not receiving.Phase.READY:
        return [f"request B is {hand_over.receive.phase}, expected {receiving.Phase.READY}"]

    tale.part("Decode computes the next token of A and of B")
    for region in every_region:
        d.write(region, B_PAGES, PROMPT - 1, model_rows(region, 1, range(PROMPT - 1, PROMPT)))
    at_page = f"page {B_PAGES[-1]} row {(PROMPT - 1) % D_PAGE}"
    tale.tell("side lane: write-back", f"B's last prompt token {PROMPT - 1}, computed here", f"its rows, in {at_page}")
    if sabotage:
        tale.tell("[red]sabotage[/]", "--sabotage", flip_bit(d))
    outputs = decode_step(tale, d)
    tale.end()
    return judge(p, d, outputs)


def main() -> int:
    """Take the memory, walk, and say how it went."""
    parser = argparse.ArgumentParser(description="One prompt through all eight rooms, in one process.")
    parser.add_argument("--sabotage", action="store_true", help="flip one bit of a landed row that attention selects")
    sabotage = parser.parse_args().sabotage
    begun, tale = time.monotonic(), Tale()
    size = D_PAGE_COUNT * D_PAGE * LAYOUT.row_bytes(RegionKind.LATENT)
    with open_region(size, PoolConfig(pages=PageKind.PLAIN)) as pool:
        tale.console.print(f"{pool.report.line()}\nlayout {LAYOUT.fingerprint()}, {len(LAYOUT.regions)} regions\n")
        wrong = walk(tale, np.frombuffer(pool.buffer, np.uint8), sabotage)
    for line in wrong:
        tale.console.print(f"[red]FAILED[/]: {line}")
    if not wrong:
        tale.console.print(
            f"[green]identical[/]: every byte of decode's memory, and attention in {len(LEADER_OF)} layers; "
            f"{time.monotonic() - begun:.2f} s"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
