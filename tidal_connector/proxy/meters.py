# SPDX-License-Identifier: Apache-2.0
"""The proxy's Prometheus metrics, in a registry of their own. Used from the event loop's thread only."""

from __future__ import annotations

import enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tidal_connector.proxy.policy import Ledger

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)


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
    """503: no prefill engine fits a decode engine."""


class Meters:
    """Counters, gauges and histograms of one proxy."""

    def __init__(self, prefill: Ledger, decode: Ledger) -> None:
        self.registry = CollectorRegistry()
        self._ledgers = {"prefill": prefill, "decode": decode}
        self.requests = Counter(
            "tidal_proxy_requests", "Client requests by outcome", ["outcome"], registry=self.registry
        )
        self.attempts = Counter("tidal_proxy_attempts", "Pairs of engine requests dispatched", registry=self.registry)
        self.retries = Counter("tidal_proxy_retries", "Attempts after the first of a request", registry=self.registry)
        self.leg_failures = Counter(
            "tidal_proxy_leg_failures",
            "Engine requests that failed, by role and engine",
            ["role", "engine"],
            registry=self.registry,
        )
        self.barred_pairs = Gauge(
            "tidal_proxy_barred_pairs", "Pairs of engines that do not fit and are not formed", registry=self.registry
        )
        self.in_flight = Gauge("tidal_proxy_in_flight", "Client requests now open", registry=self.registry)
        self.outstanding = Gauge(
            "tidal_proxy_outstanding_tokens",
            "Tokens dispatched to an engine and not answered yet",
            ["role", "engine"],
            registry=self.registry,
        )
        self.request_seconds = self._seconds("tidal_proxy_request_seconds", "A client request, to its last byte")
        self.prefill_seconds = self._seconds("tidal_proxy_prefill_seconds", "A prefill leg that succeeded")
        self.first_byte_seconds = self._seconds(
            "tidal_proxy_first_byte_seconds", "From the client's request to the first byte of the answer"
        )
        for outcome in Outcome:
            self.requests.labels(outcome)

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_SECONDS, registry=self.registry)

    def text(self) -> bytes:
        """Return the exposition text."""
        for role, ledger in self._ledgers.items():
            for engine, tokens in ledger.outstanding.items():
                self.outstanding.labels(role, engine).set(tokens)
        return generate_latest(self.registry)
