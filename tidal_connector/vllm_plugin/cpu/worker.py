# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker


class TidalCpuWorker(CPUWorker):
    """CPU worker."""
