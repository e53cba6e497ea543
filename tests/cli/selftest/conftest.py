# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops_ascendc.build import QUICK, build


@pytest.fixture(scope="session")
def kernel_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both kernels, compiled for the simulation."""
    return build(tmp_path_factory.mktemp("kernels"), QUICK)
