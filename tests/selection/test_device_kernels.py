# SPDX-License-Identifier: Apache-2.0
"""Whole passes whose rows are copied by the AscendC kernel in simulation, called as on an NPU."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.selection.device_world import World  # noqa: E402 - after torch is known to be there
from tests.standins.aclnn import StandIns  # noqa: E402
from tidal_connector.ops.npu.arguments import GATHER_MISS_ROWS  # noqa: E402
from tidal_connector.ops.npu.calls import AscendOperators  # noqa: E402
from tidal_connector.selection.groups import IndexGroup  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.mark.parametrize("groups", [((0,), (1,)), ((0, 1, 2), (3,))], ids=["alone", "shared"])
def test_every_layer_reads_the_rows_that_the_kernel_brought(groups: tuple[tuple[int, ...], ...]) -> None:
    libraries = StandIns()
    operators = AscendOperators(libraries.library, lambda _device: 0x5EA)

    def gather(*tensors: Any) -> None:
        operators.gather_miss_rows(dict(zip(GATHER_MISS_ROWS, tensors, strict=True)))

    world = World(
        tuple(IndexGroup(members) for members in groups), seed=2, queries=2, element=torch.bfloat16, gather=gather
    )
    world.run(25)
    assert world.totals[1] > 100
    launched = [call for call in libraries.calls() if " on stream 0x5ea -> 0" in call]
    assert len(launched) > 25
    assert libraries.left_over() == (0, 0)
