# SPDX-License-Identifier: Apache-2.0
"""How vLLM's processes wait for one another on a machine with few cores.

Engine core and worker exchange steps through shared memory, and each spins for a second after every read before it
sleeps on a socket. On two cores that spinning is taken from whatever computes: a decode engine that only waited for KV
used 3.6 s of processor time in the 3.0 s of a prefill beside it.
"""

from __future__ import annotations

import time
from typing import Any

from tidal_connector.vllm_plugin.patching import Patch

SPIN_S = 0.002
"""How long a reader spins before it sleeps. Waking it takes about 0.1 ms, a step of the smallest model several."""


def record_read(self: Any) -> None:
    """Note a read so that the spinning ends in ``SPIN_S`` (takes the place of ``SpinCondition.record_read``)."""
    self.last_read = time.monotonic() - max(0.0, self.busy_loop_s - SPIN_S)


PATCH = Patch(
    name="short-spinning",
    why="A reader of vLLM's shared-memory queue spins for a second after each read; on a CPU backend it spins on the "
    "cores that compute.",
    what="Ends the spinning after 2 ms; the reader then sleeps on the notification socket that vLLM uses anyway.",
    verify="Processor time of an idle decode engine that awaits KV, as `tidal bench prefill-overhead` shows it.",
    module="vllm.distributed.device_communicators.shm_broadcast",
    owner="SpinCondition",
    attribute="record_read",
    parameters=("self",),
    replacement=record_read,
)
