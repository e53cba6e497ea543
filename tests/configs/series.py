# SPDX-License-Identifier: Apache-2.0
"""The series that the code exports, and those that a query names."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser

from tidal_connector.metrics import COUNTERS, GAUGES
from tidal_connector.proxy.meters import Meters

_VARIABLES = {"$__rate_interval": "1m", "$role": ".*", "$engine": ".*"}
_OF_VLLM = re.compile(r'_(gauge|counter|histogram)_cls\(\s*name="(vllm:\w+)"')
_ENDINGS = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
_PARTS = ("expr", "param", "lhs", "rhs", "args", "vector_selector")


def exported() -> set[str]:
    """Names as Prometheus sees them: of our engines, of vLLM (from its sources, without importing it), of the proxy."""
    ours = {f"tidal:{name}_total" for name in COUNTERS} | {f"tidal:{name}" for name in GAUGES}
    return ours | _of_vllm() | _of_proxy()


def _of_vllm() -> set[str]:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    text = (Path(spec.submodule_search_locations[0]) / "v1/metrics/loggers.py").read_text()
    found = {name + ending for kind, name in _OF_VLLM.findall(text) for ending in _ENDINGS[kind]}
    assert len(found) > 40
    return found


def _of_proxy() -> set[str]:
    families = Meters().registry.collect()
    return {family.name + ending for family in families for ending in _ENDINGS[family.type]}


def parsed(query: str) -> Any:
    """The syntax tree of a query of the dashboard, its variables filled in."""
    for name, value in _VARIABLES.items():
        query = query.replace(name, value)
    return promql_parser.parse(query)


def selectors(node: Any, ranged: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each series that a syntax tree names, and whether a range of it is taken."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node.name, ranged
        return
    ranged = isinstance(node, promql_parser.MatrixSelector)
    for name in _PARTS:
        part = getattr(node, name, None)
        for each in part if isinstance(part, list) else [part]:
            if each is not None and type(each).__module__.startswith(("promql_parser", "builtins")):
                yield from selectors(each, ranged) if not isinstance(each, (str, int, float)) else ()
