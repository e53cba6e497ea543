# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from tests.vllm_plugin.cpu.batches import batch

pytestmark = pytest.mark.vllm


def test_positions_count_from_each_requests_own_start() -> None:
    step = batch([(3, 10), (1, 5), (2, 2)], block_size=16)
    assert step.positions.tolist() == [7, 8, 9, 4, 0, 1]
    assert step.request_of_token.tolist() == [0, 0, 0, 1, 2, 2]


def test_every_token_counts_as_a_decode_token() -> None:
    step = batch([(3, 10), (1, 5)], block_size=16)
    assert (step.num_decodes, step.num_decode_tokens, step.num_prefills) == (2, 4, 0)
    assert step.prefill is None
    assert step.decode is step


@pytest.mark.parametrize("block_size", [16, 128])
def test_positions_become_rows_through_the_block_table(block_size: int) -> None:
    step = batch([(2, 300), (1, 40)], block_size=block_size)
    selected = torch.tensor([[0, 299, -1], [17, 128, 298], [39, -1, -1]], dtype=torch.int32)
    expected = [
        [-1 if p < 0 else int(step.block_table[r, p // block_size]) * block_size + p % block_size for p in row]
        for r, row in zip([0, 0, 1], selected.tolist(), strict=True)
    ]
    assert step.wanted(selected, slice(None)).tolist() == expected
    assert step.context_slots(step.spans[0])[[0, 17, 128, 298, 299]].tolist() == [
        expected[0][0],
        *expected[1],
        expected[0][1],
    ]


def test_a_padded_request_without_tokens_is_no_span() -> None:
    step = batch([(2, 8), (0, 0), (1, 3)], block_size=16)
    assert [(span.row, span.start, span.stop) for span in step.spans] == [(0, 0, 2), (2, 2, 3)]
    assert step.positions.tolist() == [6, 7, 2]


def test_padding_tokens_belong_to_no_span() -> None:
    step = batch([(2, 8)], block_size=16, padding=3)
    assert step.num_actual_tokens == 5
    assert [(span.start, span.stop) for span in step.spans] == [(0, 2)]
    assert step.slot_mapping.tolist()[2:] == [-1, -1, -1]


@pytest.mark.parametrize("entries", [1 << 20, 16, 1])
@pytest.mark.parametrize("capacity", [4, 9, 40, 10_000])
def test_no_piece_selects_more_rows_than_the_buffer_holds(
    capacity: int, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidal_connector.vllm_plugin.cpu import metadata

    monkeypatch.setattr(metadata, "PIECE_ENTRIES", entries)
    step, k = batch([(1, 30), (0, 0), (20, 20), (7, 100), (1, 2), (1, 3)], block_size=16, padding=2), 4
    seen: list[tuple[int, int]] = []
    for part, spans in step.pieces(k, capacity, step.spans):
        most = 0
        for start, stop in spans:
            (owner,) = [s for s in step.spans if s.start <= part.start + start and part.start + stop <= s.stop]
            most += min(k * (stop - start), owner.length)
            seen.append((part.start + start, part.start + stop))
        assert most <= capacity
        assert k * (part.stop - part.start) <= max(entries, k)
        assert (spans[0][0], spans[-1][1]) == (0, part.stop - part.start)
    assert [start for start, _ in seen] == [0, *[stop for _, stop in seen[:-1]]]
    assert seen[-1][1] == 30
    if capacity == 10_000 and entries == 1 << 20:
        assert len(list(step.pieces(k, capacity, step.spans))) == 1
