# SPDX-License-Identifier: Apache-2.0
"""Which prefill and decode engines cannot work together, and why, in one line for each. Pure.

Takes the engines as they are now and what each of them says about itself; where an engine has said nothing yet, the
fingerprint in the registry counts. One of which neither is known is barred from nothing, because the engines' own
handshake guards it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidal_connector.control.messages import About
from tidal_connector.proxy.policy import Pair
from tidal_connector.proxy.roster import Engine


def barred_pairs(prefill: Sequence[Engine], decode: Sequence[Engine], known: Mapping[Engine, About]) -> dict[Pair, str]:
    """Return the pairs that must not be formed, each with the reason.

    Args:
        prefill, decode: the engines.
        known: what those that have answered said.
    """
    faults = {engine: fault for engine, about in known.items() if (fault := _fault(engine, about))}
    found: dict[Pair, str] = {}
    for one in prefill:
        for other in decode:
            reason = faults.get(one) or faults.get(other) or _self_pair(one, other)
            if reason := reason or _misfit(one, known.get(one), other, known.get(other)):
                found[one.engine, other.engine] = reason
    return found


def _fault(engine: Engine, about: About) -> str:
    """Say why an engine is not what file or registry call it; empty where it is."""
    if about.identity.engine != engine.engine:
        return (
            f"{engine.side} engine {engine.engine!r} was looked for at {engine.control}, engine "
            f"{about.identity.engine!r} is there: correct the address or the id"
        )
    if not (about.sends if engine.side == "prefill" else about.receives):
        other, kv_role = ("decode", "kv_consumer") if engine.side == "prefill" else ("prefill", "kv_producer")
        return (
            f"engine {engine.engine!r} at {engine.control} is configured as a {engine.side} engine and serves as a "
            f"{other} engine (kv_role {kv_role}): correct one of them"
        )
    return ""


def _self_pair(prefill: Engine, decode: Engine) -> str:
    if prefill.engine != decode.engine:
        return ""
    return f"engine {prefill.engine!r} cannot push to itself: start another one, of the role prefill, decode or both"


def _misfit(prefill: Engine, one: About | None, decode: Engine, other: About | None) -> str:
    """Say in what two engines differ; empty where they fit, or where that is not known."""
    here, there = f"at {prefill.engine!r}", f"at {decode.engine!r}"
    first = one.fingerprint if one else prefill.layout
    second = other.fingerprint if other else decode.layout
    if not first or not second or first == second:
        return ""
    who = f"prefill engine {prefill.engine!r} and decode engine {decode.engine!r} do not fit"
    if one and other and one.layout != other.layout:
        difference = one.layout.differences(other.layout, here, there, most=1)
        return f"{who}: {difference}; serve the same checkpoint with the same dtype on both"
    values = f"{first} {here}, {second} {there}"
    if one and other:
        return f"{who}: layout fingerprint {values}; run the same release on both"
    return f"{who}: layout fingerprint {values}; serve the same checkpoint with the same dtype and release on both"
