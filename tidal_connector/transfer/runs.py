# SPDX-License-Identifier: Apache-2.0
"""Token ranges become byte runs: pure arithmetic over two regions and their page lists.

Takes a source and a destination region with the pages that hold one request's tokens; hands on :class:`Run`
values, neighbours merged, exact to the last row. Knows neither requests nor transports. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tidal_connector.errors import LayoutMismatch
from tidal_connector.layout import Region


class Run(msgspec.Struct, frozen=True):
    """Bytes that are contiguous on both sides.

    Attributes:
        source: address in this process.
        destination: address in the peer's process.
        length: bytes.
    """

    source: int
    destination: int
    length: int


def plan_runs(
    source: Region,
    destination: Region,
    source_pages: Sequence[int],
    destination_pages: Sequence[int],
    first: int,
    end: int,
    destination_first: int = 0,
) -> list[Run]:
    """Turn the rows of tokens ``[first, end)`` of one region into runs.

    Args:
        source: the region here. Token ``t`` lies in page ``source_pages[t // source.page_tokens]``.
        destination: the same region at the peer; its page size may be any other.
        source_pages: page ids of the source, from token 0 on.
        destination_pages: page ids of the destination, from token ``destination_first`` on.
        first: first token, counted from the start of the request.
        end: one past the last token; ``end == first`` gives no runs.
        destination_first: token at which ``destination_pages`` starts, a multiple of the destination's page
            size.

    Raises:
        LayoutMismatch: the regions differ in kind, layer or row size, the range is not covered by the page
            lists, or a page id is outside its region.
    """
    _check(source, destination, first, end, destination_first)
    row = source.row_bytes
    runs: list[Run] = []
    token = first
    while token < end:
        source_page, source_row = divmod(token, source.page_tokens)
        destination_page, destination_row = divmod(token - destination_first, destination.page_tokens)
        if source_page >= len(source_pages) or destination_page >= len(destination_pages):
            raise LayoutMismatch(
                f"{source.kind} layer {source.layer}: token {token} of [{first}, {end}) is beyond the pages: "
                f"{len(source_pages)} source pages of {source.page_tokens} tokens, {len(destination_pages)} "
                f"destination pages of {destination.page_tokens} tokens from token {destination_first}"
            )
        tokens = min(end - token, source.page_tokens - source_row, destination.page_tokens - destination_row)
        here = source.address(source_pages[source_page], source_row)
        there = destination.address(destination_pages[destination_page], destination_row)
        last = runs[-1] if runs else None
        if last and last.source + last.length == here and last.destination + last.length == there:
            runs[-1] = Run(last.source, last.destination, last.length + tokens * row)
        else:
            runs.append(Run(here, there, tokens * row))
        token += tokens
    return runs


def _check(source: Region, destination: Region, first: int, end: int, destination_first: int) -> None:
    mine = (source.kind, source.layer, source.row_bytes)
    theirs = (destination.kind, destination.layer, destination.row_bytes)
    if mine != theirs:
        raise LayoutMismatch(f"regions differ: {mine} here, {theirs} there (kind, layer, row bytes)")
    if destination_first < 0 or destination_first % destination.page_tokens:
        raise LayoutMismatch(
            f"destination_first = {destination_first}: expected a multiple of the destination's page of "
            f"{destination.page_tokens} tokens"
        )
    if not destination_first <= first <= end:
        raise LayoutMismatch(f"tokens [{first}, {end}): expected {destination_first} <= first <= end")


def split_runs(runs: Iterable[Run], largest: int) -> Iterator[Run]:
    """Cut runs into descriptors of at most ``largest`` bytes, in order; none spans two runs.

    Raises:
        ValueError: ``largest`` is below 1.
    """
    if largest < 1:
        raise ValueError(f"largest = {largest}: expected at least 1 byte")
    for run in runs:
        for offset in range(0, run.length, largest):
            yield Run(run.source + offset, run.destination + offset, min(largest, run.length - offset))
