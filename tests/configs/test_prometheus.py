# SPDX-License-Identifier: Apache-2.0
"""Dashboard, alerts and Prometheus's configuration name what the code exports, and nothing else."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.configs.series import exported, parsed, selectors
from tidal_connector.metrics import COUNTERS, GAUGES
from tidal_connector.proxy.app import build_app
from tidal_connector.proxy.meters import Meters
from tidal_connector.proxy.settings import ProxyConfig

CONFIGS = Path(__file__).parents[2] / "configs"
DASHBOARD: dict[str, Any] = json.loads((CONFIGS / "grafana/tidal.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
PROMETHEUS: dict[str, Any] = yaml.safe_load((CONFIGS / "prometheus.yml").read_text())
RULES = yaml.safe_load((CONFIGS / "prometheus_rules.yml").read_text())["groups"][0]["rules"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
# Of https://grafana.com: the ids of units that Grafana knows and this dashboard may use.
UNITS = {"s", "bytes", "Bps", "percentunit", "short", "ops", "reqps", "bool_yes_no"}


@pytest.mark.parametrize("query", [*QUERIES, *(rule["expr"] for rule in RULES)])
def test_a_query_can_be_parsed_and_names_series_that_are_exported(query: str) -> None:
    named = list(selectors(parsed(query)))
    assert named
    assert {name for name, _ in named} <= exported()


@pytest.mark.parametrize("query", [*QUERIES, *(rule["expr"] for rule in RULES)])
def test_counters_are_taken_over_a_range_and_gauges_as_they_are(query: str) -> None:
    over_time = re.search(r"(min|max|avg)_over_time", query)
    for name, ranged in selectors(parsed(query)):
        assert ranged is (name.endswith(("_total", "_bucket", "_sum", "_count")) or bool(over_time)), name


def test_every_series_of_ours_is_on_the_dashboard() -> None:
    shown = {name for query in QUERIES for name, _ in selectors(parsed(query))}
    assert {f"tidal:{name}_total" for name in COUNTERS} | {f"tidal:{name}" for name in GAUGES} <= shown
    families = {family.name for family in Meters().registry.collect()}
    assert families <= {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in shown}


def test_the_dashboard_is_what_its_source_writes() -> None:
    spec = importlib.util.spec_from_file_location("grafana_build", CONFIGS / "grafana/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.dashboard() == DASHBOARD, "run: python configs/grafana/build.py"


def test_every_row_that_was_asked_for_is_there() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Overview", "Transfers", "Selection cache", "Pool and slots", "Proxy", "Registry and rollout"]


def test_ids_are_unique_and_titles_within_the_dashboard_too() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)
    for panel in PANELS:
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names)


def test_panels_have_a_known_unit_a_description_and_the_chosen_source() -> None:
    for panel in PANELS:
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["description"].endswith(".")
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": "prometheus", "uid": "${source}"}
        assert all(target["legendFormat"] for target in panel["targets"])


def test_no_panel_lies_on_another_or_outside() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(at["x"] >= 0 and at["x"] + at["w"] <= 24 and at["h"] >= 1 for at in places)
    for one, other in itertools.combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)


def test_variables_that_are_used_are_defined() -> None:
    defined = {item["name"] for item in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__rate_interval", "__all"}
    assert used == defined
    for item in DASHBOARD["templating"]["list"]:
        if item["type"] == "query":
            named = re.fullmatch(r"label_values\(([\w:]+), \w+\)", item["query"]["query"])
            assert named is not None
            assert named[1] in exported()


def test_legends_use_labels_that_the_query_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                grouped = re.search(r"by \(([\w, ]+)\)", target["expr"])
                assert grouped is None or label in grouped[1].split(", "), (panel["title"], label)


def test_alerts_say_what_is_wrong_and_how_to_mend_it() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert set(rule["annotations"]) == {"summary", "fix"}
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))


def test_prometheus_scrapes_proxies_engines_and_etcd() -> None:
    assert set(PROMETHEUS) == {"global", "rule_files", "scrape_configs"}
    assert all((CONFIGS / file).is_file() for file in PROMETHEUS["rule_files"])
    jobs = {job["job_name"]: job for job in PROMETHEUS["scrape_configs"]}
    assert list(jobs) == ["tidal-proxy", "tidal-engines", "etcd"]
    listen = tomllib.loads((CONFIGS / "proxy.toml").read_text())["listen"]
    assert jobs["tidal-proxy"]["static_configs"] == [{"targets": [listen]}]
    (source,) = jobs["tidal-engines"]["http_sd_configs"]
    host, _, path = source["url"].removeprefix("http://").partition("/")
    assert host == listen
    routes = {getattr(route, "path", "") for route in build_app(ProxyConfig()).routes}
    assert f"/{path}" in routes
    registry = tomllib.loads((CONFIGS / "agent.toml").read_text())["registry"]["url"]
    assert [f"etcd://{target}" for target in jobs["etcd"]["static_configs"][0]["targets"]] == [registry]
