# SPDX-License-Identifier: Apache-2.0
"""A request's ``kv_transfer_params``, parsed once into one frozen value.

Two dialects reach an engine:

* **push** (both legs at once; made by ``tidal proxy``)::

      prefill  {"mode": "push", "role": "prefill", "transfer_id": "xfer-…"}
      decode   {"mode": "push", "role": "decode", "transfer_id": "xfer-…",
                "prefill_engine": "prefill-0", "prefill_control": "host:port"}

* **sequential** (prefill first; what vLLM's toy proxy, vllm-router and llm-d send)::

      prefill  {"do_remote_decode": true, "do_remote_prefill": false, …}
      decode   the dictionary that the prefill engine returned

The keys that belong to other connectors' sequential dialects (``remote_block_ids``, ``tp_size``, …) are
accepted and ignored in the sequential form; an unknown key anywhere else is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from tidal_connector.address import parse_address
from tidal_connector.config import TidalConfig
from tidal_connector.errors import ConfigError, ParamsError
from tidal_connector.ids import EngineId, TransferId

_FIELD = "kv_transfer_params"
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PUSH_KEYS = ("mode", "role", "transfer_id", "decode_engine", "prefill_engine", "prefill_control", "sabotage")
_SEQUENTIAL_KEYS = (
    "do_remote_decode",
    "do_remote_prefill",
    "transfer_id",
    "remote_engine_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "remote_request_id",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "remote_prefill_cached_tokens",
    "expires_at",
    "tp_size",
    "dcp_size",
    "pp_size",
    "transfer_mode",
)


class Sabotage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One latent row to corrupt after it landed; only for proving a test bed (``allow_sabotage``)."""

    layer: int
    token: int


class PrefillLeg(msgspec.Struct, frozen=True):
    """This engine computes the prompt and pushes its KV.

    Attributes:
        transfer: the attempt; None in sequential mode, where this engine makes one.
        sequential: the pages are held until the decode side asks.
    """

    transfer: TransferId | None
    sequential: bool


class DecodeLeg(msgspec.Struct, frozen=True):
    """This engine receives the prompt's KV.

    Attributes:
        transfer: the attempt.
        engine: id of the engine that prefills.
        control: its control address, ``host:port``.
        sabotage: a row to corrupt on purpose.
    """

    transfer: TransferId
    engine: EngineId
    control: str
    sabotage: Sabotage | None = None


Leg = PrefillLeg | DecodeLeg


def parse_params(raw: object, config: TidalConfig, *, producer: bool, consumer: bool) -> Leg | None:
    """Parse one request's ``kv_transfer_params``.

    Args:
        raw: what the client sent; None where it sent nothing.
        config: this engine's settings (known peers, whether sabotage is allowed).
        producer: this engine may prefill for others.
        consumer: this engine may receive KV.

    Returns:
        The leg, or None for a request that this engine serves alone.

    Raises:
        ParamsError: a key is unknown or missing, a value is of the wrong type, the role is not this
            engine's, or the engine that prefills is unknown.
    """
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise ParamsError(f"{_FIELD}: expected an object, got {type(raw).__name__}")
    leg = _parse_push(raw, config) if "mode" in raw else _parse_sequential(raw, config)
    if isinstance(leg, PrefillLeg) and not producer:
        raise ParamsError(
            f"{_FIELD}: this engine only decodes (kv_role kv_consumer) and cannot prefill for others; "
            "send the request to a prefill engine"
        )
    if isinstance(leg, DecodeLeg) and not consumer:
        raise ParamsError(
            f"{_FIELD}: this engine only prefills (kv_role kv_producer) and cannot receive KV; "
            "send the request to a decode engine"
        )
    return leg


def prefill_params(transfer: TransferId, decode_engine: str | None = None) -> dict[str, Any]:
    """Return what the prefill engine is sent in the push dialect; ``decode_engine`` is for its log."""
    params = {"mode": "push", "role": "prefill", "transfer_id": transfer}
    return params if decode_engine is None else {**params, "decode_engine": decode_engine}


def decode_params(transfer: TransferId, engine: str, control: str | None) -> dict[str, Any]:
    """Return what the decode engine is sent in the push dialect.

    Args:
        transfer: the attempt.
        engine: id of the engine that prefills.
        control: its control address, ``host:port``; None where the decode engine's ``peers`` name it.
    """
    params = {"mode": "push", "role": "decode", "transfer_id": transfer, "prefill_engine": engine}
    return {**params, "prefill_control": control} if control else params


def sequential_answer(transfer: TransferId, engine: EngineId, control: str, expires_at: float) -> dict[str, Any]:
    """Return the dictionary that a sequential proxy hands from the prefill to the decode engine.

    Args:
        transfer: the attempt.
        engine: this engine.
        control: this engine's control address, ``host:port``.
        expires_at: Unix time (seconds) after which the pages are no longer held.
    """
    host, port = split_address(control)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer,
        "remote_engine_id": engine,
        "remote_host": host,
        "remote_port": port,
        "remote_block_ids": [],
        "expires_at": expires_at,
    }


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[v6]:port``.

    Raises:
        ParamsError: there is no host, or no port in 1..65535.
    """
    try:
        host, port = parse_address(f"{_FIELD}: address", address)
    except ConfigError as error:
        raise ParamsError(str(error)) from None
    if not port:
        raise ParamsError(f'{_FIELD}: address = {address!r}: expected "host:port" with a port from 1 on')
    return host, port


def _parse_push(raw: Mapping[str, Any], config: TidalConfig) -> Leg:
    _refuse_unknown(raw, _PUSH_KEYS)
    mode: Literal["push"] | Any = raw["mode"]
    if mode != "push":
        raise ParamsError(f'{_FIELD}.mode = {mode!r}: expected "push"')
    transfer = TransferId(_identifier(raw, "transfer_id"))
    role = raw.get("role")
    if role == "prefill":
        return PrefillLeg(transfer, sequential=False)
    if role != "decode":
        raise ParamsError(f'{_FIELD}.role = {role!r}: expected "prefill" or "decode"')
    engine = EngineId(_identifier(raw, "prefill_engine"))
    control = _known_address(engine, raw.get("prefill_control"), config)
    return DecodeLeg(transfer, engine, control, _sabotage(raw.get("sabotage"), config))


def _parse_sequential(raw: Mapping[str, Any], config: TidalConfig) -> Leg | None:
    _refuse_unknown(raw, _SEQUENTIAL_KEYS)
    wants_decode, wants_prefill = (_flag(raw, name) for name in ("do_remote_decode", "do_remote_prefill"))
    if wants_decode and wants_prefill:
        raise ParamsError(f"{_FIELD}: do_remote_decode and do_remote_prefill are both true; expected one of them")
    if wants_decode:
        return PrefillLeg(None, sequential=True)
    if not wants_prefill:
        return None
    engine = EngineId(_identifier(raw, "remote_engine_id"))
    host, port = raw.get("remote_host"), raw.get("remote_port")
    if not isinstance(host, str) or not host or isinstance(port, bool) or not isinstance(port, int):
        raise ParamsError(
            f"{_FIELD}: remote_host = {host!r}, remote_port = {port!r}: expected the values that the "
            "prefill engine returned"
        )
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return DecodeLeg(TransferId(_identifier(raw, "transfer_id")), engine, _known_address(engine, address, config))


def _refuse_unknown(raw: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in raw:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ParamsError(f"{_FIELD}: unknown key {str(key)[:80]!r}; {hint}")


def _identifier(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str) or not _ID.fullmatch(value):
        shown = repr(value)[:80]
        raise ParamsError(f"{_FIELD}.{name} = {shown}: expected 1 to 128 letters, digits or any of . _ : -")
    return value


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name, False)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ParamsError(f"{_FIELD}.{name} = {value!r}: expected true or false")
    return value


def _known_address(engine: EngineId, given: object, config: TidalConfig) -> str:
    if given is not None and not isinstance(given, str):
        raise ParamsError(f'{_FIELD}: address of {engine!r} = {given!r}: expected "host:port"')
    if config.peers:
        known = config.peers.get(engine)
        if known is None:
            raise ParamsError(f"{_FIELD}: unknown engine {engine!r}; known: {', '.join(sorted(config.peers))}")
        if given is not None and given != known:
            raise ParamsError(f"{_FIELD}: engine {engine!r} is at {known}, not at {given!r}")
        return known
    if given is None:
        raise ParamsError(
            f"{_FIELD}.prefill_control is missing, and the connector's `peers` does not name {engine!r}; "
            "give one of them"
        )
    split_address(given)
    return given


def _sabotage(raw: object, config: TidalConfig) -> Sabotage | None:
    if raw is None:
        return None
    if not config.allow_sabotage:
        raise ParamsError(f"{_FIELD}.sabotage is refused: it proves test beds only; set allow_sabotage in the settings")
    try:
        return msgspec.convert(raw, Sabotage)
    except msgspec.ValidationError as error:
        raise ParamsError(f"{_FIELD}.sabotage: {error}") from None
