# SPDX-License-Identifier: Apache-2.0
"""The proxy's Prometheus metrics, in a registry of their own, and the last finished requests.

What happens is counted as it happens; what is so now is read from the proxy's state when somebody asks. Used from the
event loop's thread only.
"""

from __future__ import annotations

import enum
from collections import Counter as Tally
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tidal_connector.proxy.roster import Engine
from tidal_connector.proxy.view import ProxyState, Sample
from tidal_connector.registry.members import State

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)
_RECENT = 1000


class Outcome(enum.StrEnum):
    """How a client's request ended."""

    OK = "ok"
    REFUSED = "refused"
    """4xx, by the proxy or by an engine."""
    ENGINE_ERROR = "engine_error"
    TIMEOUT = "timeout"
    STREAM_ERROR = "stream_error"
    """An error after the client had the first byte."""
    DISCONNECTED = "disconnected"
    """The client left, or took nothing for ``stall_s``."""
    UNPAIRED = "unpaired"
    """503: no prefill engine that fits a decode engine was ready and reachable."""
    QUEUE_FULL = "queue_full"
    """429: as many requests were served and waited as may."""


class Meters:
    """Counters, gauges and histograms of one proxy.

    Attributes:
        recent: the last finished requests, oldest first.
        outcomes: finished requests by outcome.
        attempts_made, retries_made: pairs dispatched, and those that were not a request's first.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.recent: deque[Sample] = deque(maxlen=_RECENT)
        self._served: Tally[tuple[str, str]] = Tally()
        self._failed: Tally[tuple[str, str]] = Tally()
        self.requests = Counter(
            "tidal_proxy_requests", "Client requests by outcome", ["outcome"], registry=self.registry
        )
        self._attempts = Counter("tidal_proxy_attempts", "Pairs of engine requests dispatched", registry=self.registry)
        self._retries = Counter("tidal_proxy_retries", "Attempts after the first of a request", registry=self.registry)
        self.leg_failures = self._counter("leg_failures", "Engine requests that failed, by role and engine")
        self.legs_served = self._counter("legs_answered", "Engine requests that were answered, by role and engine")
        self._now = {
            name: Gauge(f"tidal_proxy_{name}", text, registry=self.registry)
            for name, text in (
                ("in_flight", "Client requests that engines work on"),
                ("max_in_flight", "Client requests that may be in flight"),
                ("queued", "Client requests that wait for their turn or for engines"),
                ("max_queue", "Client requests that may wait"),
                ("longest_silence_seconds", "How long the request that waits longest for its first byte has waited"),
                ("ready", "1 if a pair of engines can be formed"),
                ("pairs", "Pairs of engines that can be formed"),
                ("barred_pairs", "Pairs of ready engines that do not fit and are not formed"),
            )
        }
        self._registry_now = {
            name: Gauge(f"tidal_proxy_registry_{name}", text, ["url"], registry=self.registry)
            for name, text in (
                ("fresh", "1 while the registry answers; 0: the engines are those last heard of"),
                ("age_seconds", "Seconds since the registry was last known to answer"),
                ("odd_entries", "Entries of the registry that cannot be used"),
            )
        }
        self._engines = {
            name: Gauge(f"tidal_proxy_{name}", text, ["role", "engine"], registry=self.registry)
            for name, text in (
                ("outstanding_tokens", "Tokens dispatched to an engine and not answered yet"),
                ("outstanding_requests", "Requests of this proxy that an engine works on"),
                ("engine_reachable", "0 while an engine gets nothing because no connection to it could be opened"),
            )
        }
        self._states = Gauge(
            "tidal_proxy_engine_state",
            "1 for the state that an engine is in",
            ["role", "engine", "state"],
            registry=self.registry,
        )
        self.request_seconds = self._seconds("tidal_proxy_request_seconds", "A client request, to its last byte")
        self.queue_seconds = self._seconds("tidal_proxy_queue_seconds", "A client request's wait for turn and engines")
        self.prefill_seconds = self._seconds("tidal_proxy_prefill_seconds", "A prefill leg that succeeded")
        self.first_byte_seconds = self._seconds(
            "tidal_proxy_first_byte_seconds", "From the client's request to the first byte of the answer"
        )
        self.outcomes: dict[str, int] = dict.fromkeys(map(str, Outcome), 0)
        self.attempts_made = 0
        self.retries_made = 0
        for outcome in Outcome:
            self.requests.labels(outcome)

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_SECONDS, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"tidal_proxy_{name}", text, ["role", "engine"], registry=self.registry)

    def ended(self, outcome: Outcome) -> None:
        """Count a request that ended, also one that never got as far as to be a sample."""
        self.outcomes[outcome] += 1
        self.requests.labels(outcome).inc()

    def finished(self, sample: Sample) -> None:
        """Count a finished request."""
        self.ended(Outcome(sample.outcome))
        self.recent.append(sample)
        self.request_seconds.observe(sample.seconds)
        self.queue_seconds.observe(sample.queued_s)
        if sample.first_byte_s is not None:
            self.first_byte_seconds.observe(sample.first_byte_s)

    def text(self, state: ProxyState) -> bytes:
        """Return the exposition text.

        Args:
            state: of the proxy now.
        """
        now = self._now
        now["in_flight"].set(state.in_flight)
        now["max_in_flight"].set(state.max_in_flight)
        now["queued"].set(state.queued)
        now["max_queue"].set(state.max_queue)
        now["longest_silence_seconds"].set(state.silent_s)
        now["ready"].set(state.ready)
        now["pairs"].set(state.pairs)
        now["barred_pairs"].set(sum(bool(pair.barred) for pair in state.traffic))
        if state.registry is not None:
            url, shown = state.registry.url, self._registry_now
            shown["fresh"].labels(url).set(state.registry.fresh)
            shown["age_seconds"].labels(url).set(float("nan") if state.registry.age_s is None else state.registry.age_s)
            shown["odd_entries"].labels(url).set(len(state.registry.odd))
        for gauge in (*self._engines.values(), self._states):
            gauge.clear()  # of engines that are gone
        for engine in state.engines:
            names = engine.role, engine.engine
            self._engines["outstanding_tokens"].labels(*names).set(engine.tokens)
            self._engines["outstanding_requests"].labels(*names).set(engine.requests)
            self._engines["engine_reachable"].labels(*names).set(engine.reachable)
            for each in State:
                self._states.labels(*names, each).set(engine.state == each)
        return generate_latest(self.registry)

    def attempted(self) -> None:
        """Count a dispatched pair."""
        self.attempts_made += 1
        self._attempts.inc()

    def retried(self) -> None:
        """Count a pair that is not a request's first."""
        self.retries_made += 1
        self._retries.inc()

    def served(self, engine: Engine) -> None:
        """Count an answer of an engine."""
        self._served[engine.key] += 1
        self.legs_served.labels(engine.side, engine.engine).inc()

    def failed(self, engine: Engine) -> None:
        """Count a failure of an engine."""
        self._failed[engine.key] += 1
        self.leg_failures.labels(engine.side, engine.engine).inc()

    def engine_counts(self, engine: Engine) -> tuple[int, int]:
        """Return how many requests an engine has answered and how many failed on it."""
        return self._served[engine.key], self._failed[engine.key]
