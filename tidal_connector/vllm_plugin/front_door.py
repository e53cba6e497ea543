# SPDX-License-Identifier: Apache-2.0
"""Refuses bad ``kv_transfer_params`` before a request reaches the engine, so that its client gets HTTP 400
and one clear line.

Called in the front-end process for each request; on CPU through the platform's ``validate_request``. The
engine's own halves never raise because of one request.
"""

from __future__ import annotations

from typing import Any

from tidal_connector.vllm_plugin.params import parse_params
from tidal_connector.vllm_plugin.translate import EngineFacts


def check_request(facts: EngineFacts, params: Any) -> None:
    """Check one request's transfer parameters.

    Args:
        facts: this engine.
        params: vLLM's sampling or pooling parameters.

    Raises:
        ParamsError: the parameters cannot be used (a ``ValueError``, which vLLM answers with HTTP 400).
    """
    extra = getattr(params, "extra_args", None) or {}
    raw = extra.get("kv_transfer_params")
    parse_params(raw, facts.config, producer=facts.producer, consumer=facts.consumer)
