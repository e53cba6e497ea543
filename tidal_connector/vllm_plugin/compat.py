# SPDX-License-Identifier: Apache-2.0
"""The one file that knows how vLLM 0.23 and 0.32 differ for a connector.

* Result of the worker's poll: 0.23 ``get_finished() -> (set, set)``; 0.32 ``get_transfer_results()``, which adds
  ``failed_recving``.
* A failed load of a model with one cache group: 0.23 takes its block ids, 0.32 the request id; both want the id in
  ``finished_recving`` as well.
* Stepping while idle: both step as long as a finished request holds its blocks; 0.32 also asks
  ``has_pending_push_work``.
* ``start_load_kv``: 0.23 calls it before the forward pass, 0.32 after it; so a step is armed in
  ``bind_connector_metadata``, which is first on both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base


@dataclass
class _TransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


_host_results = vars(base).get("KVConnectorTransferResults")

REPORTS_FAILED_REQUESTS = _host_results is not None
"""The host takes failed request ids; otherwise it takes failed block ids (one cache group only)."""


def transfer_results(sending: Iterable[str], receiving: Iterable[str], failed: Iterable[str]) -> Any:
    """Build what ``get_transfer_results`` returns, in the host's type where it has one."""
    kind = _host_results or _TransferResults
    return kind(finished_sending=set(sending), finished_recving=set(receiving), failed_recving=set(failed))
