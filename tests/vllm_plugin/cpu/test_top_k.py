# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tidal_connector.vllm_plugin.cpu import top_k


def by_sorting(scores: list[float], position: int, k: int) -> list[int]:
    order = sorted(range(position + 1), key=lambda column: (-scores[column], column))
    chosen = sorted(order[:k])
    return chosen + [-1] * (k - len(chosen))


@st.composite
def score_tables(draw: st.DrawFn) -> tuple[list[list[float]], list[int], int]:
    length = draw(st.integers(1, 40))
    # Few distinct values, so that ties at the border of the selection are the rule.
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e-30, -1e-30, 3e38, -3e38])
    rows = draw(st.lists(st.lists(values, min_size=length, max_size=length), min_size=1, max_size=5))
    positions = [draw(st.integers(0, length - 1)) for _ in rows]
    return rows, positions, draw(st.integers(1, 45))


@given(score_tables())
def test_selects_the_best_scores_and_the_lowest_positions_among_equals(
    table: tuple[list[list[float]], list[int], int],
) -> None:
    rows, positions, k = table
    chosen = top_k.select(torch.tensor(rows), torch.tensor(positions), k)
    assert chosen.tolist() == [by_sorting(row, at, k) for row, at in zip(rows, positions, strict=True)]
    assert chosen.dtype == torch.int32


@given(score_tables(), st.integers(0, 60))
def test_the_selection_does_not_depend_on_how_far_the_table_reaches(
    table: tuple[list[list[float]], list[int], int], more: int
) -> None:
    rows, positions, k = table
    longer = [row + [9.0] * more for row in rows]
    near = top_k.select(torch.tensor(rows), torch.tensor(positions), k)
    assert torch.equal(near, top_k.select(torch.tensor(longer), torch.tensor(positions), k))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_everything_is_what_selecting_from_short_contexts_gives(positions: list[int]) -> None:
    at = torch.tensor(positions)
    scores = torch.randn(len(positions), 31)
    assert torch.equal(top_k.everything(at, 31), top_k.select(scores, at, 31))
