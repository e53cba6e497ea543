# SPDX-License-Identifier: Apache-2.0
"""The engines as targets of Prometheus's HTTP service discovery, so that nobody keeps a second list of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tidal_connector.address import join_address
from tidal_connector.proxy.view import EngineView
from tidal_connector.proxy.wire import target_of


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
    engine = views[0]
    (host, port, tls), _, path = target_of(engine.http)
    labels = {
        "engine_id": engine.engine,
        "role": engine.role if len(views) == 1 else "both",
        "node": engine.node,
        "__scheme__": "https" if tls else "http",
        "__metrics_path__": path + "/metrics",
    }
    return Targets((join_address(host, port),), labels)
