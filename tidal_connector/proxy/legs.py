# SPDX-License-Identifier: Apache-2.0
"""One client request becomes two engine requests. Pure.

The prefill leg asks for one token and no extras; the decode leg is the client's own body. Both carry the same
fresh transfer id. Nothing that a client says about transfers survives: it would name addresses and other
requests' pages.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from tidal_connector.errors import ParamsError
from tidal_connector.ids import TransferId
from tidal_connector.vllm_plugin.params import decode_params, prefill_params

Body = dict[str, Any]

TIMEOUT_HEADER = "x-request-timeout"
"""Header by which a client says how many seconds it waits at most."""

_UNTRUSTED = ("kv_transfer_params", "ec_transfer_params", "request_id")
_KEPT_HEADERS = ("authorization", "traceparent", "tracestate")
_DECODE_ONLY = (
    "best_of",
    "echo",
    "logprob_token_ids",
    "logprobs",
    "min_tokens",
    "prompt_logprobs",
    "return_token_ids",
    "stream_interval",
    "stream_options",
    "top_logprobs",
)
_ID_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_ID_LENGTH = 64
_ASSUMED_ANSWER_TOKENS = 256
_BYTES_PER_TOKEN = 4


class ClientRequest(msgspec.Struct, frozen=True):
    """A client's request, checked.

    Attributes:
        path: route on the engines.
        body: the client's JSON without what clients may not say.
        headers: headers that travel to the engines.
        request_id: the client's id made safe; empty where there is none.
        prompt_tokens: about how many tokens the prompt holds (for choosing engines).
        answer_tokens: about how many tokens may be generated.
        timeout_s: seconds that the client grants for all of it; None where it does not say.
    """

    path: str
    body: Body
    headers: dict[str, str]
    request_id: str
    prompt_tokens: int
    answer_tokens: int
    timeout_s: float | None = None

    @property
    def model(self) -> str:
        """The model that the client asks for; empty where it does not say."""
        model = self.body.get("model")
        return model if isinstance(model, str) else ""

    @property
    def stream(self) -> bool:
        """Whether the client wants a stream."""
        return self.body.get("stream") is True


def parse_request(path: str, raw: bytes, headers: Mapping[str, str]) -> ClientRequest:
    """Check a client's request as far as the proxy needs to understand it.

    Raises:
        ParamsError: no JSON object, it asks for several sequences (each would need a transfer of its own), or a header
            has a value that cannot be used.
    """
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise ParamsError(f"request body: {error}; expected a JSON object") from None
    except UnicodeDecodeError as error:
        raise ParamsError(f"request body is not UTF-8: {error.reason}") from None
    except RecursionError:
        raise ParamsError("request body: its lists and objects are nested too deeply; expected a JSON object") from None
    if not isinstance(body, dict):
        raise ParamsError(f"request body: a JSON {type(body).__name__}; expected an object")
    _refuse_many(body)
    named = headers.get("x-request-id") or body.get("request_id")
    clean = {key: value for key, value in body.items() if key not in _UNTRUSTED}
    if isinstance(clean.get("vllm_xargs"), dict):
        clean["vllm_xargs"] = {k: v for k, v in clean["vllm_xargs"].items() if k not in _UNTRUSTED}
    return ClientRequest(
        path=path,
        body=clean,
        headers={name: headers[name] for name in _KEPT_HEADERS if name in headers},
        request_id=safe_request_id(named if isinstance(named, str) else ""),
        prompt_tokens=_prompt_tokens(clean),
        answer_tokens=_answer_tokens(clean),
        timeout_s=_timeout(headers.get(TIMEOUT_HEADER)),
    )


def safe_request_id(text: str) -> str:
    """Keep letters, digits, dot, dash and underscore of a client's request id, at most 64 of them."""
    return _ID_UNSAFE.sub("_", text)[:_ID_LENGTH]


def engine_request_id(client_id: str) -> str:
    """Return a request id that no other live request has, with the client's own in front for the logs.

    Two live requests may carry the same client id, and an engine still tracks a request after its client has
    the answer.
    """
    return f"{client_id}-{secrets.token_hex(8)}" if client_id else secrets.token_hex(16)


def prefill_body(request: ClientRequest, transfer: TransferId, decode_engine: str) -> Body:
    """Return the prefill leg: the same prompt, one token, no stream and no extras."""
    body = {key: value for key, value in request.body.items() if key not in _DECODE_ONLY}
    body |= {"stream": False, "max_tokens": 1, "n": 1}
    if "messages" in body:
        body["max_completion_tokens"] = 1
    body["kv_transfer_params"] = prefill_params(transfer, decode_engine)
    return body


def decode_body(request: ClientRequest, transfer: TransferId, prefill_engine: str, prefill_control: str) -> Body:
    """Return the decode leg: the client's body with the transfer's parameters."""
    return {**request.body, "kv_transfer_params": decode_params(transfer, prefill_engine, prefill_control)}


def leading(body: Body, tokens: int) -> bytes:
    """Return a digest of the model's name and the prompt's leading tokens; of text, about four bytes count as one."""
    prompt = _single(body.get("prompt", body.get("messages")))
    if isinstance(prompt, str):
        head: Any = prompt[: tokens * _BYTES_PER_TOKEN]
    elif isinstance(prompt, list) and all(isinstance(item, int) for item in prompt[:tokens]):
        head = prompt[:tokens]
    else:
        head = msgspec.json.encode(prompt)[: tokens * _BYTES_PER_TOKEN]
    return hashlib.blake2b(msgspec.msgpack.encode((body.get("model"), head)), digest_size=16).digest()


def _refuse_many(body: Body) -> None:
    for field in ("n", "best_of"):
        value = body.get(field)
        if value is not None and value != 1:
            raise ParamsError(
                f"{field} = {value!r}: one sequence per request is supported; send {field} = 1 several times"
            )
    if body.get("use_beam_search"):
        raise ParamsError("use_beam_search = true: one sequence per request; leave it out")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) and len(prompt) > 1:
        raise ParamsError(f"prompt holds {len(prompt)} prompts: one prompt per request; send them one by one")


def _timeout(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ParamsError(f"header {TIMEOUT_HEADER} = {text[:40]!r}: expected seconds, such as 30 or 2.5")
    return seconds


def _single(prompt: Any) -> Any:
    """Return the one prompt of a list of one."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
        return prompt[0]
    return prompt


def _prompt_tokens(body: Body) -> int:
    prompt = _single(body.get("prompt", body.get("messages")))
    if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
        return max(1, len(prompt))
    return max(1, len(msgspec.json.encode(prompt)) // _BYTES_PER_TOKEN)


def _answer_tokens(body: Body) -> int:
    for field in ("max_completion_tokens", "max_tokens"):
        value = body.get(field)
        if isinstance(value, int) and value > 0:
            return value
    return _ASSUMED_ANSWER_TOKENS
