# SPDX-License-Identifier: Apache-2.0
"""One request straight through a pair of engines, past the proxies: is a new engine able to serve?

Speaks the concurrent protocol as the proxy does. Blocks its caller up to the probe's deadline.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec

from tidal_connector.cluster.spec import Probe
from tidal_connector.ids import new_transfer_id
from tidal_connector.registry.members import Member
from tidal_connector.vllm_plugin.params import decode_params, prefill_params

_ROUTE = "/v1/completions"
_SHOWN = 300


class Verdict(msgspec.Struct, frozen=True):
    """What came of a probe.

    Attributes:
        good: whether it was answered as it should be.
        why: one line, where it was not.
        engine: whose answer was bad, where one alone is to blame; else empty.
    """

    good: bool
    why: str = ""
    engine: str = ""


def run_probe(prefill: Member, decode: Member, probe: Probe) -> Verdict:
    """Send one request through a pair; through one engine where both are the same, which then serves alone.

    Args:
        prefill, decode: the pair, as it announces itself.
        probe: what to ask and how long to wait.
    """
    body = {"model": decode.model, "prompt": probe.prompt, "max_tokens": probe.max_tokens, "temperature": 0.0}
    if prefill.engine == decode.engine:
        return _judged(decode, _post(decode, body, probe.deadline_s), probe)
    transfer = new_transfer_id()
    first = {**body, "model": prefill.model, "max_tokens": 1}
    first["kv_transfer_params"] = prefill_params(transfer, decode.engine)
    second = {**body, "kv_transfer_params": decode_params(transfer, prefill.engine, prefill.control)}
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(_post, prefill, first, probe.deadline_s)
        answer = _post(decode, second, probe.deadline_s)
        prefilled = asked.result()
    if isinstance(prefilled, str):
        # The decode engine's answer depends on the other's, so the first failure is the one that tells.
        return Verdict(False, prefilled, prefill.engine)
    return _judged(decode, answer, probe)


def _judged(engine: Member, answer: dict[str, Any] | str, probe: Probe) -> Verdict:
    if isinstance(answer, str):
        return Verdict(False, answer, engine.engine)
    try:
        text = answer["choices"][0]["text"]
    except (KeyError, IndexError, TypeError):
        return Verdict(False, f"{engine.engine}: its answer to the probe holds no text: {str(answer)[:_SHOWN]}")
    if not isinstance(text, str) or not text:
        return Verdict(False, f"{engine.engine}: its answer to the probe is empty")
    if probe.expect not in text:
        return Verdict(
            False, f"{engine.engine}: its answer to the probe is {text[:_SHOWN]!r}, without {probe.expect!r}"
        )
    return Verdict(True)


def _post(engine: Member, body: dict[str, Any], bound_s: float) -> dict[str, Any] | str:
    """Return the engine's answer, or one line that says why there is none."""
    url = engine.http.rstrip("/") + _ROUTE
    try:
        answer = httpx.post(url, json=body, timeout=bound_s, trust_env=False)
    except httpx.TransportError as error:
        return f"{engine.engine}: no answer to the probe: {error or type(error).__name__}"
    if answer.status_code != httpx.codes.OK:
        return f"{engine.engine}: status {answer.status_code} for the probe: {answer.text[:_SHOWN]}"
    try:
        found: Any = answer.json()
    except ValueError:
        return f"{engine.engine}: its answer to the probe is no JSON: {answer.text[:_SHOWN]}"
    return found if isinstance(found, dict) else f"{engine.engine}: its answer to the probe is no object"
