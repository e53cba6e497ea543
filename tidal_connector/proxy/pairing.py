# SPDX-License-Identifier: Apache-2.0
"""Which prefill and decode engines cannot work together, and why, in one line for each. Pure.

Takes the configured engines and what each of them says about itself; an engine that has said nothing is barred from
nothing, because the engines' own handshake guards it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidal_connector.control.messages import About
from tidal_connector.proxy.policy import Pair
from tidal_connector.proxy.settings import Decode, Prefill, ProxyConfig

Engine = Prefill | Decode


def barred_pairs(config: ProxyConfig, known: Mapping[Engine, About]) -> dict[Pair, str]:
    """Return the pairs that must not be formed, each with the reason.

    Args:
        config: the engines.
        known: what those that have answered said.
    """
    faults = {engine: fault for engine, about in known.items() if (fault := _fault(engine, about))}
    found: dict[Pair, str] = {}
    for prefill in config.prefill:
        for decode in config.decode:
            reason = faults.get(prefill) or faults.get(decode) or ""
            if not reason and prefill in known and decode in known:
                reason = _misfit(prefill.engine, known[prefill], decode.engine, known[decode])
            if reason:
                found[prefill.engine, decode.engine] = reason
    return found


def _fault(engine: Engine, about: About) -> str:
    """Say why an engine is not what the configuration calls it; empty where it is."""
    role = "prefill" if isinstance(engine, Prefill) else "decode"
    if about.identity.engine != engine.engine:
        return (
            f"{role} engine {engine.engine!r} was looked for at {engine.control}, engine {about.identity.engine!r} is "
            "there: correct the address or the id"
        )
    if not (about.sends if role == "prefill" else about.receives):
        other, kv_role = ("decode", "kv_consumer") if role == "prefill" else ("prefill", "kv_producer")
        return (
            f"engine {engine.engine!r} at {engine.control} is configured as a {role} engine and serves as a {other} "
            f"engine (kv_role {kv_role}): correct one of them"
        )
    return ""


def _misfit(prefill: str, one: About, decode: str, other: About) -> str:
    """Say in what two engines differ; empty where they fit."""
    if one.fingerprint == other.fingerprint:
        return ""
    who = f"prefill engine {prefill!r} and decode engine {decode!r} do not fit"
    here, there = f"at {prefill!r}", f"at {decode!r}"
    if one.layout == other.layout:
        values = f"{one.fingerprint} {here}, {other.fingerprint} {there}"
        return f"{who}: layout fingerprint {values}; run the same release on both"
    difference = one.layout.differences(other.layout, here, there, most=1)
    return f"{who}: {difference}; serve the same checkpoint with the same dtype on both"
