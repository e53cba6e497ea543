# SPDX-License-Identifier: Apache-2.0
"""What Prometheus is told of the engines."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from tidal_connector.proxy.app import build_app
from tidal_connector.proxy.discovery import targets_of
from tidal_connector.proxy.settings import Decode, Prefill, ProxyConfig
from tidal_connector.proxy.view import EngineView


def view(engine: str, role: str, http: str, node: str = "") -> EngineView:
    return EngineView(engine=engine, role=role, state="ready", reachable=True, source="registry", http=http, node=node)


def test_an_engine_in_both_roles_is_scraped_once() -> None:
    found = targets_of(
        [view("b", "prefill", "http://h:1"), view("b", "decode", "http://h:1"), view("a", "decode", "http://h:2")]
    )
    assert [(each.labels["engine_id"], each.labels["role"]) for each in found] == [("a", "decode"), ("b", "both")]


@pytest.mark.parametrize(
    ("url", "target", "scheme", "path"),
    [
        ("http://10.0.0.5:8200", "10.0.0.5:8200", "http", "/metrics"),
        ("http://[fd00::5]:8200/", "[fd00::5]:8200", "http", "/metrics"),
        ("https://decode.example/engine/", "decode.example:443", "https", "/engine/metrics"),
        ("http://decode", "decode:80", "http", "/metrics"),
    ],
)
def test_urls_become_targets(url: str, target: str, scheme: str, path: str) -> None:
    (found,) = targets_of([view("a", "decode", url, "node-a")])
    assert found.targets == (target,)
    assert (found.labels["__scheme__"], found.labels["__metrics_path__"], found.labels["node"]) == (
        scheme,
        path,
        "node-a",
    )


def test_the_proxy_serves_them_in_prometheus_s_form() -> None:
    config = ProxyConfig(
        prefill=(Prefill("p", "http://127.0.0.1:9"),),
        decode=(Decode("d", "http://127.0.0.1:10"),),
    )
    with TestClient(build_app(config)) as client:
        answer = client.get("/engines/sd")
    assert answer.headers["content-type"] == "application/json"
    found = answer.json()
    assert [(each["targets"], each["labels"]["role"]) for each in found] == [
        (["127.0.0.1:10"], "decode"),
        (["127.0.0.1:9"], "prefill"),
    ]
