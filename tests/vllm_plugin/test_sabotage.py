# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from tidal_connector.layout import Home, Region, RegionKind  # noqa: E402
from tidal_connector.vllm_plugin.metadata import Receive  # noqa: E402
from tidal_connector.vllm_plugin.params import Sabotage  # noqa: E402
from tidal_connector.vllm_plugin.sabotage import corrupt_row  # noqa: E402

ELEMENTS, TOKENS, PAGES = 8, 4, 6


def pool() -> tuple[np.ndarray, Region]:
    rows = np.arange(1, 1 + PAGES * TOKENS * ELEMENTS, dtype=np.float32).reshape(PAGES, TOKENS, ELEMENTS)
    size = ELEMENTS * 4
    return rows, Region(RegionKind.LATENT, 1, size, Home.HOST, rows.ctypes.data, TOKENS * size, TOKENS, PAGES)


def receive(layer: int, token: int) -> Receive:
    return Receive("r", "xfer-1", "p", "h:1", 5, 11, (4, 2), Sabotage(layer, token))


def test_only_the_named_row_changes_and_all_of_its_signs_do() -> None:
    rows, region = pool()
    before = rows.copy()
    corrupt_row([region], receive(1, 9), 4)  # token 9 is row 1 of the second page from token 4 on: page 2
    assert (rows[2, 1] == -before[2, 1]).all()
    rows[2, 1] *= -1
    assert (rows == before).all()


@pytest.mark.parametrize(("layer", "token"), [(0, 9), (1, 4), (1, 11), (1, -1)])
def test_a_row_that_was_not_received_is_left_alone(layer: int, token: int) -> None:
    rows, region = pool()
    before = rows.copy()
    corrupt_row([region], receive(layer, token), 4)
    assert (rows == before).all()
