# SPDX-License-Identifier: Apache-2.0
"""The package's counters as vLLM's connector statistics and as Prometheus series ``tidal:<name>``.

A worker reports what its counters gained since its last report; gauges travel as they are. Nothing here
raises into the
serving path: an unknown name is skipped, a negative gain does not occur (``Counters`` only rises).
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from tidal_connector.metrics import COUNTERS, GAUGES


class TidalStats(KVConnectorStats):
    """Gains of counters and values of gauges over one interval; ``data`` maps name to number."""

    def reset(self) -> None:
        """Forget the interval."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TidalStats:
        """Add another interval or worker: counters add up, the later gauge wins."""
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0.0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's periodic log line shows."""
        return {name: round(value, 6) for name, value in sorted(self.data.items()) if value}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.get(name) for name in COUNTERS)


class Gains:
    """Turns cumulative snapshots into :class:`TidalStats`; one per worker."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def since_last(self, snapshot: dict[str, float]) -> TidalStats | None:
        """Return the gains since the last call, or None where neither a counter nor a gauge changed."""
        changed = {name: value for name, value in snapshot.items() if value != self._last.get(name, 0.0)}
        gains = {n: v if n in GAUGES else v - self._last.get(n, 0.0) for n, v in changed.items()}
        self._last = snapshot
        return TidalStats(data=gains) if gains else None


class TidalPromMetrics(KVConnectorPromMetrics):
    """Registers one series per counter and gauge of :mod:`tidal_connector.metrics`, labelled per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[tuple[str, int], Any] = {}
        for kind, names in ((metric_types[Counter], COUNTERS), (metric_types[Gauge], GAUGES)):
            for name, text in names.items():
                family = kind(name=f"tidal:{name}", documentation=text, labelnames=labelnames)
                for engine, values in per_engine_labelvalues.items():
                    self._series[name, engine] = family.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval of one engine."""
        for name, value in transfer_stats_data.items():
            series = self._series.get((name, engine_idx))
            if series is None:
                continue
            if name in GAUGES:
                series.set(value)
            elif value > 0:
                series.inc(value)
