# SPDX-License-Identifier: Apache-2.0
"""What the ranks of one engine settle among themselves before caches exist: the smallest budget, and a name.

Asks vLLM's tensor-parallel group, which exists before memory is measured; its own deadlines bound the wait. Worker's
main thread, at start only; every rank has to call.
"""

from __future__ import annotations


def least(value: int, size: int) -> int:
    """Return the smallest value that any of ``size`` ranks gave."""
    if size == 1:
        return value
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    smallest = torch.tensor([value], dtype=torch.int64)
    torch.distributed.all_reduce(smallest, op=torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group)
    return int(smallest[0])
