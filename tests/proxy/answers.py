# SPDX-License-Identifier: Apache-2.0
"""What engines say about themselves, for tests."""

from __future__ import annotations

import msgspec

from tidal_connector.control.messages import About, Identity
from tidal_connector.errors import PeerLost
from tidal_connector.ids import EngineId, Incarnation
from tidal_connector.layout import KVLayout, RegionKind, RegionSpec


def layout(layers: int = 6, size: int = 4, weights: str = "w0") -> KVLayout:
    """A V3.2 of so many layers, whose elements take so many bytes."""
    dtype = {4: "float32", 2: "bfloat16"}[size]
    regions = [RegionSpec(RegionKind.LATENT, layer, 576 * size, dtype, dtype, 64 * size) for layer in range(layers)]
    return KVLayout("deepseek_v32", tuple(regions), 64, tuple(range(layers)), "yarn", weights, "auto")


def about(engine: str, kv: KVLayout | None = None, life: str = "1") -> About:
    """What an engine says; its role is the first letter of its name."""
    kv = kv or layout()
    sends = engine.startswith("p")
    identity = Identity(EngineId(engine), Incarnation(life))
    return About(identity, sends, not sends, kv, kv.fingerprint(), 10.0)


class Engines:
    """Stands for the engines' control channels: what each address answers now."""

    def __init__(self, **said: About | Exception) -> None:
        self.said: dict[str, About | Exception] = dict(said)
        self.asked: list[str] = []

    def ask(self, address: str, timeout_s: float) -> About:
        """Answer for the engine at ``NAME:1``."""
        name = address.partition(":")[0]
        self.asked.append(name)
        found = self.said.get(name, PeerLost(f"nobody at {address} within {timeout_s} s"))
        if isinstance(found, Exception):
            raise found
        return found


def other_release(engine: str) -> About:
    """The same layout under another fingerprint."""
    return msgspec.structs.replace(about(engine), fingerprint="f" * 32)
