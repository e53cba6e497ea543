# SPDX-License-Identifier: Apache-2.0
"""The engines as targets of Prometheus's HTTP service discovery, so that nobody keeps a second list of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

import msgspec

from tidal_connector.proxy.view import EngineView

_PORTS = {"http": 80, "https": 443}


class Targets(msgspec.Struct, frozen=True):
    """One entry of the answer: ``host:port``, and the labels that its series get."""

    targets: tuple[str, ...]
    labels: dict[str, str]


def targets_of(engines: Iterable[EngineView]) -> list[Targets]:
    """Return one target per engine; one that is in both roles is there once, with the role ``both``.

    The labels are ``engine_id``, ``role`` and ``node``: nothing that changes while an engine lives, because that would
    break its series. (vLLM's own series have a label ``engine`` already, the number of a data-parallel rank.)
    """
    found: dict[str, list[EngineView]] = {}
    for engine in engines:
        found.setdefault(engine.engine, []).append(engine)
    return [_target(views) for _, views in sorted(found.items())]


def _target(views: list[EngineView]) -> Targets:
    engine, url = views[0], urlsplit(views[0].http)
    address = url.netloc.rpartition("@")[2]
    if url.port is None:
        address += f":{_PORTS.get(url.scheme, 80)}"
    labels = {
        "engine_id": engine.engine,
        "role": engine.role if len(views) == 1 else "both",
        "node": engine.node,
        "__scheme__": url.scheme or "http",
        "__metrics_path__": url.path.rstrip("/") + "/metrics",
    }
    return Targets((address,), labels)
