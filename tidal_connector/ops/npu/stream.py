# SPDX-License-Identifier: Apache-2.0
"""``SideStream``: work that runs beside the forward pass on the device, with an event for each part of it.

The forward thread forks (what is enqueued next on the side waits for all that it has enqueued), enqueues, and marks;
later it joins a mark before it uses the result. A captured graph keeps all of it, as long as every mark is joined. On
the CPU, where nothing is asynchronous, the work is done at once and the marks mean nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """One stream beside the current one of a device.

    Args:
        device: an accelerator that torch knows, or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._device = device
        self._stream: Any = None if self._module is None else self._module.Stream(device=device)
        self._marks: dict[Hashable, Any] = {}

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Enqueue on the side what is called within, after all that the current stream has been given so far."""
        if self._module is None:
            yield
            return
        # Events are made anew each time, as a capture wants them: one that an earlier capture has recorded is its own.
        begun = self._module.current_stream(self._device).record_event()
        with self._module.stream(self._stream):
            self._stream.wait_event(begun)
            yield

    def mark(self, key: Hashable) -> None:
        """Name the point that the side has reached; within :meth:`forked`."""
        self._marks[key] = None if self._module is None else self._stream.record_event()

    def join(self, key: Hashable) -> None:
        """Let the current stream wait for a mark, once.

        Raises:
            KeyError: there is no such mark, or it was joined before.
        """
        event = self._marks.pop(key)
        if event is not None:
            self._module.current_stream(self._device).wait_event(event)

    @property
    def unjoined(self) -> list[Hashable]:
        """Marks that nobody has joined yet."""
        return list(self._marks)
