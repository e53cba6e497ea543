# SPDX-License-Identifier: Apache-2.0
"""Makes tensors that the host's code asks the device for in ordinary memory, where the bed keeps everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """While entered, ``device="npu"`` means the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if "device" in named:
            named["device"] = _moved(named["device"])
        return func(*[_moved(each) for each in args], **named)


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    if isinstance(value, str) and value.partition(":")[0] == "npu":
        return "cpu"
    return value
