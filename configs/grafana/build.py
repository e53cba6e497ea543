# SPDX-License-Identifier: Apache-2.0
"""Writes ``tidal.json``, the Grafana dashboard, from the list of panels below: ``python configs/grafana/build.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("tidal.json")

_SOURCE = {"type": "prometheus", "uid": "${source}"}
_PICK = 'role=~"$role", engine_id=~"$engine"'
_WIDTH, _HEIGHT, _COLUMNS = 6, 7, 24


def rate(metric: str, by: str = "engine_id") -> str:
    """The increase per second of an engine's counter, summed over its data-parallel ranks."""
    return f"sum by ({by}) (rate({metric}{{{_PICK}}}[$__rate_interval]))"


def now(metric: str, by: str = "engine_id") -> str:
    """An engine's gauge."""
    return f"sum by ({by}) ({metric}{{{_PICK}}})"


def share(part: str, whole: str, by: str = "engine_id") -> str:
    """One rate over another, where the other is not zero."""
    return f"{rate(part, by)} / ({rate(whole, by)} > 0)"


def quantile(of: float, metric: str, pick: str = _PICK) -> str:
    """A quantile of a histogram over all that is picked."""
    return f"histogram_quantile({of}, sum by (le) (rate({metric}_bucket{{{pick}}}[$__rate_interval])))"


def proxies(metric: str, by: str = "") -> str:
    """A counter of all proxies, per second."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}[$__rate_interval]))"


ENGINE = "{{engine_id}}"
Query = tuple[str, str]

# Row: (title, panels). Panel: (title, unit, what it tells, queries as (expression, legend)); "stat" shows one number.
ROWS: list[tuple[str, list[tuple[str, str, str, list[Query]]]]] = [
    (
        "Overview",
        [
            (
                "stat: Requests",
                "reqps",
                "Client requests that ended, all proxies.",
                [(proxies("tidal_proxy_requests_total"), "requests")],
            ),
            (
                "stat: Not answered well",
                "percentunit",
                "Share of requests that ended otherwise than ok, refused (4xx) or by the client's leaving.",
                [
                    (
                        proxies('tidal_proxy_requests_total{outcome!~"ok|refused|disconnected"}')
                        + f" / ({proxies('tidal_proxy_requests_total')} > 0) or vector(0)",
                        "failed",
                    )
                ],
            ),
            (
                "stat: Pairs that can be formed",
                "short",
                "Pairs of a prefill and a decode engine, as the proxy with the fewest sees it.",
                [("min(tidal_proxy_pairs)", "pairs")],
            ),
            (
                "stat: Tokens generated",
                "short",
                "Per second, decode engines.",
                [(f"sum(rate(vllm:generation_tokens_total{{{_PICK}}}[$__rate_interval]))", "tokens / s")],
            ),
            (
                "Time to first token",
                "s",
                "From the client's request to the first byte, at the proxy.",
                [
                    (quantile(of, "tidal_proxy_first_byte_seconds", ""), name)
                    for of, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
                ],
            ),
            (
                "Time per output token",
                "s",
                "Between two tokens of one request, at the engines.",
                [
                    (quantile(of, "vllm:inter_token_latency_seconds"), name)
                    for of, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
                ],
            ),
            (
                "Requests running and waiting",
                "short",
                "In each engine.",
                [
                    (now("vllm:num_requests_running"), f"{ENGINE} running"),
                    (now("vllm:num_requests_waiting"), f"{ENGINE} waiting"),
                ],
            ),
            (
                "Time to first token, engines",
                "s",
                "p90 in each role, without the proxy's queue.",
                [
                    (
                        "histogram_quantile(0.9, sum by (le, role) "
                        f"(rate(vllm:time_to_first_token_seconds_bucket{{{_PICK}}}[$__rate_interval])))",
                        "{{role}}",
                    )
                ],
            ),
        ],
    ),
    (
        "Transfers",
        [
            (
                "KV pushed and received",
                "Bps",
                "Bytes acknowledged at prefill, and landed at decode.",
                [
                    (rate("tidal:bytes_pushed_total"), f"{ENGINE} pushed"),
                    (rate("tidal:bytes_received_total"), f"{ENGINE} received"),
                ],
            ),
            ("Transfers in flight", "short", "Open on each side.", [(now("tidal:transfers_in_flight"), ENGINE)]),
            (
                "Transfers by end",
                "ops",
                "Completed, and not: failed ones, and those whose pages rest in quarantine.",
                [
                    (rate("tidal:transfers_started_total", "role"), "{{role}} started"),
                    (rate("tidal:transfers_completed_total", "role"), "{{role}} completed"),
                    (rate("tidal:transfers_failed_total", "role"), "{{role}} failed"),
                    (rate("tidal:transfers_quarantined_total", "role"), "{{role}} quarantined"),
                ],
            ),
            (
                "Landed before prefill's end",
                "percentunit",
                "Share of the bytes that were there when prefill ended: what overlap hides.",
                [(share("tidal:bytes_landed_before_prefill_end_total", "tidal:bytes_pushed_total"), ENGINE)],
            ),
            (
                "Seconds per transfer",
                "s",
                "From the first submit to the last acknowledgement, on average.",
                [(share("tidal:transfer_seconds_total", "tidal:transfers_completed_total"), ENGINE)],
            ),
            (
                "Bytes per descriptor",
                "bytes",
                "Small ones are bound by the transport's cost of each: scattered pages.",
                [(share("tidal:bytes_pushed_total", "tidal:descriptors_submitted_total"), ENGINE)],
            ),
            (
                "Pages that wait",
                "short",
                "Held for a peer after their request ended; out of use until no late write can arrive.",
                [
                    (now("tidal:pages_held"), f"{ENGINE} held"),
                    (now("tidal:pages_quarantined"), f"{ENGINE} quarantined"),
                ],
            ),
            (
                "Aborts",
                "ops",
                "Told to a peer, and told by one.",
                [
                    (rate("tidal:aborts_sent_total"), f"{ENGINE} sent"),
                    (rate("tidal:aborts_received_total"), f"{ENGINE} received"),
                ],
            ),
        ],
    ),
    (
        "Selection cache",
        [
            (
                "Hit rate",
                "percentunit",
                "Selected rows that were on the device already.",
                [
                    (
                        f"{rate('tidal:selection_hits_total')} / ({rate('tidal:selection_hits_total')} + "
                        f"{rate('tidal:selection_misses_total')} > 0)",
                        ENGINE,
                    )
                ],
            ),
            (
                "Bytes gathered and written back",
                "Bps",
                "Between host pool and device.",
                [
                    (rate("tidal:bytes_gathered_total"), f"{ENGINE} gathered"),
                    (rate("tidal:bytes_written_back_total"), f"{ENGINE} written back"),
                    (rate("tidal:prefetch_bytes_total"), f"{ENGINE} ahead of need"),
                ],
            ),
            (
                "Late prefetches",
                "percentunit",
                "Layers whose rows were not there yet when attention needed them.",
                [(share("tidal:prefetches_late_total", "tidal:prefetches_total"), ENGINE)],
            ),
            (
                "Where the time goes",
                "percentunit",
                "Seconds per second: finding hits and victims, copying (any thread), and attention's wait for rows.",
                [
                    (rate("tidal:resolve_seconds_total"), f"{ENGINE} resolve"),
                    (rate("tidal:gather_seconds_total"), f"{ENGINE} copy"),
                    (rate("tidal:prefetch_wait_seconds_total"), f"{ENGINE} wait"),
                ],
            ),
            (
                "Copying speed",
                "Bps",
                "Bytes gathered per second of copying.",
                [(share("tidal:bytes_gathered_total", "tidal:gather_seconds_total"), ENGINE)],
            ),
            (
                "Evictions",
                "ops",
                "Rows that lost their slot to another, once per group of layers.",
                [(rate("tidal:selection_evictions_total"), ENGINE)],
            ),
            (
                "No room",
                "ops",
                "Steps of a request without slots, and requests that lost their full residency.",
                [
                    (rate("tidal:selection_without_slots_total"), f"{ENGINE} without slots"),
                    (rate("tidal:selection_spills_total"), f"{ENGINE} spilled"),
                ],
            ),
            (
                "Rows per step",
                "ops",
                "Rows gathered over all layers; selected positions outside their context, which must stay 0.",
                [
                    (rate("tidal:rows_gathered_total"), f"{ENGINE} gathered"),
                    (rate("tidal:selection_invalid_total"), f"{ENGINE} invalid"),
                ],
            ),
        ],
    ),
    (
        "Pool and slots",
        [
            (
                "Pool pages in use",
                "percentunit",
                "Pages that running requests hold; cached prefixes are not counted.",
                [(f"{now('tidal:pool_pages_used')} / ({now('tidal:pool_pages')} > 0)", ENGINE)],
            ),
            (
                "Pool on hugepages",
                "percentunit",
                "Less than 100 %: the rest fell back to ordinary pages (tidal doctor).",
                [(f"{now('tidal:pool_hugepage_bytes')} / ({now('tidal:pool_bytes')} > 0)", ENGINE)],
            ),
            (
                "Slots in use",
                "percentunit",
                "Of the selection cache, in each layer.",
                [(f"{now('tidal:selection_slots_used')} / ({now('tidal:selection_slots')} > 0)", ENGINE)],
            ),
            (
                "KV blocks in use",
                "percentunit",
                "As vLLM counts them, cached prefixes not included.",
                [(f"avg by (engine_id) (vllm:kv_cache_usage_perc{{{_PICK}}})", ENGINE)],
            ),
            (
                "Device memory of KV",
                "bytes",
                "All of it, and of an engine with a pool the index keys and the selection cache.",
                [
                    (now("tidal:device_kv_bytes"), f"{ENGINE} all"),
                    (now("tidal:index_cache_bytes"), f"{ENGINE} index keys"),
                    (now("tidal:selection_cache_bytes"), f"{ENGINE} selection cache"),
                ],
            ),
            (
                "Bytes per token",
                "bytes",
                "All of a token's KV, and what of it is on the device, over all layers.",
                [
                    (f"max by (role) (tidal:kv_bytes_per_token{{{_PICK}}})", "{{role}} all"),
                    (f"max by (role) (tidal:device_bytes_per_token{{{_PICK}}})", "{{role}} on the device"),
                ],
            ),
            ("Layers with KV", "short", "Of the model.", [(f"max by (role) (tidal:kv_layers{{{_PICK}}})", "{{role}}")]),
            (
                "Preemptions",
                "ops",
                "Requests that had to give their blocks back and start again.",
                [(rate("vllm:num_preemptions_total"), ENGINE)],
            ),
        ],
    ),
    (
        "Proxy",
        [
            (
                "Requests by end",
                "reqps",
                "Outcomes of client requests.",
                [(proxies("tidal_proxy_requests_total", "outcome"), "{{outcome}}")],
            ),
            (
                "In flight and queued",
                "short",
                "Against the bounds of each proxy.",
                [
                    ("tidal_proxy_in_flight", "{{instance}} in flight"),
                    ("tidal_proxy_max_in_flight", "{{instance}} most in flight"),
                    ("tidal_proxy_queued", "{{instance}} queued"),
                    ("tidal_proxy_max_queue", "{{instance}} most queued"),
                ],
            ),
            (
                "Attempts and retries",
                "ops",
                "Pairs of engine requests; those after the first of a request.",
                [
                    (proxies("tidal_proxy_attempts_total"), "attempts"),
                    (proxies("tidal_proxy_retries_total"), "retries"),
                ],
            ),
            (
                "Failures by engine",
                "ops",
                "Engine requests that failed.",
                [(proxies("tidal_proxy_leg_failures_total", "role, engine"), "{{role}} {{engine}}")],
            ),
            (
                "Answers by engine",
                "ops",
                "How the load is spread.",
                [(proxies("tidal_proxy_legs_answered_total", "role, engine"), "{{role}} {{engine}}")],
            ),
            (
                "Tokens outstanding",
                "short",
                "Dispatched to an engine and not answered yet: what the choice of engines goes by.",
                [("sum by (role, engine) (tidal_proxy_outstanding_tokens)", "{{role}} {{engine}}")],
            ),
            (
                "Requests outstanding",
                "short",
                "Of all proxies, on each engine.",
                [("sum by (role, engine) (tidal_proxy_outstanding_requests)", "{{role}} {{engine}}")],
            ),
            (
                "Waits",
                "s",
                "p99 of the queue, of prefill, and of the whole request.",
                [
                    (quantile(0.99, "tidal_proxy_queue_seconds", ""), "queue"),
                    (quantile(0.99, "tidal_proxy_prefill_seconds", ""), "prefill"),
                    (quantile(0.99, "tidal_proxy_request_seconds", ""), "request"),
                ],
            ),
            (
                "Longest silence",
                "s",
                "How long the request that waits longest for its first byte has waited: hung engines show here first.",
                [("tidal_proxy_longest_silence_seconds", "{{instance}}")],
            ),
        ],
    ),
    (
        "Registry and rollout",
        [
            (
                "Engines by state",
                "short",
                "During a rollout, engines pass through draining and starting one after the other.",
                [
                    (
                        "sum by (role, state) (max by (role, engine, state) (tidal_proxy_engine_state))",
                        "{{role}} {{state}}",
                    )
                ],
            ),
            (
                "Registry answers, proxy is ready",
                "bool_yes_no",
                "Without the registry proxies go by what they last heard; without a pair they are not ready.",
                [
                    ("tidal_proxy_registry_fresh", "{{instance}} registry"),
                    ("tidal_proxy_ready", "{{instance}} ready"),
                ],
            ),
            (
                "Since the registry was heard",
                "s",
                "Age of what a proxy knows.",
                [("tidal_proxy_registry_age_seconds", "{{instance}}")],
            ),
            (
                "Entries that cannot be used",
                "short",
                "In the registry; the proxy's /health names them.",
                [("tidal_proxy_registry_odd_entries", "{{instance}}")],
            ),
            (
                "Pairs that do not fit",
                "short",
                "Ready engines with different layouts, as in the middle of a rollout that changes it.",
                [("tidal_proxy_barred_pairs", "{{instance}}")],
            ),
            (
                "Engines that cannot be reached",
                "short",
                "From a proxy, though they are announced.",
                [("sum by (instance) (tidal_proxy_engine_reachable == bool 0)", "{{instance}}")],
            ),
            (
                "Peers, and leases that ended",
                "short",
                "Sessions of each engine; those that ended without a word, in the last 5 minutes.",
                [
                    (now("tidal:peers"), f"{ENGINE} peers"),
                    (f"sum by (engine_id) (increase(tidal:leases_expired_total{{{_PICK}}}[5m]))", f"{ENGINE} lost"),
                ],
            ),
            (
                "Refused and stale messages",
                "ops",
                "Of the control channel: malformed or foreign ones, other layouts, earlier lives.",
                [
                    (rate("tidal:messages_refused_total"), f"{ENGINE} messages"),
                    (rate("tidal:handshakes_refused_total"), f"{ENGINE} handshakes"),
                    (rate("tidal:notices_stale_total"), f"{ENGINE} stale"),
                    (rate("tidal:inquiries_answered_total"), f"{ENGINE} inquiries"),
                ],
            ),
        ],
    ),
]


def dashboard() -> dict[str, Any]:
    """The whole dashboard."""
    panels: list[dict[str, Any]] = []
    at = 0
    for title, row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": at},
            }
        )
        at += 1
        for number, (name, unit, tells, queries) in enumerate(row):
            across = _COLUMNS // _WIDTH
            place = {"h": _HEIGHT, "w": _WIDTH, "x": number % across * _WIDTH, "y": at + number // across * _HEIGHT}
            panels.append(_panel(len(panels) + 1, name, unit, tells, queries, place))
        at += -(-len(row) // (_COLUMNS // _WIDTH)) * _HEIGHT
    return {
        "uid": "tidal-connector",
        "title": "tidal: prefill, decode and what lies between",
        "description": "Engines, transfers, selection cache, pool, proxies and registry of one cluster.",
        "tags": ["tidal", "vllm"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": [_source(), _choice("role", "role"), _choice("engine", "engine_id")]},
        "panels": panels,
    }


def _panel(
    number: int, name: str, unit: str, tells: str, queries: list[Query], place: dict[str, int]
) -> dict[str, Any]:
    stat = name.startswith("stat: ")
    defaults: dict[str, Any] = {"unit": unit}
    if unit == "percentunit" and not stat and name != "Where the time goes":
        defaults |= {"min": 0, "max": 1}
    elif not stat:
        defaults |= {"min": 0}
    options: dict[str, Any] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if stat:
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "graphMode": "area"}
    else:
        defaults["custom"] = {"drawStyle": "line", "fillOpacity": 8, "lineWidth": 2, "showPoints": "never"}
    return {
        "id": number,
        "type": "stat" if stat else "timeseries",
        "title": name.removeprefix("stat: "),
        "description": tells,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for at, (query, legend) in enumerate(queries)
        ],
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "data source", "type": "datasource", "query": "prometheus", "hide": 0}


def _choice(name: str, label: str) -> dict[str, Any]:
    query = f"label_values(tidal:kv_layers, {label})"
    return {
        "name": name,
        "label": label.replace("_", " "),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
