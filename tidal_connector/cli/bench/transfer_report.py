# SPDX-License-Identifier: Apache-2.0
"""Throughput of layer pushes as a value and as a table. Pure."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from tidal_connector.cli.bench.figures import MachineFacts, Spread

_GIB = 1 << 30
_KIB = 1 << 10


class Case(msgspec.Struct, frozen=True):
    """One geometry of pages.

    Attributes:
        page_tokens: tokens of a page on both sides.
        pages: ``contiguous`` or ``scattered`` (another random order on each side).
        descriptors: writes of one run.
        descriptor_bytes: mean size of a write.
        ratio: throughput over that of the plain socket that ran just before; median of the runs.
        gib_per_s: throughput.
        socket_gib_per_s: of the plain socket.
    """

    page_tokens: int
    pages: str
    descriptors: int
    descriptor_bytes: int
    ratio: Spread
    gib_per_s: Spread
    socket_gib_per_s: Spread


class TransferResult(msgspec.Struct, frozen=True):
    """Everything that was found; its fields are the JSON's keys.

    Attributes:
        bytes: of one run, on either way.
        window: writes in flight at most (more of very small ones).
        largest: bytes of a write at most.
        sender_threads: threads of the process that writes, its interpreter's and the transport's.
        target_pages: what the target's pool is made of.
    """

    bytes: int
    layers: int
    tokens: int
    row_bytes: int
    runs: int
    window: int
    largest: int
    sender_threads: int
    target_pages: str
    machine: MachineFacts
    cases: tuple[Case, ...]


def gib(size: int, seconds: float) -> float:
    """Return GiB per second."""
    return size / seconds / _GIB


def show(found: TransferResult, console: Console) -> None:
    """Print the table."""
    table = Table(
        title=(
            f"{found.layers} layers x {found.tokens} rows of {found.row_bytes} B = {found.bytes / (1 << 20):.0f} MiB "
            f"over loopback TCP, median of {found.runs} (min to max)"
        ),
        caption=(
            f"One batch per layer, window {found.window}, writes of at most {found.largest >> 20} MiB, "
            f"{found.sender_threads} threads in the sender; socket: one sendall per layer, one thread on each side. "
            f"Target: {found.target_pages}. {found.machine.line()}."
        ),
    )
    table.add_column("pages")
    for heading in ("writes", "KiB each", "Mooncake GiB/s", "socket GiB/s", "ratio"):
        table.add_column(heading, justify="right")
    for case in found.cases:
        table.add_row(
            f"{case.page_tokens} tokens, {case.pages}",
            f"{case.descriptors:,}",
            f"{case.descriptor_bytes / _KIB:.0f}",
            case.gib_per_s.text(2),
            case.socket_gib_per_s.text(2),
            case.ratio.text(2),
        )
    console.print(table)
