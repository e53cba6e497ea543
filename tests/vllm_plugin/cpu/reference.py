# SPDX-License-Identifier: Apache-2.0
"""Attention and index scores as their definitions say, one query at a time, in float64."""

from __future__ import annotations

import torch

WIDTH, VALUES, HEADS = 576, 512, 4


def attend(query: torch.Tensor, rows: torch.Tensor, scale: float) -> torch.Tensor:
    """One query ``[heads, 576]`` over its rows ``[k, 576]``: ``[heads, 512]`` float64."""
    query, rows = query.double(), rows.double()
    weights = torch.softmax(query @ rows.T * scale, dim=-1)
    return weights @ rows[:, :VALUES]


def index_scores(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """One index query ``[heads, 128]``, its head weights and keys ``[n, 128]``: scores ``[n]`` float64."""
    dots = torch.relu(query.double() @ keys.double().T)
    return weights.double() @ dots


def best(scores: torch.Tensor, k: int) -> list[int]:
    """Positions of the k best scores, the lowest among equals, ascending."""
    order = sorted(range(len(scores)), key=lambda position: (-float(scores[position]), position))
    return sorted(order[:k])
