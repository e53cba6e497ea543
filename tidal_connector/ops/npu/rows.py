# SPDX-License-Identifier: Apache-2.0
"""``RowScatter``: dense rows to rows of a paged cache, those with a negative place skipped. Forward thread.

This is the write-back of an accelerator, what ``decode.writeback`` does on the CPU: it takes the rows that a step
computed and the host's slot mapping, as they are, to the pool. It is for a host that leaves the writing to us.
vllm-ascend does not, and nothing calls it there: the operators of its attention write the new rows into the pool
themselves, through the alias, and ``selection.device`` gathers them from the pool like all others.

torch's own scatters have no entry that is skipped, and to skip by shape would need the host; GatherMissRows has, and it
reads a dense tensor as a pool of one-row pages.
"""

from __future__ import annotations

import torch

from tidal_connector.ops.npu.library import gather_miss_rows


class RowScatter:
    """Scatters up to so many rows.

    Args:
        rows: most rows of a call.
        device: where they are.
    """

    def __init__(self, rows: int, device: torch.device | str) -> None:
        self._source = torch.arange(rows, dtype=torch.int32, device=device)
        self._count = torch.ones(rows, dtype=torch.int32, device=device)

    def scatter_rows(
        self,
        cache_rope: torch.Tensor,
        cache_nope: torch.Tensor,
        rope: torch.Tensor,
        nope: torch.Tensor,
        where: torch.Tensor,
    ) -> None:
        """Write row i of the rows to row ``where[i]`` of the cache.

        Args:
            cache_rope: ``[blocks, block size, rope dim]``, written in place.
            cache_nope: ``[blocks, block size, nope dim]``, written in place.
            rope: ``[n, rope dim]``, contiguous.
            nope: ``[n, nope dim]``, contiguous.
            where: int32 ``[n]``, rows of the cache; below 0: skipped. No row twice.

        Raises:
            ValueError: there are more rows than this was made for.
        """
        count = where.shape[0]
        if count > self._source.shape[0] or rope.shape[0] != count or nope.shape[0] != count:
            raise ValueError(
                f"where {tuple(where.shape)}, rope {tuple(rope.shape)}, nope {tuple(nope.shape)}: expected one length, "
                f"at most {self._source.shape[0]}"
            )
        gather_miss_rows(
            cache_rope,
            cache_nope,
            rope.view(count, 1, -1),
            nope.view(count, 1, -1),
            self._source[:count].view(count, 1),
            where.view(count, 1),
            self._count[:count],
        )
