# SPDX-License-Identifier: Apache-2.0
"""Which tensor-parallel rank a worker is, and how the ranks of one engine learn one another's control addresses.

Asks vLLM's own process groups, which exist before caches are registered. Worker's main thread, at start only.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from tidal_connector.errors import ConfigError

if TYPE_CHECKING:
    import torch

_ROOM = 512  # bytes of an address


def tensor_rank(size: int) -> int:
    """Return this worker's rank among the ``size`` ranks of its engine."""
    if size == 1:
        return 0
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def exchange(address: str, size: int) -> tuple[str, ...]:
    """Return the control addresses of all ranks, in their order. Every rank must call it, and waits for the others.

    vLLM ends all workers of an engine when one of them dies at start, which also ends this wait.

    Raises:
        ConfigError: an address is longer than anybody reads.
    """
    if size == 1:
        return (address,)
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    mine = _packed(address)
    all_of_them = [torch.empty_like(mine) for _ in range(size)]
    torch.distributed.all_gather(all_of_them, mine, group=get_tp_group().cpu_group)
    return tuple(_unpacked(each) for each in all_of_them)


def drawn_name(size: int) -> str:
    """Return a name that rank 0 has drawn by lot, so that no other engine of the machine has it. Every rank calls it.

    vLLM's own id of an instance has five digits, which two engines may share.
    """
    return exchange(uuid.uuid4().hex, size)[0]


def _packed(address: str) -> torch.Tensor:
    import torch

    text = address.encode()
    if len(text) > _ROOM:
        raise ConfigError(f"control address of {len(text)} bytes: expected at most {_ROOM}; set a shorter advertise")
    return torch.tensor(list(text.ljust(_ROOM, b"\0")), dtype=torch.uint8)


def _unpacked(packed: torch.Tensor) -> str:
    return bytes(packed.tolist()).rstrip(b"\0").decode()
