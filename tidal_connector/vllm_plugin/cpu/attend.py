# SPDX-License-Identifier: Apache-2.0
"""MLA attention over latent rows, in float32, whatever the rows are kept in.

Pure tensor functions without vLLM. Queries are absorbed (512 latent + 64 rope elements), keys are whole rows
and values their first ``value_width`` elements. Work is cut into slices so that temporary memory stays far
below 256 MiB.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tidal_connector.vllm_plugin.cpu.gather import gather_rows

# A slice of gathered rows this small stays in the cache between the two products.
SELECTED_BYTES = 8 << 20
CONTEXT_ROWS = 16_384
SCORE_BYTES = 32 << 20
MANY_QUERIES = 16
"""Queries of one request from which on one product over all rows that any of them selects may pay."""
PART_QUERIES = 64
ROWS_PER_SELECTED = 4
"""One product over all rows beats a copy of each query's own rows where there are at most so many times as many of
them (measured with 4 heads on one core: 0.10 us per query and row against 0.58 us per query and copied row)."""
_FLOAT = 4


def attend_slots(
    query: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    spans: Iterable[tuple[int, int]],
    scale: float,
    output: torch.Tensor,
) -> None:
    """Let each query attend to the rows that its slot table names.

    Args:
        query: ``[n, heads, width]``, any floating dtype.
        rows: ``[m, width]``, any floating dtype: what the queries select, each row once. A query's rows lie close to
            those of its neighbours (in the order in which they first occur in ``slots``).
        slots: ``[n, k]`` int32 or int64, for each query its rows first, then -1.
        spans: queries ``(start, stop)`` of each request, adjoining and in order, from 0 on. Only queries of one request
            take part in one product: a weight of 0 does not keep out another request's NaN.
        scale: factor of the attention scores.
        output: ``[n, heads, value_width]`` float32 zeros, written; zeros stay for a query that selects nothing or
            belongs to no span. ``value_width`` leading elements of a row are values.
    """
    scores_per_query = ROWS_PER_SELECTED * slots.shape[1] * query.shape[1]
    step = max(1, min(PART_QUERIES, SCORE_BYTES // (scores_per_query * _FLOAT)))
    few = done = 0  # queries [few, done) belong to requests with few queries each
    for start, stop in spans:
        if stop - start >= MANY_QUERIES:
            _attend_each(query[few:start], rows, slots[few:start], scale, output[few:start])
            for at in range(start, stop, step):
                part = slice(at, min(at + step, stop))
                _attend_part(query[part], rows, slots[part], scale, output[part])
            few = stop
        done = stop
    _attend_each(query[few:done], rows, slots[few:done], scale, output[few:done])


def _attend_part(
    query: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, scale: float, output: torch.Tensor
) -> None:
    """Attend for some queries of one request, whichever way costs less."""
    count, heads, width = query.shape
    unused = slots < 0
    low, high = int(slots.masked_fill(unused, rows.shape[0]).min()), int(slots.max()) + 1
    if high - low > ROWS_PER_SELECTED * slots.shape[1]:
        _attend_each(query, rows, slots, scale, output)
        return
    if high <= low:
        return
    chosen = torch.zeros((count, high - low + 1), dtype=torch.bool)
    chosen.scatter_(1, torch.where(unused, high, slots).long() - low, value=True)
    keys = rows[low:high].float()
    scores = ((query.float() * scale).view(-1, width) @ keys.T).view(count, heads, -1)
    scores.masked_fill_(~chosen[:, :-1].unsqueeze(1), float("-inf"))
    weights = scores.softmax(dim=-1)
    torch.mm(weights.view(count * heads, -1), keys[:, : output.shape[2]], out=output.view(count * heads, -1))
    output.masked_fill_(unused[:, :1].unsqueeze(1), 0.0)


def _attend_each(
    query: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, scale: float, output: torch.Tensor
) -> None:
    """Attend with each query's rows side by side: where they lie if they do so already, else in a copy."""
    count, k = slots.shape
    if count == 0:
        return
    first = int(slots[0, 0])
    in_place = first >= 0 and torch.equal(slots.flatten(), torch.arange(first, first + count * k, dtype=slots.dtype))
    query = query.float() * scale
    step = max(1, SELECTED_BYTES // max(1, k * rows.shape[1] * _FLOAT))
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        if in_place:
            keys = rows[first + start * k : first + part.stop * k].view(-1, k, rows.shape[1]).float()
            scores = torch.bmm(query[part], keys.transpose(1, 2))
        else:
            # Rows of unused entries are zeros, never other bytes: their weight is 0, and 0 x NaN would be NaN.
            keys = gather_rows(rows, slots[part].long()).float()
            scores = torch.bmm(query[part], keys.transpose(1, 2))
            scores.masked_fill_((slots[part] < 0).unsqueeze(1), float("-inf"))
        torch.bmm(scores.softmax(dim=-1), keys[..., : output.shape[2]], out=output[part])
    if not in_place:
        output.masked_fill_((slots < 0).all(dim=1).view(-1, 1, 1), 0.0)


def attend_context(
    query: torch.Tensor,
    cache_rows: torch.Tensor,
    slots: torch.Tensor,
    *,
    query_positions: torch.Tensor,
    scale: float,
    value_width: int,
) -> torch.Tensor:
    """Let the queries of one request attend to all of its context, each up to its own position.

    Args:
        query: ``[n, heads, width]``, any floating dtype.
        cache_rows: ``[rows, width]``, any floating dtype.
        slots: ``[length]`` int64, the request's rows in order of position.
        query_positions: ``[n]`` int64, ascending, each below ``length``.
        scale: factor of the attention scores.
        value_width: leading elements of a row that are values.

    Returns:
        ``[n, heads, value_width]`` float32.
    """
    count, heads, width = query.shape
    length = slots.shape[0]
    output = query.new_zeros((count, heads, value_width), dtype=torch.float32)
    peak = query.new_full((count, heads, 1), float("-inf"), dtype=torch.float32)
    total = query.new_zeros((count, heads, 1), dtype=torch.float32)
    for low in range(0, length, CONTEXT_ROWS):
        high = min(low + CONTEXT_ROWS, length)
        rows = gather_rows(cache_rows, slots[low:high]).float()
        step = max(1, SCORE_BYTES // (heads * (high - low) * _FLOAT))
        for start in range(0, count, step):
            part = slice(start, min(start + step, count))
            seen = min(high, int(query_positions[part][-1]) + 1) - low
            if seen <= 0:
                continue
            hidden = torch.arange(low, low + seen) > query_positions[part].unsqueeze(1)
            flat = (query[part].float() * scale).reshape(-1, width)
            scores = (flat @ rows[:seen].T).view(-1, heads, seen)
            scores.masked_fill_(hidden.unsqueeze(1), float("-inf"))
            _merge(scores, rows[:seen, :value_width], peak[part], total[part], output[part])
    return output.div_(total)


def _merge(
    scores: torch.Tensor, values: torch.Tensor, peak: torch.Tensor, total: torch.Tensor, output: torch.Tensor
) -> None:
    """Add a piece of the context to a running softmax (in place: ``peak``, ``total``, ``output``)."""
    highest = torch.maximum(peak, scores.amax(dim=-1, keepdim=True))
    shift = torch.where(highest.isinf(), 0.0, highest)
    weights = (scores - shift).exp_()
    fade = (peak - shift).exp_()
    total.mul_(fade).add_(weights.sum(dim=-1, keepdim=True))
    count, heads, seen = weights.shape
    output.mul_(fade).add_((weights.view(-1, seen) @ values).view(count, heads, -1))
    peak.copy_(highest)
