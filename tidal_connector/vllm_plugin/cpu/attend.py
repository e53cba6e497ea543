# SPDX-License-Identifier: Apache-2.0
"""MLA attention over latent rows, in float32, whatever the cache holds.

Pure tensor functions without vLLM. Queries are absorbed (512 latent + 64 rope elements), keys are whole rows
and values their first ``value_width`` elements. Work is cut into slices so that temporary memory stays far
below 256 MiB.
"""

from __future__ import annotations

import torch

from tidal_connector.vllm_plugin.cpu.gather import gather_rows

# A slice of gathered rows this small stays in the cache between the two products.
SELECTED_BYTES = 8 << 20
CONTEXT_ROWS = 16_384
SCORE_BYTES = 32 << 20
_FLOAT = 4


def attend_selected(
    query: torch.Tensor, cache_rows: torch.Tensor, slots: torch.Tensor, scale: float, value_width: int
) -> torch.Tensor:
    """Let each query attend to its own selection of rows.

    Args:
        query: ``[n, heads, width]``, any floating dtype.
        cache_rows: ``[rows, width]``, any floating dtype.
        slots: ``[n, k]`` int64, the selected rows first, then -1.
        scale: factor of the attention scores.
        value_width: leading elements of a row that are values.

    Returns:
        ``[n, heads, value_width]`` float32; zeros for a query that selects nothing.
    """
    count, heads, width = query.shape
    output = query.new_zeros((count, heads, value_width), dtype=torch.float32)
    valid = slots >= 0
    step = max(1, SELECTED_BYTES // max(1, slots.shape[1] * width * _FLOAT))
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        # Rows of unused entries are zeros, never old bytes of the cache: their weight is 0, and 0 x NaN would be NaN.
        rows = gather_rows(cache_rows, slots[part]).float()
        scores = torch.bmm(query[part].float() * scale, rows.transpose(1, 2))
        scores.masked_fill_(~valid[part].unsqueeze(1), float("-inf"))
        weights = scores.softmax(dim=-1)
        torch.bmm(weights, rows[..., :value_width], out=output[part])
    return output.masked_fill_(~valid[:, :1].unsqueeze(1), 0.0)


def attend_context(
    query: torch.Tensor,
    cache_rows: torch.Tensor,
    slots: torch.Tensor,
    *,
    query_positions: torch.Tensor,
    selected: torch.Tensor | None,
    scale: float,
    value_width: int,
) -> torch.Tensor:
    """Let the queries of one request attend to its context, each up to its own position.

    The context's rows are read once for all queries, which pays when most of them are selected by most
    queries.

    Args:
        query: ``[n, heads, width]``, any floating dtype.
        cache_rows: ``[rows, width]``, any floating dtype.
        slots: ``[length]`` int64, the request's rows in order of position.
        query_positions: ``[n]`` int64, ascending, each below ``length``.
        selected: ``[n, k]`` int32 positions and -1, to attend to these only; None attends to all.
        scale: factor of the attention scores.
        value_width: leading elements of a row that are values.

    Returns:
        ``[n, heads, value_width]`` float32; zeros for a query that selects nothing.
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
            mask = _mask(query_positions[part], None if selected is None else selected[part], low, seen)
            flat = (query[part].float() * scale).reshape(-1, width)
            scores = (flat @ rows[:seen].T).view(-1, heads, seen)
            scores.masked_fill_(mask.unsqueeze(1), float("-inf"))
            _merge(scores, rows[:seen, :value_width], peak[part], total[part], output[part])
    return output.div_(total.masked_fill_(total == 0, 1.0))


def _mask(query_positions: torch.Tensor, selected: torch.Tensor | None, low: int, seen: int) -> torch.Tensor:
    """Return ``[n, seen]``, True where position ``low + j`` must not be attended to."""
    columns = torch.arange(low, low + seen)
    hidden = columns > query_positions.unsqueeze(1)
    if selected is None:
        return hidden
    chosen = torch.zeros((selected.shape[0], seen + 1), dtype=torch.bool)
    inside = (selected >= low) & (selected < low + seen)
    chosen.scatter_(1, torch.where(inside, selected - low, seen).long(), value=True)
    return hidden | ~chosen[:, :seen]


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
