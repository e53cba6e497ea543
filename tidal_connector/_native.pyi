# SPDX-License-Identifier: Apache-2.0
"""Types of the native module; csrc/bindings/ is its source."""

import numpy as np
import numpy.typing as npt

def version() -> str: ...
def best_path() -> int: ...
def has_path(path: int) -> bool: ...
def gather_rows(
    pool: npt.NDArray[np.uint8],
    slots: npt.NDArray[np.int64],
    out: npt.NDArray[np.uint8],
    threads: int,
    path: int,
) -> int: ...
