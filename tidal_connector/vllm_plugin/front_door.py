# SPDX-License-Identifier: Apache-2.0
"""Refuses bad ``kv_transfer_params`` before a request reaches the engine: its client gets HTTP 400 and one clear line.

Called in the front-end process for each request; on CPU through the platform's ``validate_request``. The engine's own
halves never raise because of one request.
"""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError

from tidal_connector.errors import ParamsError
from tidal_connector.vllm_plugin.params import parse_params
from tidal_connector.vllm_plugin.translate import EngineFacts


def check_request(facts: EngineFacts, params: Any) -> None:
    """Check one request's transfer parameters.

    Args:
        facts: this engine.
        params: vLLM's sampling or pooling parameters.

    Raises:
        VLLMValidationError: the parameters cannot be used; vLLM answers this type with 400, not any ``ValueError``.
    """
    extra = getattr(params, "extra_args", None) or {}
    raw = extra.get("kv_transfer_params")
    try:
        parse_params(raw, facts.config, producer=facts.producer, consumer=facts.consumer)
    except ParamsError as error:
        raise VLLMValidationError(str(error)) from None
