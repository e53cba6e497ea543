# SPDX-License-Identifier: Apache-2.0
"""The definitions of the operators in numpy: short, slow, and what every other implementation is compared with.

Arguments are checked by the public operators. Any thread.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def gather_rows(pool: npt.NDArray[np.uint8], slots: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> int:
    """Copy rows of ``pool [pages, page_tokens, row_bytes]`` to ``out [n, row_bytes]``; slot -1 gives zeros.

    Returns:
        -1, or the position of the first slot outside ``[-1, rows)``; then nothing was written.
    """
    page_tokens = pool.shape[1]
    wrong = np.flatnonzero((slots < -1) | (slots >= pool.shape[0] * page_tokens))
    if wrong.size:
        return int(wrong[0])
    filled = slots >= 0
    out[~filled] = 0
    if filled.any():
        page, row = np.divmod(slots[filled], page_tokens)
        out[filled] = pool[page, row]
    return -1
